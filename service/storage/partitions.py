"""The weeks into which tables that grow with ranks and steps are cut, and what becomes of weeks past their time.

Everything is done in short transactions of their own, any number of processes at once: an advisory lock lets one of
them work, and whoever comes next finds it done. A row whose week has no partition goes into the default one, so
that no insert ever fails; it moves when its week gets one.

A week is removed in two rounds. First it is marked in `removed_weeks`, from where the API knows; a round later, when
whoever began to read before has ended, its partitions are dropped. Dropping locks a table for as long as the catalogue
takes; whoever waits for a reader gives up after two seconds, until the next round. (DETACH CONCURRENTLY would not
lock, but Postgres has none where there is a default partition.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from functools import partial

from sqlalchemy import Connection as SyncConnection
from sqlalchemy import NullPool, Table, create_engine, exists, func, select, text
from sqlalchemy.dialects.postgresql import insert

from service.domain.validation import ID_PREFIX, TERMINAL
from service.domain.weeks import Week
from service.storage.session import Database, sqlalchemy_url
from service.storage.tables import PARTITIONED, removed_weeks, validations

NUM_WEEKS_AHEAD = 4
"""So many weeks beyond this one have their partitions already: that long may a cluster be without a dispatcher."""
_LOCK_KEY = 0x77656B73
_LOCK_TIMEOUT = "2s"
"""Who waits for a table lock holds up everyone that comes after; rather try again in the next round."""

Step = Callable[[SyncConnection], None]
"""Something to do in a transaction of its own; does nothing where it has been done meanwhile."""


async def arrange(database: Database, retention_days: int | None) -> None:
    """Make the coming weeks, put strays into theirs, and remove weeks that ended more than `retention_days` ago.

    Raises one of DATABASE_AWAY where the database does not answer, or somebody holds a lock for long; the steps that
    were done stay done. ProgrammingError where the role does not own the tables.
    """
    async with database.transaction() as connection:
        steps = await connection.run_sync(due, retention_days)
    for step in steps:
        async with database.transaction() as connection:
            await connection.run_sync(step)


def arrange_now(url: str) -> None:
    """The same, without removing anything, for a command that migrates."""
    engine = create_engine(sqlalchemy_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        steps = due(connection, None)
    for step in steps:
        with engine.begin() as connection:
            step(connection)


def due(connection: SyncConnection, retention_days: int | None) -> list[Step]:
    """What there is to do now, in order."""
    now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
    marked = {Week.of_validation(first_id) for first_id in connection.scalars(select(removed_weeks.c.first_id))}
    made = {table: set(_weeks_made(connection, table)) for table in PARTITIONED}
    steps: list[Step] = [
        partial(_drop, table=table, week=week)
        for table in PARTITIONED
        for week in sorted(made[table])
        if week in marked
    ]
    for table in PARTITIONED:
        wanted = {Week.of(now).later(i) for i in range(NUM_WEEKS_AHEAD + 1)}
        wanted |= set(_weeks_of_strays(connection, table, max(wanted).end_id))
        steps += [partial(_make, table=table, week=week) for week in sorted(wanted - made[table])]
    if retention_days is not None:
        oldest = now - timedelta(days=retention_days)
        past = {week for weeks in made.values() for week in weeks if week.ends_at <= oldest and week not in marked}
        steps += [partial(_mark, week=week, retention_days=retention_days) for week in sorted(past)]
    return steps


def partition_name(table: Table, week: Week) -> str:
    """Of a table's rows of one week: the table's name and the week's Monday."""
    return f"{table.name}_{week.monday:%Y%m%d}"


def _weeks_made(connection: SyncConnection, table: Table) -> Iterator[Week]:
    children = text(
        "SELECT pg_class.relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid "
        "WHERE inhparent = CAST(:parent AS regclass)"
    )
    for name in connection.scalars(children, {"parent": table.name}):
        if match := re.fullmatch(rf"{table.name}_(\d{{8}})", name):
            yield Week(date.fromisoformat(match[1]))


def _weeks_of_strays(connection: SyncConnection, table: Table, end_id: str) -> Iterator[Week]:
    """Weeks before `end_id` of which the default partition has rows; one index lookup each."""
    smallest = text(
        f"SELECT min(validation_id) FROM {table.name}_default WHERE validation_id >= :low AND validation_id < :end_id"
    )
    low = ID_PREFIX
    while (found := connection.scalar(smallest, {"low": low, "end_id": end_id})) is not None:
        if (week := Week.of_validation(found)) is None:
            low = found + " "  # No id of ours; it stays where it is.
            continue
        yield week
        low = week.end_id


def _make(connection: SyncConnection, *, table: Table, week: Week) -> None:
    """Make a week's partition, with the rows of it that the default one has."""
    _work_alone(connection)
    name = partition_name(table, week)
    if connection.scalar(select(func.to_regclass(name))) is not None:
        return
    connection.execute(text(f"CREATE TABLE {name} (LIKE {table.name} INCLUDING DEFAULTS)"))
    _move_strays(connection, table, week)
    key = ", ".join(f'"{column}"' for column in table.primary_key.columns.keys())  # noqa: SIM118
    connection.execute(text(f"ALTER TABLE {name} ADD PRIMARY KEY ({key})"))
    # Writers lock a validation before they write its rows, and so does this; all of them wait from here on, and not
    # while most rows were moved. What they wrote until now is moved, too.
    connection.execute(text("LOCK TABLE validations IN SHARE ROW EXCLUSIVE MODE"))
    _move_strays(connection, table, week)
    attach = (
        f"ALTER TABLE {table.name} ATTACH PARTITION {name} FOR VALUES FROM ('{week.first_id}') TO ('{week.end_id}')"
    )
    connection.execute(text(attach))


def _move_strays(connection: SyncConnection, table: Table, week: Week) -> None:
    moved = text(
        f"WITH strays AS (DELETE FROM {table.name}_default "
        "WHERE validation_id >= :first_id AND validation_id < :end_id RETURNING *) "
        f"INSERT INTO {partition_name(table, week)} SELECT * FROM strays"
    )
    connection.execute(moved, {"first_id": week.first_id, "end_id": week.end_id})


def _mark(connection: SyncConnection, *, week: Week, retention_days: int) -> None:
    """Say that a week's rows are removed, unless one of its validations has not ended."""
    _work_alone(connection)
    unended = exists().where(
        validations.c.id >= week.first_id, validations.c.id < week.end_id, validations.c.state.not_in(TERMINAL)
    )
    if not connection.scalar(select(unended)):
        mark = insert(removed_weeks).values(first_id=week.first_id, end_id=week.end_id, retention_days=retention_days)
        connection.execute(mark.on_conflict_do_nothing())


def _drop(connection: SyncConnection, *, table: Table, week: Week) -> None:
    _work_alone(connection)
    connection.execute(text(f"DROP TABLE IF EXISTS {partition_name(table, week)}"))


def _work_alone(connection: SyncConnection) -> None:
    """Wait for whoever arranges the same database now; wait briefly for everything else."""
    connection.execute(select(func.pg_advisory_xact_lock(_LOCK_KEY)))
    connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'"))
