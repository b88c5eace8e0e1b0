"""Weeks: rows find theirs whenever it is made, whoever makes it; reads touch one; old ones go, and verdicts stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text

from service.domain.ids import first_id
from service.domain.validation import EventType, State, Validation
from service.domain.weeks import Week
from service.storage import events, partitions, queue, removals, validations
from service.storage.session import DATABASE_AWAY, Connection, Database
from service.storage.tables import PARTITIONED
from workers.contract import Judgement, StepReport

Enqueue = Callable[..., Awaitable[Validation]]
Complete = Callable[..., Awaitable[str]]
NUM_ROWS = {"events": 4, "rank_steps": 16, "divergence": 16, "trace": 192}


@pytest.fixture
def complete(database: Database, enqueue: Enqueue, judgement: Judgement, reports: tuple[StepReport, ...]) -> Complete:
    """Store a validation that was asked for some weeks ago, with everything that there is of one that ended."""

    async def store(cluster: str, *, weeks_ago: int, ended: bool = True) -> str:
        moment = datetime.now(UTC) - timedelta(weeks=weeks_ago)
        stored = await enqueue(cluster, validation_id=first_id("val_", moment))
        async with database.transaction() as connection:
            await queue.claim(connection, cluster=cluster, dispatcher_id="d1", lease_s=600, limit=1)
            assert await queue.mark_running(connection, stored.id, 1, [], {})
            if ended:
                assert await queue.complete(connection, stored.id, 1, judgement, reports, [], {})
        return stored.id

    return store


@pytest.fixture
async def others(postgres_url: str) -> AsyncIterator[list[Database]]:
    """Pools of other processes."""
    pools = [Database(postgres_url) for _ in range(3)]
    yield pools
    for pool in pools:
        await pool.close()


async def test_rows_without_a_week_move_into_it_when_it_is_made(database: Database, complete: Complete) -> None:
    validation_id = await complete("strays", weeks_ago=20)
    assert await _where(database, validation_id) == {f"{name}_default": count for name, count in NUM_ROWS.items()}
    before = await _contents(database, validation_id)
    await partitions.arrange(database, None)
    assert await _where(database, validation_id) == _in_weeks(validation_id)
    assert await _contents(database, validation_id) == before
    assert await _partitions(database, validation_id) == 4


async def test_this_week_and_the_next_ones_are_there_before_anything_is_written(
    database: Database, complete: Complete
) -> None:
    validation_id = await complete("now", weeks_ago=0)
    assert await _where(database, validation_id) == _in_weeks(validation_id)
    coming = first_id("val_", datetime.now(UTC) + timedelta(weeks=partitions.NUM_WEEKS_AHEAD))
    assert await _partitions(database, coming) == 4


async def test_three_processes_may_arrange_at_once(
    database: Database, complete: Complete, others: list[Database]
) -> None:
    ids = [await complete("at-once", weeks_ago=weeks) for weeks in (30, 31, 32)]
    await asyncio.gather(*(partitions.arrange(other, None) for other in others))
    for validation_id in ids:
        assert await _where(database, validation_id) == _in_weeks(validation_id)


async def test_nothing_that_is_written_meanwhile_is_lost_and_nobody_waits_for_ever(
    database: Database, complete: Complete, others: list[Database]
) -> None:
    validation_id = await complete("meanwhile", weeks_ago=40, ended=False)
    making, num_written = asyncio.create_task(partitions.arrange(others[0], None)), 0
    while not making.done() or num_written < 20:
        async with database.transaction() as connection:
            assert await events.append(connection, validation_id, EventType.STEP, {"n": num_written}, attempt=1)
        num_written += 1
    await making
    async with database.read() as connection:
        history = await events.read(connection, validation_id)
    assert [event.seq for event in history] == list(range(1, len(history) + 1))
    assert [event.data["n"] for event in history if event.type == "step"] == list(range(num_written))
    assert await _where(database, validation_id) == {
        f"events_{Week.of_validation(validation_id).monday:%Y%m%d}": 3 + num_written  # type: ignore[union-attr]
    }


async def test_who_writes_a_result_and_who_makes_its_week_do_not_block_each_other_for_ever(
    database: Database,
    complete: Complete,
    others: list[Database],
    judgement: Judgement,
    reports: tuple[StepReport, ...],
) -> None:
    validation_id = await complete("both", weeks_ago=50, ended=False)
    async with database.transaction() as connection:
        # The row is locked; its per-rank rows are still to come.
        assert await events.append(connection, validation_id, EventType.STEP, {}, attempt=1)
        making = asyncio.create_task(partitions.arrange(others[0], None))
        await _until_waiting(others[1])
        assert await queue.complete(connection, validation_id, 1, judgement, reports, [], {})
    await making
    await partitions.arrange(database, None)
    assert await _where(database, validation_id) == _in_weeks(validation_id) | {
        f"events_{Week.of_validation(validation_id).monday:%Y%m%d}": 5  # type: ignore[union-attr]
    }


async def test_reading_one_validation_touches_its_own_week_only(database: Database, complete: Complete) -> None:
    validation_id = await complete("pruned", weeks_ago=2)
    await partitions.arrange(database, None)
    reads: dict[str, Callable[[Connection], Awaitable[Any]]] = {
        "events": lambda c: events.read(c, validation_id),
        "divergence": lambda c: validations.ranks_page(c, validation_id, limit=1),
        "trace": lambda c: validations.trace_page(c, validation_id, limit=1),
    }
    week = f"{Week.of_validation(validation_id).monday:%Y%m%d}"  # type: ignore[union-attr]
    async with database.engine.connect() as connection:
        for name, read in reads.items():
            for _ in range(12):  # after five psycopg prepares the statement, after five more Postgres may keep its plan
                await read(connection)
                await connection.rollback()
            await read(connection)
            tables = {name, "rank_steps"} if name == "divergence" else {name}
            assert await _locked_tables(connection) == tables | {f"{table}_{week}" for table in tables}
            await connection.rollback()
        plan = await connection.scalars(text(f"EXPLAIN SELECT * FROM trace WHERE validation_id = '{validation_id}'"))
        assert sum(" on trace_" in line for line in plan) == 1


async def test_retention_removes_whole_weeks_and_leaves_the_verdict(database: Database, complete: Complete) -> None:
    old, kept = await complete("retention", weeks_ago=10), await complete("retention", weeks_ago=5)
    await _arrange_often(database, None)
    assert await _where(database, old) == _in_weeks(old)
    await _arrange_often(database, 63)
    assert await _where(database, old) == {}
    assert await _partitions(database, old) == 0
    assert await _where(database, kept) == _in_weeks(kept)
    async with database.read() as connection:
        validation = await validations.get(connection, old)
        removal = await removals.of_validation(connection, old)
        assert await removals.of_validation(connection, kept) is None
    assert validation is not None
    assert (validation.state, len(validation.trials), len(validation.reasons)) == (State.COMPLETED, 1, 1)
    assert removal is not None
    assert removal.retention_days == 63


async def test_a_week_is_kept_while_one_of_it_has_not_ended(database: Database, complete: Complete) -> None:
    ended = await complete("unended", weeks_ago=60)
    running = await complete("unended", weeks_ago=60, ended=False)
    await _arrange_often(database, 300)
    assert await _where(database, ended) == _in_weeks(ended)
    async with database.transaction() as connection:
        assert await queue.cancel(connection, running, 1)
    await _arrange_often(database, 300)
    assert await _where(database, ended) == {}


async def test_a_week_is_marked_a_round_before_it_is_dropped(database: Database, complete: Complete) -> None:
    old = await complete("rounds", weeks_ago=70)
    await partitions.arrange(database, None)
    await partitions.arrange(database, 400)
    async with database.read() as connection:
        assert await removals.of_validation(connection, old) is not None
    assert await _where(database, old) == _in_weeks(old)
    await partitions.arrange(database, 400)
    assert await _where(database, old) == {}


async def test_a_reader_that_stays_delays_the_removal_and_nobody_else(
    database: Database, complete: Complete, others: list[Database]
) -> None:
    old = await complete("reader", weeks_ago=80)
    await partitions.arrange(database, None)
    await partitions.arrange(database, 500)
    async with others[0].read() as reader:
        assert len(await events.read(reader, old)) == 4
        with pytest.raises(DATABASE_AWAY, match="lock timeout"):
            await partitions.arrange(database, 500)
        async with asyncio.timeout(30), database.read() as connection:
            assert len(await events.read(connection, old)) == 4
    await partitions.arrange(database, 500)
    assert await _where(database, old) == {}


async def test_ids_of_another_kind_stay_in_the_default_partition(database: Database, enqueue: Enqueue) -> None:
    await enqueue("odd", validation_id="val_1odd")
    await enqueue("odd", validation_id="val_x")
    await _arrange_often(database, 1)
    for validation_id in ("val_1odd", "val_x"):
        assert await _where(database, validation_id) == {"events_default": 1}


async def test_deleting_a_validation_takes_its_rows_along(database: Database, complete: Complete) -> None:
    validation_id = await complete("deleted", weeks_ago=1)
    await partitions.arrange(database, None)
    async with database.transaction() as connection:
        await connection.execute(text("DELETE FROM validations WHERE id = :id"), {"id": validation_id})
    assert await _where(database, validation_id) == {}


async def _arrange_often(database: Database, retention_days: int | None) -> None:
    for _ in range(3):
        await partitions.arrange(database, retention_days)


def _in_weeks(validation_id: str) -> dict[str, int]:
    week = Week.of_validation(validation_id)
    assert week is not None
    return {f"{name}_{week.monday:%Y%m%d}": count for name, count in NUM_ROWS.items()}


async def _where(database: Database, validation_id: str) -> dict[str, int]:
    """How many rows of a validation each partition has."""
    found: dict[str, int] = {}
    async with database.read() as connection:
        for table in PARTITIONED:
            query = text(
                f"SELECT tableoid::regclass::text, count(*) FROM {table.name} WHERE validation_id = :id GROUP BY 1"
            )
            rows = await connection.execute(query, {"id": validation_id})
            found |= {row[0]: row[1] for row in rows}
    return found


async def _contents(database: Database, validation_id: str) -> list[list[str]]:
    async with database.read() as connection:
        return [
            sorted(map(repr, (await connection.execute(select(table).filter_by(validation_id=validation_id))).all()))
            for table in PARTITIONED
        ]


async def _partitions(database: Database, validation_id: str) -> int:
    """How many tables have a partition of a validation's week."""
    query = text("SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname LIKE :name")
    week = Week.of_validation(validation_id)
    assert week is not None
    async with database.read() as connection:
        return int(await connection.scalar(query, {"name": f"%\\_{week.monday:%Y%m%d}"}) or 0)


async def _locked_tables(connection: Connection) -> set[str]:
    query = text(
        "SELECT DISTINCT relname FROM pg_locks JOIN pg_class ON pg_class.oid = relation WHERE pid = pg_backend_pid() "
        "AND relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"
    )
    return set(await connection.scalars(query))


async def _until_waiting(database: Database) -> None:
    """Until somebody waits for a lock on the validations' table."""
    query = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'validations'::regclass")
    async with asyncio.timeout(30):
        while True:
            async with database.read() as connection:
                if await connection.scalar(query):
                    return
            await asyncio.sleep(0.02)
