"""Events against a real Postgres: order without gaps under concurrency, and who is woken by what."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from sqlalchemy import text

from service.domain.validation import EventType, Validation
from service.storage import events, queue, validations
from service.storage.events import EventHub, Subscription
from service.storage.session import Database

Enqueue = Callable[..., Awaitable[Validation]]
Hold = Callable[..., Awaitable[queue.Claim]]


@pytest.fixture
async def hub(postgres_url: str) -> AsyncIterator[EventHub]:
    """A hub that already listens."""
    async with EventHub(postgres_url) as hub:
        await _connected(hub)
        yield hub


async def test_events_come_back_in_order_with_their_data(database: Database, hold: Hold) -> None:
    claim = await hold("order")
    entries = [(EventType.STEP, {"step": step, "max_abs_error": float("nan")}) for step in range(3)]
    async with database.transaction() as connection:
        assert await events.append_many(connection, claim.id, entries, attempt=1) == 5
        assert await events.append(connection, claim.id, EventType.TRIAL_FINISHED, {"n": 2**53}) == 6
    async with database.read() as connection:
        found = await events.read(connection, claim.id, after_seq=2, limit=3)
        assert [(event.seq, event.data) for event in found] == [
            (3 + step, {"step": step, "max_abs_error": "NaN"}) for step in range(3)
        ]
        assert [event.data for event in await events.read(connection, claim.id, after_seq=5)] == [{"n": 2**53}]
        assert await events.read(connection, claim.id, after_seq=6) == ()


async def test_no_events_without_their_validation(database: Database) -> None:
    async with database.transaction() as connection:
        assert await events.append(connection, "val_unknown", EventType.STEP, {}) is None


async def test_a_reader_never_sees_a_gap_and_commit_order_is_seq_order(database: Database, hold: Hold) -> None:
    claim = await hold("gaps")
    committed: list[int] = []
    chance = random.Random(0)

    async def write() -> None:
        for _ in range(10):
            async with database.transaction() as connection:
                last_seq = await events.append_many(
                    connection, claim.id, [(EventType.STEP, {})] * chance.choice((1, 3))
                )
                assert last_seq is not None
                await asyncio.sleep(chance.random() * 0.003)
            committed.append(last_seq)

    async def give_up() -> None:
        for _ in range(10):
            async with database.engine.connect() as connection:
                await events.append(connection, claim.id, EventType.STEP, {"never": True})
                await connection.rollback()

    async def watch() -> int:
        seen = 0
        while not writers.done():
            async with database.read() as connection:
                found = await events.read(connection, claim.id)
            assert [event.seq for event in found] == list(range(1, len(found) + 1))
            assert len(found) >= seen
            seen = len(found)
        return seen

    writers = asyncio.gather(*(write() for _ in range(6)), give_up())
    await watch()
    await writers
    async with database.read() as connection:
        found = await events.read(connection, claim.id)
    assert [event.seq for event in found] == list(range(1, max(committed) + 1))
    assert not any(event.data.get("never") for event in found)
    assert [event.created_at for event in found] == sorted(event.created_at for event in found)


async def test_an_append_waits_for_the_one_before_it(database: Database, hold: Hold) -> None:
    claim = await hold("wait")

    async def second() -> int | None:
        async with database.transaction() as connection:
            return await events.append(connection, claim.id, EventType.STEP, {"second": True})

    async with database.transaction() as connection:
        first_seq = await events.append(connection, claim.id, EventType.STEP, {"first": True})
        task = asyncio.create_task(second())
        await _blocked(database)
        assert not task.done()
    assert first_seq is not None
    assert await task == first_seq + 1


async def test_a_subscriber_wakes_for_its_own_validation_only(database: Database, hold: Hold, hub: EventHub) -> None:
    one, two = await hold("wake"), await hold("wake")
    async with hub.subscribe(one.id) as first, hub.subscribe(one.id) as also, hub.subscribe(two.id) as other:
        await _append(database, one.id)
        assert await first.wait(5)
        assert await also.wait(5)
        # The second append is announced after the first: once it woke, the first would have as well.
        await _append(database, two.id)
        assert await other.wait(5)
        assert not await first.wait(0)
        assert not await other.wait(0)


async def test_what_happens_between_reading_and_waiting_is_not_missed(
    database: Database, hold: Hold, hub: EventHub
) -> None:
    claim = await hold("between")
    async with hub.subscribe(claim.id) as subscription:
        await _append(database, claim.id)
        await asyncio.sleep(0.2)
        assert await subscription.wait(0.01)


async def test_a_rollback_wakes_nobody(database: Database, hold: Hold, hub: EventHub) -> None:
    claim, other = await hold("silent"), await hold("silent")
    async with hub.subscribe(claim.id) as subscription, hub.subscribe(other.id) as later:
        async with database.engine.connect() as connection:
            await events.append(connection, claim.id, EventType.STEP, {})
            await connection.rollback()
        await _append(database, other.id)
        assert await later.wait(5)
        assert not await subscription.wait(0)


async def test_the_queue_wakes_for_work_wishes_and_takeovers(
    database: Database, enqueue: Enqueue, hub: EventHub
) -> None:
    async with hub.subscribe_queue("queue-a") as mine, hub.subscribe_queue("queue-b") as other:
        validation = await enqueue("queue-a")
        assert await mine.wait(5)
        async with database.transaction() as connection:
            await queue.claim(connection, cluster="queue-a", dispatcher_id="d1", lease_s=60, limit=1)
        async with database.transaction() as connection:
            assert await queue.release(connection, validation.id, 1, "stops")
        assert await mine.wait(5)
        async with database.transaction() as connection:
            await queue.claim(connection, cluster="queue-a", dispatcher_id="d1", lease_s=60, limit=1)
        async with database.transaction() as connection:
            await validations.request_cancel(connection, validation.id)
        assert await mine.wait(5)
        assert not await other.wait(0)


async def test_after_a_lost_connection_everyone_reads_again(database: Database, hold: Hold, hub: EventHub) -> None:
    claim, other = await hold("lost"), await hold("lost")
    async with (
        hub.subscribe(claim.id) as first,
        hub.subscribe(other.id) as second,
        hub.subscribe_queue("lost") as third,
    ):
        assert await _terminate_listeners(database) >= 1
        assert all([await subscription.wait(10) for subscription in (first, second, third)])
        await _connected(hub)
        await _append(database, claim.id)
        assert await first.wait(5)
        assert not await second.wait(0)


async def test_waiting_costs_one_connection_a_process_and_none_of_the_pool(
    postgres_url: str, database: Database, hold: Hold, hub: EventHub
) -> None:
    claim = await hold("cost")
    small = Database(postgres_url, pool_size=1)

    async def follow() -> int:
        async with hub.subscribe(claim.id) as subscription:
            while True:
                async with small.read() as connection:
                    if found := await events.read(connection, claim.id, after_seq=2):
                        return found[0].seq
                assert await subscription.wait(10)

    followers = [asyncio.create_task(follow()) for _ in range(50)]
    await asyncio.sleep(0.3)
    assert await _num_listeners(database) == 1
    await _append(database, claim.id)
    assert await asyncio.gather(*followers) == [3] * 50
    await small.close()


async def test_asking_a_silent_connection_loses_nothing(
    postgres_url: str, database: Database, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub asks the server whether it lives nearly all the time, so that most notifications arrive meanwhile.
    monkeypatch.setattr("service.storage.events._CHECK_S", 0.002)
    claim = await hold("ask")
    async with EventHub(postgres_url) as hub:
        await _connected(hub)
        async with hub.subscribe(claim.id) as subscription:
            for _ in range(100):
                await _append(database, claim.id)
                assert await subscription.wait(5)
            assert not await subscription.wait(0.05)


async def test_a_silent_wait_ends_at_its_timeout(hub: EventHub) -> None:
    async with hub.subscribe("val_silent") as subscription:
        assert not await subscription.wait(0.05)


async def test_a_hub_starts_before_its_database_is_there() -> None:
    hub = EventHub("postgresql://nobody@/nothing?host=/nonexistent&port=1")
    async with hub, hub.subscribe("val_x") as subscription:
        assert not await subscription.wait(0.3)
        assert not hub.connected


async def test_closing_wakes_those_who_wait(postgres_url: str) -> None:
    hub = EventHub(postgres_url)
    async with hub:
        await _connected(hub)
        async with hub.subscribe("val_y") as subscription:
            await subscription.wait(0)
            waiting = asyncio.create_task(_wait(subscription))
            await asyncio.sleep(0)
            await hub.close()
            assert await waiting


async def _wait(subscription: Subscription) -> bool:
    return await subscription.wait(10)


async def _append(database: Database, validation_id: str) -> None:
    async with database.transaction() as connection:
        assert await events.append(connection, validation_id, EventType.STEP, {})


async def _connected(hub: EventHub) -> None:
    async with asyncio.timeout(10):
        while not hub.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _terminate_listeners(database: Database) -> int:
    query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE " + _LISTENERS
    async with database.transaction() as connection:
        return int((await connection.execute(text(query))).scalar_one())


async def _num_listeners(database: Database) -> int:
    async with database.read() as connection:
        return int(
            (await connection.execute(text("SELECT count(*) FROM pg_stat_activity WHERE " + _LISTENERS))).scalar_one()
        )


_LISTENERS = "application_name = 'gradgate listen' AND datname = current_database()"


async def _blocked(database: Database) -> None:
    """Return once some session of this database waits for a lock."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    async with asyncio.timeout(10):
        while True:
            async with database.read() as connection:
                if (await connection.execute(query)).scalar_one():
                    return
            await asyncio.sleep(0.01)
