"""Per-rank rows: what COPY writes is what the pages return, bit for bit, in a fixed order."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from service.domain.cursor import Page
from service.domain.errors import CursorError
from service.storage import queue
from service.storage import reports as storage
from service.storage.session import Database
from workers.contract import Judgement, OrderingName, ProbeName, StepReport
from workers.encoding import plain

Hold = Callable[..., Awaitable[queue.Claim]]
PLACE = ("trial_index", "probe", "ordering", "repeat", "step", "world_rank", "dp_rank", "pp_rank", "tp_rank")
ReadPage = Callable[..., Awaitable[Page[dict[str, Any]]]]


@pytest.fixture
async def stored(database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...]) -> str:
    """The id of a completed validation with every report."""
    claim = await hold("reports", running=True)
    async with database.transaction() as connection:
        # Backwards: pages must not owe their order to the order of writing.
        assert await queue.complete(connection, claim.id, 1, judgement, reports[::-1], [], {})
    return claim.id


async def test_every_figure_comes_back_bit_for_bit(
    database: Database, stored: str, reports: tuple[StepReport, ...]
) -> None:
    rows = await _all_rows(database, storage.ranks_page, stored, limit=500)
    assert len(rows) == len(reports)
    for row, report in zip(rows, reports, strict=True):
        (measured,) = report.divergence
        for place in (
            "trial_index",
            "probe",
            "ordering",
            "repeat",
            "step",
            "world_rank",
            "dp_rank",
            "pp_rank",
            "tp_rank",
        ):
            assert row[place] == getattr(report, place)
        for name in measured.__slots__:
            if name != "deviations":
                assert _bits(row[name]) == _bits(getattr(measured, name)), name
        assert row["deviations"] == plain(measured.deviations)
        assert row["loss"] == report.loss
        tied = report.tied
        assert row["tied_unequal_elements"] == (tied and tied.unequal_elements)
        assert _bits(row["tied_max_abs_difference"]) == _bits(tied and tied.max_abs_difference)
        norm = report.grad_norm
        assert norm is not None
        stored_norm = (row["grad_norm"], row["grad_norm_reference"], row["grad_norm_allowed_error"])
        assert list(map(_bits, stored_norm)) == list(map(_bits, (norm.value, norm.reference, norm.allowed_error)))
        assert row["compute_seconds"] == report.compute_seconds
        assert row["weights_max_abs_difference"] == (tied and tied.weights_max_abs_difference)


async def test_trace_rows_come_in_the_order_of_the_phases(
    database: Database, stored: str, reports: tuple[StepReport, ...]
) -> None:
    rows = await _all_rows(database, storage.trace_page, stored, limit=500)
    first_step = [row for row in rows if (row["trial_index"], row["step"]) == (0, 0)]
    phases = ["local", "scattered", "layernorm", "tied", "normalized", "final"]
    assert [row["phase"] for row in first_step[::8]] == phases
    key = [(row["world_rank"], row["end"], row["shard"]) for row in first_step[:8]]
    assert key == sorted(key)
    assert len(rows) == sum(len(report.trace) for report in reports)
    assert {row["digest"] for row in rows} == {trace.digest for report in reports for trace in report.trace}


@pytest.mark.parametrize("read_page", [storage.ranks_page, storage.trace_page])
@pytest.mark.parametrize("limit", [1, 3, 16])
async def test_pages_of_any_size_give_the_same_rows(
    database: Database, stored: str, read_page: ReadPage, limit: int
) -> None:
    whole = await _all_rows(database, read_page, stored, limit=500)
    assert str(await _all_rows(database, read_page, stored, limit=limit)) == str(whole)


@pytest.mark.parametrize("read_page", [storage.ranks_page, storage.trace_page])
async def test_filters_choose_trial_and_step(database: Database, stored: str, read_page: ReadPage) -> None:
    rows = await _all_rows(
        database, read_page, stored, limit=500, probe=ProbeName.GPT, ordering=OrderingName.FIXED, step=1
    )
    assert rows
    assert {(row["trial_index"], row["ordering"], row["step"]) for row in rows} == {(1, "fixed", 1)}
    assert await _all_rows(database, read_page, stored, limit=500, probe=ProbeName.EXACT) == []
    assert await _all_rows(database, read_page, "val_unknown", limit=500) == []


async def test_a_cursor_is_good_for_its_own_listing_only(database: Database, stored: str) -> None:
    async with database.read() as connection:
        page = await storage.ranks_page(connection, stored, limit=1)
        with pytest.raises(CursorError):
            await storage.trace_page(connection, stored, cursor=page.next_cursor)


async def test_no_reports_are_no_rows(database: Database, hold: Hold, judgement: Judgement) -> None:
    claim = await hold("none", running=True)
    async with database.transaction() as connection:
        assert await queue.complete(connection, claim.id, 1, judgement, (), [], {})
    assert await _all_rows(database, storage.ranks_page, claim.id, limit=5) == []


def _bits(value: object) -> object:
    """NaN equals itself and -0.0 differs from 0.0, as stored numbers should."""
    return struct.pack(">d", value) if isinstance(value, float | int) else value


async def _all_rows(
    database: Database, read_page: ReadPage, validation_id: str, *, limit: int, **filters: Any
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        async with database.read() as connection:
            page = await read_page(connection, validation_id, cursor=cursor, limit=limit, **filters)
        assert len(page.items) <= limit
        rows += page.items
        cursor = page.next_cursor
        if cursor is None:
            return rows
