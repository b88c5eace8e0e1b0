"""The wire form of positions, and how reports are grouped for streaming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workers import rank_actor
from workers.contract import Position, RankFailure, RankPhase
from workers.rank_actor import FRAME, batches, pack_position, unpack_position


@pytest.mark.parametrize("phase", list(RankPhase))
@pytest.mark.parametrize(("trial_index", "step"), [(None, None), (0, None), (0, 0), (599, 99)])
def test_a_position_survives_the_wire(phase: RankPhase, trial_index: int | None, step: int | None) -> None:
    position = Position(7, phase, trial_index, step, 2**40)
    assert unpack_position(7, pack_position(position)) == position


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="phase 200"):
        unpack_position(0, FRAME.pack(200, 0, 0, 1))


def items(count: int) -> Iterator[RankFailure]:
    for index in range(count):
        yield RankFailure(index, "n", RankPhase.TIE, 0, 0, "c", "m", collateral=False)


def test_a_failure_never_waits() -> None:
    assert [len(batch) for batch in batches(items(2))] == [1, 1]


def test_reports_share_a_batch_and_the_last_one_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_actor, "FLUSH_INTERVAL_S", 3600.0)
    reports: list[str] = ["a", "b", "c"]
    assert list(batches(iter(reports))) == [["a", "b", "c"]]  # type: ignore[arg-type]
    monkeypatch.setattr(rank_actor, "FLUSH_INTERVAL_S", 0.0)
    assert list(batches(iter(reports))) == [["a"], ["b"], ["c"]]  # type: ignore[arg-type]
