"""Validations as the API stores, finds, lists and cancels them, against a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text

from service.domain.errors import CursorError, IdempotencyConflict
from service.domain.validation import State, Validation, new_validation_id
from service.storage import events, queue, validations
from service.storage.session import Connection, Database
from workers.contract import Judgement, Verdict

Enqueue = Callable[..., Awaitable[Validation]]
Hold = Callable[..., Awaitable[queue.Claim]]


async def test_a_new_validation_waits_with_its_first_event(database: Database, enqueue: Enqueue) -> None:
    request = {"mesh": {"dp": 3}, "labels": {"team": "größe"}, "drill": {"fault": "kill_in_collective"}}
    stored = await enqueue("new", request=request, labels={"team": "größe"}, num_ranks=3, deadline_s=1.5)
    assert (stored.state, stored.verdict, stored.attempt, stored.revision) == (State.QUEUED, None, 0, 1)
    assert (stored.request, stored.labels, stored.num_ranks, stored.deadline_s) == (request, {"team": "größe"}, 3, 1.5)
    assert stored.drill
    async with database.read() as connection:
        assert await validations.get(connection, stored.id) == stored
        assert [(event.seq, event.type) for event in await events.read(connection, stored.id)] == [(1, "queued")]
        assert await validations.get(connection, "val_unknown") is None


async def test_a_key_repeats_one_request(database: Database) -> None:
    async with database.transaction() as connection:
        first, created = await _insert(connection, key="repeat", request_hash="h1")
    async with database.transaction() as connection:
        again, created_again = await _insert(connection, key="repeat", request_hash="h1")
    assert (again, created, created_again) == (first, True, False)
    async with database.transaction() as connection:
        with pytest.raises(IdempotencyConflict, match=first.id):
            await _insert(connection, key="repeat", request_hash="h2")


async def test_without_a_key_every_request_is_new(database: Database) -> None:
    async with database.transaction() as connection:
        made = [await _insert(connection, key=None, request_hash="h") for _ in range(2)]
    assert made[0][0].id != made[1][0].id
    assert [created for _, created in made] == [True, True]


async def test_many_at_once_with_one_key_make_one_validation(database: Database) -> None:
    async def post() -> tuple[Validation, bool]:
        async with database.transaction() as connection:
            return await _insert(connection, key="race", request_hash="h")

    answers = await asyncio.gather(*(post() for _ in range(12)))
    assert len({validation.id for validation, _ in answers}) == 1
    assert sorted(created for _, created in answers) == [False] * 11 + [True]
    async with database.read() as connection:
        assert len(await events.read(connection, answers[0][0].id)) == 1
        count = await connection.execute(text("SELECT count(*) FROM validations WHERE idempotency_key = 'race'"))
        assert count.scalar_one() == 1


@pytest.mark.parametrize("first_commits", [True, False])
async def test_the_second_of_two_waits_for_the_fate_of_the_first(database: Database, first_commits: bool) -> None:
    key = f"fate-{first_commits}"

    async def second() -> tuple[Validation, bool]:
        async with database.transaction() as connection:
            return await _insert(connection, key=key, request_hash="h")

    async with database.engine.connect() as connection:
        first, _ = await _insert(connection, key=key, request_hash="h")
        task = asyncio.create_task(second())
        await asyncio.sleep(0.1)
        assert not task.done()
        await (connection.commit() if first_commits else connection.rollback())
    validation, created = await task
    assert (validation.id == first.id, created) == (first_commits, not first_commits)


async def test_pages_are_newest_first_and_complete(database: Database, enqueue: Enqueue) -> None:
    stored = [(await enqueue("pages")).id for _ in range(7)]
    pages = await _all_pages(database, cluster="pages", limit=3)
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [validation.id for page in pages for validation in page] == sorted(stored, reverse=True)


async def test_a_page_that_is_exactly_full_is_the_last(database: Database, enqueue: Enqueue) -> None:
    for _ in range(4):
        await enqueue("full")
    assert [len(page) for page in await _all_pages(database, cluster="full", limit=2)] == [2, 2]


async def test_what_arrives_meanwhile_neither_repeats_nor_skips(database: Database, enqueue: Enqueue) -> None:
    stored = [(await enqueue("meanwhile")).id for _ in range(4)]
    async with database.read() as connection:
        first = await validations.list_page(connection, cluster="meanwhile", limit=2)
    await enqueue("meanwhile")
    async with database.read() as connection:
        second = await validations.list_page(connection, cluster="meanwhile", cursor=first.next_cursor, limit=5)
    assert [validation.id for validation in (*first.items, *second.items)] == sorted(stored, reverse=True)


async def test_filters(database: Database, hold: Hold, enqueue: Enqueue, judgement: Judgement) -> None:
    done = await hold("filters", running=True)
    async with database.transaction() as connection:
        await queue.complete(connection, done.id, 1, judgement, (), [], {})
    waiting = await enqueue("filters", labels={"team": "a", "run": "7"})
    drill = await enqueue("filters", labels={"team": "b"}, request={"drill": {"fault": "x"}})

    async def found(**filters: Any) -> list[str]:
        async with database.read() as connection:
            page = await validations.list_page(connection, cluster="filters", **filters)
        return [validation.id for validation in page.items]

    assert await found(state=State.COMPLETED) == [done.id]
    assert await found(state=State.QUEUED) == sorted([waiting.id, drill.id], reverse=True)
    assert await found(verdict=Verdict.FAIL) == [done.id]
    assert await found(verdict=Verdict.PASS) == []
    assert await found(labels={"team": "a"}) == [waiting.id]
    assert await found(labels={"team": "a", "run": "8"}) == []
    assert await found(drill=True) == [drill.id]
    async with database.read() as connection:
        (listed,) = (await validations.list_page(connection, cluster="filters", verdict=Verdict.FAIL)).items
        assert listed.trials == judgement.trials
        assert listed == await validations.get(connection, done.id)


@pytest.mark.parametrize("cursor", ["", "x", "bm90anNvbg", "WyJyYW5rcyIsMV0", "\ud800", "W1tb" * 5000])
async def test_foreign_cursors_are_refused(database: Database, cursor: str) -> None:
    async with database.read() as connection:
        with pytest.raises(CursorError, match="next_cursor"):
            await validations.list_page(connection, cursor=cursor)


async def test_what_waits_is_cancelled_at_once(database: Database, enqueue: Enqueue) -> None:
    waiting = await enqueue("cancel")
    async with database.transaction() as connection:
        cancelled = await validations.request_cancel(connection, waiting.id)
        assert cancelled is not None
        assert (cancelled.state, cancelled.revision) == (State.CANCELLED, 2)
        assert cancelled.cancel_requested_at is not None
        assert await validations.request_cancel(connection, waiting.id) == cancelled
        assert await queue.claim(connection, cluster="cancel", dispatcher_id="d", lease_s=9, limit=9) == []
        assert await validations.request_cancel(connection, "val_unknown") is None
    async with database.read() as connection:
        assert [event.type for event in await events.read(connection, waiting.id)] == ["queued", "cancelled"]


async def test_what_runs_is_asked_to_end_once(database: Database, hold: Hold) -> None:
    claim = await hold("ask", running=True)
    async with database.transaction() as connection:
        asked = await validations.request_cancel(connection, claim.id)
    async with database.transaction() as connection:
        again = await validations.request_cancel(connection, claim.id)
    assert asked is not None
    assert asked.state is State.RUNNING
    assert asked.cancel_requested_at is not None
    assert again == asked
    async with database.read() as connection:
        assert [event.type for event in await events.read(connection, claim.id)][-1] == "cancel_requested"


async def test_a_claim_and_a_cancel_at_once_leave_one_of_two_outcomes(database: Database, enqueue: Enqueue) -> None:
    async def claim() -> int:
        async with database.transaction() as connection:
            return len(await queue.claim(connection, cluster="both", dispatcher_id="d", lease_s=60, limit=1))

    async def cancel(validation_id: str) -> Validation | None:
        async with database.transaction() as connection:
            return await validations.request_cancel(connection, validation_id)

    for _ in range(20):
        stored = await enqueue("both")
        num_claimed, seen = await asyncio.gather(claim(), cancel(stored.id))
        async with database.read() as connection:
            end = await validations.get(connection, stored.id)
        assert end is not None
        assert seen is not None
        assert end.cancel_requested_at is not None
        assert end.state is (State.STARTING if num_claimed else State.CANCELLED)
        async with database.transaction() as connection:
            await queue.cancel(connection, stored.id, 1)


async def test_a_wish_is_not_lost_while_the_validation_changes_hands(database: Database, hold: Hold) -> None:
    async def release(claim: queue.Claim) -> bool:
        async with database.transaction() as connection:
            return await queue.release(connection, claim.id, claim.attempt, "stops")

    async def cancel(claim: queue.Claim) -> Validation | None:
        async with database.transaction() as connection:
            return await validations.request_cancel(connection, claim.id)

    for _ in range(20):
        claim = await hold("hands")
        await asyncio.gather(release(claim), cancel(claim))
        async with database.transaction() as connection:
            end = await validations.get(connection, claim.id)
            assert end is not None
            assert (end.state, end.cancel_requested_at is not None) == (State.CANCELLED, True)


async def test_the_revision_tells_changes_apart_and_ignores_progress(database: Database, hold: Hold) -> None:
    claim = await hold("revision")

    async def revision() -> int:
        async with database.read() as connection:
            found = await validations.get(connection, claim.id)
        assert found is not None
        return found.revision

    claimed = await revision()
    async with database.transaction() as connection:
        await events.append(connection, claim.id, "step", {})
        await queue.extend(connection, dispatcher_id="d1", held=[(claim.id, 1)], lease_s=60)
    assert await revision() == claimed
    async with database.transaction() as connection:
        await queue.mark_running(connection, claim.id, 1, [], {})
    assert await revision() > claimed


async def _insert(connection: Connection, *, key: str | None, request_hash: str) -> tuple[Validation, bool]:
    return await validations.insert(
        connection,
        validation_id=new_validation_id(),
        cluster="keys",
        request={},
        labels={},
        num_ranks=1,
        deadline_s=1.0,
        idempotency_key=key,
        request_hash=request_hash,
    )


async def _all_pages(database: Database, *, cluster: str, limit: int) -> list[tuple[Validation, ...]]:
    pages: list[tuple[Validation, ...]] = []
    cursor: str | None = None
    while True:
        async with database.read() as connection:
            page = await validations.list_page(connection, cluster=cluster, cursor=cursor, limit=limit)
        pages.append(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return pages
