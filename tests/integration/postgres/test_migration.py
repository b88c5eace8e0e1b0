"""Migrations against real databases: up, down, and the same tables as `service.storage.tables` says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command, op
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError

from migrations.ended import ended_rows_may_change
from service.domain.errors import NewerSchemaError
from service.domain.ids import first_id
from service.storage import migration, partitions, validations
from service.storage.programs import find_programs
from service.storage.session import Database, conninfo, sqlalchemy_url
from service.storage.tables import metadata
from workers.encoding import plain

GROWING = ("events", "rank_steps", "divergence", "trace")
ROOT_DIR = Path(__file__).parents[3]


@pytest.fixture
def empty_url(postgres_template: str) -> Iterator[Callable[[], str]]:
    """Makes empty databases."""
    names: list[str] = []
    with psycopg.connect(postgres_template.replace("/gradgate?", "/postgres?"), autocommit=True) as connection:

        def create() -> str:
            names.append(f"empty_{uuid.uuid4().hex[:12]}")
            connection.execute(f"CREATE DATABASE {names[-1]}")
            return postgres_template.replace("/gradgate?", f"/{names[-1]}?")

        yield create
        for name in names:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_migrations_build_exactly_the_tables_of_the_code(empty_url: Callable[[], str]) -> None:
    migrated, created = empty_url(), empty_url()
    migration.upgrade(migrated)
    engine = create_engine(sqlalchemy_url(created))
    metadata.create_all(engine)
    engine.dispose()
    partitions.arrange_now(created)
    # The server's own description: check constraints, partial indexes and defaults too, which Alembic does not compare.
    assert _schema(migrated) == _schema(created)


def test_down_leaves_nothing_and_up_again_works(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    before = _schema(url)
    migration.downgrade(url, "base")
    assert _schema(url) == ""
    migration.upgrade(url)
    assert _schema(url) == before


def test_upgrade_twice_changes_nothing(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    before = _schema(url)
    migration.upgrade(url)
    assert _schema(url) == before


def test_three_processes_may_migrate_at_once(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    with ThreadPoolExecutor() as pool:
        code = f"from service.storage import migration; migration.upgrade({url!r})"
        runs = [pool.submit(_run_python, code) for _ in range(3)]
    assert [run.result() for run in runs] == [0, 0, 0]
    assert "validations" in _schema(url)


def test_the_command_line_of_a_checkout_works_and_shows_its_sql(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    alembic = [sys.executable, "-m", "alembic", "-c", "migrations/alembic.ini"]
    run = partial(subprocess.run, cwd=ROOT_DIR, check=True, env={**os.environ, "GRADGATE_DATABASE_URL": url})
    run([*alembic, "upgrade", "head"])
    shown = run([*alembic, "upgrade", "head", "--sql"], capture_output=True, text=True).stdout
    assert "CREATE TABLE validations" in shown
    assert "validations" in _schema(url)


def test_rows_go_into_weeks_and_come_back_the_same(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url, "0008")
    bare = _schema(url)
    old, new = first_id("val_", datetime(2026, 1, 7, tzinfo=UTC)), first_id("val_", datetime.now(UTC))
    with psycopg.connect(conninfo(url)) as connection:
        for validation_id in (old, new):
            _store_something(connection, validation_id)
        before = {table: _dump(connection, table) for table in GROWING}
        assert all(len(rows) == 2 for rows in before.values())
    migration.upgrade(url)
    with psycopg.connect(conninfo(url)) as connection:
        for table in GROWING:
            assert _dump(connection, table) == before[table]
            assert _dump(connection, f"{table}_20260105") == before[table][:1]
            assert _dump(connection, f"{table}_default") == []
    migration.downgrade(url, "0008")
    assert _schema(url) == bare
    with psycopg.connect(conninfo(url)) as connection:
        assert {table: _dump(connection, table) for table in GROWING} == before


def test_a_migration_may_change_rows_that_have_ended_and_after_it_nobody(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    before = _schema(url)
    engine = create_engine(sqlalchemy_url(url))
    ended = (
        "UPDATE validations SET state = 'cancelled', finished_at = now()",
        "INSERT INTO attempts "
        "(validation_id, attempt, cluster, dispatcher_id, num_ranks, claimed_at, ended_at, outcome) "
        "SELECT id, 1, 'c', 'd', 1, now(), now(), 'cancelled' FROM validations",
    )
    with psycopg.connect(conninfo(url)) as connection:
        _store_something(connection, "val_ended")
        for statement in ended:
            connection.execute(statement)
    changes = ('UPDATE validations SET labels = \'{"a": "b"}\'', "UPDATE attempts SET nodes = '[\"n1\"]'")
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        with ended_rows_may_change():
            for change in changes:
                op.execute(change)
        for change in changes:
            with pytest.raises(IntegrityError, match="has ended and cannot change"), connection.begin_nested():
                op.execute(change)
    engine.dispose()
    with psycopg.connect(conninfo(url)) as connection:
        assert connection.execute("SELECT labels, nodes FROM validations, attempts").fetchall() == [
            ({"a": "b"}, ["n1"]),
        ]
    assert _schema(url) == before


def test_alembic_finds_nothing_to_do_where_there_are_partitions(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    command.check(migration._config(url))


async def test_a_database_knows_whether_it_is_current(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    database = Database(url)
    async with database.read() as connection:
        assert not await migration.is_current(connection)
    migration.upgrade(url)
    async with database.read() as connection:
        assert await migration.is_current(connection)
    await database.close()


async def test_a_newer_schema_is_refused_and_stays_as_it_is(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = _schema(url)
    with pytest.raises(NewerSchemaError, match=f"at revision 9999.*knows up to {migration.head()}.*newer version"):
        migration.upgrade(url)
    with pytest.raises(NewerSchemaError):
        migration.downgrade(url, "base")
    assert _schema(url) == before
    database = Database(url)
    async with database.read() as connection:
        assert not await migration.is_current(connection)
    await database.close()


async def test_times_are_utc_whatever_the_servers_zone(empty_url: Callable[[], str]) -> None:
    url = empty_url()
    migration.upgrade(url)
    name = conninfo(url).split("?")[0].rsplit("/", 1)[1]
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET timezone TO 'Asia/Kathmandu'")
    database = Database(url)
    async with database.transaction() as connection:
        stored, _ = await validations.insert(
            connection, validation_id="val_x", cluster="c", request={}, labels={}, num_ranks=1, deadline_s=1
        )
    await database.close()
    assert plain(stored.created_at).endswith(("+00:00", "Z"))
    assert abs((stored.created_at - datetime.now(UTC)).total_seconds()) < 600


def _store_something(connection: psycopg.Connection[Any], validation_id: str) -> None:
    """A validation with a row in each table that grows."""
    connection.execute(
        "INSERT INTO validations (id, cluster, request, num_ranks, deadline_s, schema_version, verdict_rules_version) "
        "VALUES (%s, 'c', '{}', 1, 1, 1, 1)",
        [validation_id],
    )
    values = {"text": "'x'", "integer": "7", "bigint": "8", "double precision": "'NaN'", "jsonb": "'[1]'"}
    for table in GROWING:
        columns = connection.execute(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = %s "
            "AND column_name <> 'validation_id' AND data_type <> 'timestamp with time zone'",
            [table],
        ).fetchall()
        names = ", ".join(f'"{name}"' for name, _ in columns)
        row = ", ".join(values[kind] for _, kind in columns)
        connection.execute(f"INSERT INTO {table} (validation_id, {names}) VALUES (%s, {row})", [validation_id])


def _dump(connection: psycopg.Connection[Any], table: str) -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT t::text FROM {table} t ORDER BY validation_id").fetchall()


def _run_python(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT_DIR, check=False).returncode


def _schema(url: str) -> str:
    """The database's schema as pg_dump writes it, without Alembic's own table and the dump's random marks."""
    program = find_programs(Path("/"), account=None) / "pg_dump"
    command = [str(program), "--schema-only", "--no-owner", "--exclude-table=alembic_version", conninfo(url)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line for line in text.splitlines() if not re.match(r"--|\\(un)?restrict|SET |SELECT |$", line))
    return "\n".join(lines)
