"""Whoever lost an attempt, or whose validation has ended, may still be alive and about to write: nothing changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError

from service.domain.validation import EventType, FailureDetail, State
from service.storage import events, ledger, queue, reaping, validations
from service.storage.session import Connection, Database
from service.storage.tables import attempts, divergence, rank_steps, trace, trials
from service.storage.tables import events as event_rows
from service.storage.tables import validations as rows
from workers.contract import Judgement, StepReport

Hold = Callable[..., Awaitable[queue.Claim]]
Write = Callable[[Connection, str, Judgement, tuple[StepReport, ...]], Awaitable[Any]]

LATE: dict[str, Write] = {
    "mark_running": lambda c, i, _j, _r: queue.mark_running(c, i, 1, [], {"late_s": 1}),
    "complete": lambda c, i, j, r: queue.complete(c, i, 1, j, r, [], {}),
    "fail": lambda c, i, _j, r: queue.fail(c, i, 1, FailureDetail("late", "late"), r, {}),
    "cancel": lambda c, i, _j, _r: queue.cancel(c, i, 1, "late"),
    "release": lambda c, i, _j, _r: queue.release(c, i, 1, "late"),
    "append": lambda c, i, _j, _r: events.append(c, i, EventType.STEP, {}, attempt=1),
    "reserve": lambda c, i, _j, _r: ledger.reserve(c, i, 1, ["late"]),
    "extend": lambda c, i, _j, _r: _still_held(c, i),
}
"""Everything that an attempt writes; each says whether it was still its own."""


async def _still_held(connection: Connection, validation_id: str) -> bool:
    held = await queue.extend(connection, dispatcher_id="d1", held=[(validation_id, 1)], lease_s=999)
    return bool(held.still_held)


async def _taken_over(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    await _expire(connection, claim.id)
    assert await reaping.requeue_expired(connection, cluster=cluster) == [claim.id]
    (again,) = await queue.claim(connection, cluster=cluster, dispatcher_id="d2", lease_s=60, limit=1)
    assert (again.id, again.attempt) == (claim.id, 2)


async def _taken_over_and_running(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    await _taken_over(connection, claim, cluster)
    assert await queue.mark_running(connection, claim.id, 2, [], {})


async def _taken_over_by_the_same(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    await _expire(connection, claim.id)
    await reaping.requeue_expired(connection, cluster=cluster)
    assert await queue.claim(connection, cluster=cluster, dispatcher_id="d1", lease_s=60, limit=1)


async def _requeued(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    assert await queue.release(connection, claim.id, 1, "dispatcher d1 stops")


async def _cancelled(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    await validations.request_cancel(connection, claim.id)
    assert await queue.cancel(connection, claim.id, 1)


async def _failed(connection: Connection, claim: queue.Claim, cluster: str) -> None:
    assert await queue.fail(connection, claim.id, 1, FailureDetail("rank_died", "first"))


CHANGES = {
    change.__name__.strip("_"): change
    for change in (_taken_over, _taken_over_and_running, _taken_over_by_the_same, _requeued, _cancelled, _failed)
}


@pytest.mark.parametrize("change", [*CHANGES, "completed"])
async def test_a_late_write_changes_nothing(
    database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...], change: str
) -> None:
    cluster = f"late-{change}"
    claim = await hold(cluster, running=True)
    async with database.transaction() as connection:
        if change == "completed":
            assert await queue.complete(connection, claim.id, 1, judgement, reports, [], {})
        else:
            await CHANGES[change](connection, claim, cluster)
    before = await _everything(database, claim.id)
    for name, write in LATE.items():
        async with database.transaction() as connection:
            assert not await write(connection, claim.id, judgement, reports), name
        assert await _everything(database, claim.id) == before, name


@pytest.mark.parametrize("name", [name for name in LATE if name != "complete"])
async def test_each_of_these_writes_does_change_a_held_attempt(
    database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...], name: str
) -> None:
    claim = await hold(f"held-{name}", running=name != "mark_running")
    before = await _everything(database, claim.id)
    async with database.transaction() as connection:
        assert await LATE[name](connection, claim.id, judgement, reports)
    assert await _everything(database, claim.id) != before


async def test_a_wish_or_an_event_after_the_end_changes_nothing(database: Database, hold: Hold) -> None:
    claim = await hold("late-wish", running=True)
    async with database.transaction() as connection:
        await _failed(connection, claim, "late-wish")
    before = await _everything(database, claim.id)
    async with database.transaction() as connection:
        ended = await validations.request_cancel(connection, claim.id)
        assert ended is not None
        assert ended.state is State.FAILED
        assert await events.append(connection, claim.id, EventType.STEP, {}) is None
    assert await _everything(database, claim.id) == before


@pytest.mark.parametrize("end", [_cancelled, _failed])
@pytest.mark.parametrize(
    "change",
    [
        "state = 'queued', finished_at = NULL, error = NULL, cancel_requested_at = NULL",
        "state = 'completed', verdict = 'pass', error = NULL",
        "reasons = '[]', revision = revision + 1",
        "attempt = attempt + 1",
    ],
)
async def test_the_database_itself_keeps_an_end(
    database: Database, hold: Hold, end: Callable[[Connection, queue.Claim, str], Awaitable[None]], change: str
) -> None:
    claim = await hold("final", running=True)
    async with database.transaction() as connection:
        await end(connection, claim, "final")
    before = await _everything(database, claim.id)
    with pytest.raises(IntegrityError, match="a row of validations has ended and cannot change"):
        async with database.transaction() as connection:
            await connection.execute(text(f"UPDATE validations SET {change} WHERE id = :id"), {"id": claim.id})
    assert await _everything(database, claim.id) == before
    async with database.transaction() as connection:
        await connection.execute(rows.delete().where(rows.c.id == claim.id))
    assert await _everything(database, claim.id) == [[]] * 7


async def _expire(connection: Connection, validation_id: str) -> None:
    past = func.now() - text("interval '1 second'")
    await connection.execute(update(rows).where(rows.c.id == validation_id).values(lease_expires_at=past))


async def _everything(database: Database, validation_id: str) -> list[list[Any]]:
    """Every row of a validation in every table."""
    columns = [table.c.validation_id for table in (attempts, event_rows, trials, rank_steps, divergence, trace)]
    async with database.read() as connection:
        found = [
            (await connection.execute(select(column.table).where(column == validation_id))).all()
            for column in (rows.c.id, *columns)
        ]
    # By their text: NaN equals NaN there.
    return [sorted(map(repr, one)) for one in found]
