"""The ledger: who held what from when to when, and that two attempts of one validation never did at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError

from service.domain.validation import FailureDetail, Validation
from service.storage import ledger, queue, reaping, validations
from service.storage.ledger import Tenure
from service.storage.session import Database
from service.storage.tables import attempts
from service.storage.tables import validations as rows

Enqueue = Callable[..., Awaitable[Validation]]
Hold = Callable[..., Awaitable[queue.Claim]]


async def test_a_takeover_ends_one_entry_before_it_opens_the_next(database: Database, hold: Hold) -> None:
    claim = await hold("ledger-takeover")
    async with database.transaction() as connection:
        assert await ledger.reserve(connection, claim.id, 1, ["n1", "n2"])
    await _expire(database, claim.id)
    async with database.transaction() as connection:
        assert await reaping.requeue_expired(connection, cluster="ledger-takeover") == [claim.id]
    async with database.transaction() as connection:
        await queue.claim(connection, cluster="ledger-takeover", dispatcher_id="d2", lease_s=60, limit=1)
    first, second = await _entries(database, claim.id)
    assert (first.attempt, first.dispatcher_id, first.nodes, first.outcome) == (1, "d1", ("n1", "n2"), "requeued")
    assert (second.attempt, second.dispatcher_id, second.nodes, second.outcome) == (2, "d2", (), None)
    assert (first.cluster, first.num_ranks, second.ended_at) == ("ledger-takeover", 4, None)
    assert first.reserved_at is not None
    assert first.ended_at is not None
    assert first.claimed_at <= first.reserved_at <= first.ended_at <= second.claimed_at
    async with database.read() as connection:
        assert await ledger.overlaps(connection) == []


async def test_every_end_closes_the_entry_and_waiting_has_none(
    database: Database, hold: Hold, enqueue: Enqueue
) -> None:
    ends = {
        "requeued": lambda c, i: reaping.lose(c, i, 1, "the driver process died"),
        "handed_back": lambda c, i: queue.release(c, i, 1, "stops"),
        "failed": lambda c, i: queue.fail(c, i, 1, FailureDetail("x", "x")),
        "cancelled": lambda c, i: queue.cancel(c, i, 1),
    }
    for outcome, end in ends.items():
        claim = await hold(f"ledger-{outcome}")
        async with database.transaction() as connection:
            assert await end(connection, claim.id)
        (entry,) = await _entries(database, claim.id)
        assert (entry.outcome, entry.ended_at is not None) == (outcome, True)
    waiting = await enqueue("ledger-waiting")
    async with database.transaction() as connection:
        await validations.request_cancel(connection, waiting.id)
    assert await _entries(database, waiting.id) == ()


async def test_a_claim_that_rolls_back_leaves_no_entry(database: Database, enqueue: Enqueue) -> None:
    waiting = await enqueue("ledger-rollback")
    async with database.engine.connect() as connection:
        assert await queue.claim(connection, cluster="ledger-rollback", dispatcher_id="d1", lease_s=60, limit=1)
        await connection.rollback()
    assert await _entries(database, waiting.id) == ()


async def test_the_database_refuses_a_second_open_entry_and_a_changed_end(database: Database, hold: Hold) -> None:
    claim = await hold("ledger-refuses")
    copy = (
        "INSERT INTO attempts (validation_id, attempt, cluster, dispatcher_id, num_ranks, claimed_at) "
        "SELECT validation_id, 2, cluster, 'd2', num_ranks, clock_timestamp() FROM attempts WHERE validation_id = :id"
    )
    with pytest.raises(IntegrityError, match="uq_attempts_open"):
        await _execute(database, copy, claim.id)
    async with database.transaction() as connection:
        assert await queue.release(connection, claim.id, 1, "stops")
    reopen = "UPDATE attempts SET ended_at = NULL, outcome = NULL WHERE validation_id = :id"
    with pytest.raises(IntegrityError, match="a row of attempts has ended"):
        await _execute(database, reopen, claim.id)


async def test_overlaps_are_found_where_a_clock_that_went_back_made_some(database: Database, hold: Hold) -> None:
    claim = await hold("ledger-overlap")
    async with database.engine.connect() as connection:  # rolls back: later tests expect none
        assert await queue.release(connection, claim.id, 1, "stops")
        await connection.execute(
            attempts.insert().from_select(
                ["validation_id", "attempt", "cluster", "dispatcher_id", "num_ranks", "claimed_at"],
                select(
                    attempts.c.validation_id,
                    attempts.c.attempt + 1,
                    attempts.c.cluster,
                    attempts.c.dispatcher_id,
                    attempts.c.num_ranks,
                    attempts.c.ended_at - text("interval '1 microsecond'"),
                ).where(attempts.c.validation_id == claim.id),
            )
        )
        assert await ledger.overlaps(connection) == [(claim.id, 1, 2)]


async def _entries(database: Database, validation_id: str) -> tuple[Tenure, ...]:
    async with database.read() as connection:
        return await ledger.of_validation(connection, validation_id)


async def _execute(database: Database, statement: str, validation_id: str) -> None:
    async with database.transaction() as connection:
        await connection.execute(text(statement), {"id": validation_id})


async def _expire(database: Database, validation_id: str) -> None:
    past = func.now() - text("interval '1 second'")
    async with database.transaction() as connection:
        await connection.execute(update(rows).where(rows.c.id == validation_id).values(lease_expires_at=past))
