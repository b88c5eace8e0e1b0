"""The queue against a real Postgres: concurrent claims, leases, fencing by attempt, takeover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, text, update

from service.domain.cause import Cause
from service.domain.validation import FailureDetail, State, Validation
from service.storage import events, queue, reaping, validations
from service.storage.session import Database
from service.storage.tables import divergence, rank_steps, trace, trials
from service.storage.tables import validations as rows
from workers.contract import Judgement, StepReport, Verdict

Enqueue = Callable[..., Awaitable[Validation]]
Hold = Callable[..., Awaitable[queue.Claim]]


async def test_oldest_first_and_only_of_the_own_cluster(database: Database, enqueue: Enqueue) -> None:
    stored = [await enqueue("fifo") for _ in range(3)]
    await enqueue("fifo-other")
    first = await _claim(database, "fifo", limit=2)
    second = await _claim(database, "fifo", limit=2)
    assert [claim.id for claim in first + second] == [validation.id for validation in stored]


async def test_a_claim_carries_what_the_dispatcher_needs(database: Database, enqueue: Enqueue) -> None:
    validation = await enqueue("carries", request={"steps": 2, "drill": None}, num_ranks=6, deadline_s=33.5)
    (claim,) = await _claim(database, "carries", lease_s=20)
    assert (claim.id, claim.attempt, claim.request) == (validation.id, 1, {"steps": 2, "drill": None})
    assert (claim.num_ranks, claim.deadline_s, claim.created_at) == (6, 33.5, validation.created_at)
    assert 15 < (claim.lease_expires_at - datetime.now(UTC)).total_seconds() <= 20.5


async def test_a_claim_passes_over_rows_that_another_one_is_taking(database: Database, enqueue: Enqueue) -> None:
    one, two = [await enqueue("skip") for _ in range(2)]
    async with database.transaction() as slow, asyncio.timeout(5):
        (first,) = await queue.claim(slow, cluster="skip", dispatcher_id="d1", lease_s=60, limit=1)
        (second,) = await _claim(database, "skip", limit=1)
    assert (first.id, second.id) == (one.id, two.id)


async def test_an_unfinished_claim_that_rolls_back_gives_the_row_back(database: Database, enqueue: Enqueue) -> None:
    stored = await enqueue("rollback")
    async with database.engine.connect() as connection:
        assert await queue.claim(connection, cluster="rollback", dispatcher_id="d1", lease_s=60, limit=1)
        await connection.rollback()
    (claim,) = await _claim(database, "rollback")
    assert (claim.id, claim.attempt) == (stored.id, 1)


async def test_many_claimers_never_get_the_same_row(database: Database, enqueue: Enqueue) -> None:
    stored = {(await enqueue("many")).id for _ in range(40)}

    async def drain(dispatcher_id: str) -> list[str]:
        taken: list[str] = []
        while claims := await _claim(database, "many", dispatcher_id=dispatcher_id, limit=3):
            assert len(claims) <= 3
            taken += [claim.id for claim in claims]
        return taken

    taken = await asyncio.gather(*(drain(f"d{i}") for i in range(8)))
    ids = [validation_id for one in taken for validation_id in one]
    assert len(ids) == len(set(ids))
    # A drain ends when every free row is locked by others, so leftovers are looked for once more.
    ids += await drain("last")
    assert sorted(ids) == sorted(stored)


async def test_the_whole_way_to_a_verdict(
    database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...]
) -> None:
    claim = await hold("way")
    async with database.transaction() as connection:
        assert await queue.mark_running(connection, claim.id, 1, [{"node": "n1"}], {"gang_s": 0.5})
    running = await _get(database, claim.id)
    assert (running.state, running.fingerprint, running.timings) == (State.RUNNING, [{"node": "n1"}], {"gang_s": 0.5})
    async with database.transaction() as connection:
        assert await queue.complete(connection, claim.id, 1, judgement, reports, [{"node": "n2"}], {"total_s": 2})
    done = await _get(database, claim.id)
    assert (done.state, done.verdict, done.cause) == (State.COMPLETED, Verdict.FAIL, Cause.UNKNOWN)
    assert (done.trials, done.reasons) == (judgement.trials, judgement.reasons)
    assert done.observations == judgement.observations
    assert done.collectives == judgement.collectives
    assert (done.fingerprint, done.timings, done.error) == ([{"node": "n2"}], {"total_s": 2}, None)
    assert (done.lease_expires_at, done.attempt) == (None, 1)
    assert done.finished_at is not None
    assert done.started_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert await _event_types(database, claim.id) == ["queued", "claimed", "formed", "completed"]
    assert await _num_rows(database, claim.id) == (1, 16, 16, 192)


async def test_a_verdict_is_stored_with_all_of_its_rows_or_not_at_all(
    database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...]
) -> None:
    claim = await hold("atomic", running=True)
    with pytest.raises(psycopg.errors.UniqueViolation):
        async with database.transaction() as connection:
            await queue.complete(connection, claim.id, 1, judgement, [*reports, reports[0]], [], {})
    assert (await _get(database, claim.id)).state is State.RUNNING
    assert await _num_rows(database, claim.id) == (0, 0, 0, 0)
    assert await _event_types(database, claim.id) == ["queued", "claimed", "formed"]


async def test_a_crash_keeps_its_cause_and_what_was_reported(
    database: Database, hold: Hold, reports: tuple[StepReport, ...]
) -> None:
    claim = await hold("crash")
    detail = FailureDetail("rank_died", "rank 3 was killed by signal 9\0 \ud800", world_rank=3, node="n1", phase="tie")
    async with database.transaction() as connection:
        assert await queue.fail(connection, claim.id, 1, detail, reports[:3], {"gang_s": 1})
    failed = await _get(database, claim.id)
    assert (failed.state, failed.verdict, failed.trials, failed.timings) == (State.FAILED, None, (), {"gang_s": 1})
    assert failed.error == FailureDetail("rank_died", "rank 3 was killed by signal 9\ufffd ?", 3, "n1", "tie")
    assert await _num_rows(database, claim.id) == (0, 3, 3, 36)
    (last,) = (await _events(database, claim.id))[-1:]
    assert last.data["error"]["world_rank"] == 3


async def test_a_leak_is_recorded_when_a_gang_could_not_be_torn_down(database: Database, hold: Hold) -> None:
    clean, leaky = await hold("leak", running=True), await hold("leak")
    async with database.transaction() as connection:
        assert await queue.cancel(connection, clean.id, 1, None)
        assert await queue.cancel(connection, leaky.id, 1, "2 workers on n1 did not end within 5 s")
    assert (await _get(database, clean.id)).reasons == ()
    (reason,) = (await _get(database, leaky.id)).reasons
    assert (reason.code, reason.message) == ("leak", "2 workers on n1 did not end within 5 s")


async def test_results_are_refused_before_the_gang_ran(database: Database, hold: Hold, judgement: Judgement) -> None:
    claim = await hold("starting")
    async with database.transaction() as connection:
        assert not await queue.complete(connection, claim.id, 1, judgement, (), [], {})
    assert (await _get(database, claim.id)).state is State.STARTING


async def test_of_two_that_finish_at_once_one_wins(
    database: Database, hold: Hold, judgement: Judgement, reports: tuple[StepReport, ...]
) -> None:
    claim = await hold("finish", running=True)

    async def finish() -> bool:
        async with database.transaction() as connection:
            return await queue.complete(connection, claim.id, 1, judgement, reports, [], {})

    async def crash() -> bool:
        async with database.transaction() as connection:
            return await queue.fail(connection, claim.id, 1, FailureDetail("x", "x"))

    assert sorted(await asyncio.gather(finish(), crash(), finish(), crash())) == [False, False, False, True]
    assert (await _event_types(database, claim.id))[:3] == ["queued", "claimed", "formed"]
    assert len(await _event_types(database, claim.id)) == 4


async def test_a_lapsed_lease_gives_the_validation_to_the_next(database: Database, hold: Hold) -> None:
    claim = await hold("lapse", running=True)
    assert await _requeue(database, "lapse") == []
    await _expire(database, claim.id)
    assert await _requeue(database, "another") == []
    assert await _requeue(database, "lapse") == [claim.id]
    waiting = await _get(database, claim.id)
    assert (waiting.state, waiting.attempt, waiting.dispatcher_id) == (State.QUEUED, 1, None)
    assert (waiting.started_at, waiting.fingerprint) == (None, None)
    assert (await _event_types(database, claim.id))[-1] == "requeued"


async def test_several_who_requeue_at_once_requeue_once(database: Database, hold: Hold) -> None:
    claims = [await hold("requeue-race") for _ in range(10)]
    for claim in claims:
        await _expire(database, claim.id)
    found = await asyncio.gather(*(_requeue(database, "requeue-race") for _ in range(4)))
    assert sorted(i for ids in found for i in ids) == sorted(claim.id for claim in claims)


async def test_attempts_are_limited(database: Database, hold: Hold) -> None:
    claim = await hold("limit")
    for attempt in (1, 2):
        await _expire(database, claim.id)
        assert await _requeue(database, "limit") == [claim.id]
        (again,) = await _claim(database, "limit", dispatcher_id=f"d{attempt + 1}")
        assert again.attempt == attempt + 1
    await _expire(database, claim.id)
    assert await _requeue(database, "limit") == []
    failed = await _get(database, claim.id)
    assert failed.state is State.FAILED
    assert failed.error is not None
    assert failed.error.code == "attempts_exhausted"
    assert "d3" in failed.error.message


async def test_a_stop_in_good_order_uses_up_no_attempt(database: Database, hold: Hold) -> None:
    claim = await hold("rolling")
    for attempt in range(1, 6):
        async with database.transaction() as connection:
            assert await queue.release(connection, claim.id, attempt, "stops")
        (again,) = await _claim(database, "rolling")
        assert again.attempt == attempt + 1
    for attempt in (6, 7):
        async with database.transaction() as connection:
            assert await reaping.lose(connection, claim.id, attempt, "the driver process died")
        await _claim(database, "rolling")
    async with database.transaction() as connection:
        assert not await reaping.lose(connection, claim.id, 7, "late")
        assert await reaping.lose(connection, claim.id, 8, "the driver process died")
    failed = await _get(database, claim.id)
    assert failed.error is not None
    assert failed.error.code == "attempts_exhausted"
    assert "the driver process died, the last of 3 lost attempts" in failed.error.message


async def test_a_wish_to_cancel_survives_a_lost_dispatcher(database: Database, hold: Hold) -> None:
    claim = await hold("wish", running=True)
    async with database.transaction() as connection:
        await validations.request_cancel(connection, claim.id)
    await _expire(database, claim.id)
    assert await _requeue(database, "wish") == []
    cancelled = await _get(database, claim.id)
    assert cancelled.state is State.CANCELLED
    assert [reason.code for reason in cancelled.reasons] == ["leak"]


async def test_renewal_says_what_is_lost_and_what_should_end(database: Database, hold: Hold) -> None:
    kept, wanted, lost, foreign = [await hold("renew") for _ in range(3)] + [await hold("renew", dispatcher_id="d2")]
    async with database.transaction() as connection:
        await validations.request_cancel(connection, wanted.id)
    await _expire(database, lost.id)
    await _requeue(database, "renew")
    pairs = [(claim.id, claim.attempt) for claim in (kept, wanted, lost, foreign)] + [(kept.id, 7)]
    async with database.transaction() as connection:
        held = await queue.extend(connection, dispatcher_id="d1", held=pairs, lease_s=600)
        assert await queue.extend(connection, dispatcher_id="d1", held=[], lease_s=600) == queue.Held(
            frozenset(), frozenset()
        )
    assert held == queue.Held(frozenset(pairs[:2]), frozenset([pairs[1]]))
    renewed = (await _get(database, kept.id)).lease_expires_at
    assert renewed is not None
    assert (renewed - kept.lease_expires_at).total_seconds() > 500
    assert (await _get(database, foreign.id)).lease_expires_at == foreign.lease_expires_at


async def test_a_late_renewal_keeps_what_nobody_took(database: Database, hold: Hold) -> None:
    claim = await hold("late")
    await _expire(database, claim.id)
    async with database.transaction() as connection:
        held = await queue.extend(connection, dispatcher_id="d1", held=[(claim.id, 1)], lease_s=60)
    assert held.still_held == {(claim.id, 1)}
    assert await _requeue(database, "late") == []


async def test_a_dispatcher_that_stops_gives_its_work_back_at_once(database: Database, hold: Hold) -> None:
    claim = await hold("release")
    async with database.transaction() as connection:
        assert await queue.release(connection, claim.id, 1, "dispatcher d1 stops")
    (again,) = await _claim(database, "release")
    assert (again.id, again.attempt) == (claim.id, 2)


async def test_what_is_given_back_although_it_should_end_does_end(database: Database, hold: Hold) -> None:
    claim = await hold("release-wish", running=True)
    async with database.transaction() as connection:
        await validations.request_cancel(connection, claim.id)
        assert not await queue.release(connection, claim.id, 2, "another attempt")
        assert await queue.release(connection, claim.id, 1, "dispatcher d1 stops")
    cancelled = await _get(database, claim.id)
    assert (cancelled.state, cancelled.reasons) == (State.CANCELLED, ())


@pytest.mark.parametrize(
    "change",
    [
        "state = 'completed', finished_at = now(), lease_expires_at = NULL",
        "state = 'failed', finished_at = now(), lease_expires_at = NULL",
        "state = 'cancelled', lease_expires_at = NULL",
        "state = 'queued'",
        "state = 'queued', lease_expires_at = NULL, cancel_requested_at = now()",
        "state = 'done'",
        "verdict = 'pass'",
        "lease_expires_at = NULL",
        "dispatcher_id = NULL",
    ],
)
async def test_the_database_refuses_rows_that_contradict_themselves(
    database: Database, hold: Hold, change: str
) -> None:
    claim = await hold("contradiction", running=True)
    with pytest.raises(Exception, match="violates check constraint"):
        async with database.transaction() as connection:
            await connection.execute(text(f"UPDATE validations SET {change} WHERE id = :id"), {"id": claim.id})


async def _claim(
    database: Database, cluster: str, *, dispatcher_id: str = "d1", lease_s: float = 60, limit: int = 10
) -> list[queue.Claim]:
    async with database.transaction() as connection:
        return await queue.claim(connection, cluster=cluster, dispatcher_id=dispatcher_id, lease_s=lease_s, limit=limit)


async def _requeue(database: Database, cluster: str) -> list[str]:
    async with database.transaction() as connection:
        return await reaping.requeue_expired(connection, cluster=cluster)


async def _expire(database: Database, validation_id: str) -> None:
    past = func.now() - text("interval '1 second'")
    async with database.transaction() as connection:
        await connection.execute(update(rows).where(rows.c.id == validation_id).values(lease_expires_at=past))


async def _get(database: Database, validation_id: str) -> Validation:
    async with database.read() as connection:
        found = await validations.get(connection, validation_id)
    assert found is not None
    return found


async def _events(database: Database, validation_id: str) -> tuple[Any, ...]:
    async with database.read() as connection:
        return await events.read(connection, validation_id)


async def _event_types(database: Database, validation_id: str) -> list[str]:
    return [event.type for event in await _events(database, validation_id)]


async def _num_rows(database: Database, validation_id: str) -> tuple[int, ...]:
    """Stored trials, rank steps, divergence rows and trace rows."""
    async with database.read() as connection:
        tables = (trials, rank_steps, divergence, trace)
        queries = [select(func.count()).where(table.c.validation_id == validation_id) for table in tables]
        return tuple([(await connection.execute(query)).scalar_one() for query in queries])


async def test_what_nobody_takes_up_fails_after_a_bounded_wait(database: Database, enqueue: Enqueue) -> None:
    old, young = await enqueue("expire"), await enqueue("expire")
    foreign = await enqueue("expire-other")
    await _age(database, old.id, foreign.id)
    async with database.transaction() as connection:
        assert await reaping.expire_waiting(connection, cluster="expire", wait_s=3000) == [old.id]
    failed = await _get(database, old.id)
    assert failed.error is not None
    assert (failed.state, failed.error.code) == (State.FAILED, "queue_wait_expired")
    assert "3000 s in the queue of cluster 'expire'" in failed.error.message
    assert (await _event_types(database, old.id))[-1] == "failed"
    assert [(await _get(database, each)).state for each in (young.id, foreign.id)] == [State.QUEUED] * 2


async def test_what_was_given_back_begins_to_wait_anew(database: Database, hold: Hold) -> None:
    claim = await hold("anew")
    await _age(database, claim.id)
    async with database.transaction() as connection:
        assert await reaping.expire_waiting(connection, cluster="anew", wait_s=3000) == []  # held, not waiting
        assert await queue.release(connection, claim.id, 1, "stopped")
        assert await reaping.expire_waiting(connection, cluster="anew", wait_s=3000) == []
        assert await reaping.expire_waiting(connection, cluster="anew", wait_s=0) == [claim.id]


async def _age(database: Database, *ids: str) -> None:
    """As if they had come an hour ago."""
    hour = text("UPDATE validations SET created_at = created_at - interval '1 hour' WHERE id = ANY(:ids)")
    async with database.transaction() as connection:
        await connection.execute(hour, {"ids": list(ids)})
