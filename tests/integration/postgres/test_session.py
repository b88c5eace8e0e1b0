"""The pool: transactions, snapshots, and a server that went away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import text
from sqlalchemy.exc import InternalError

from service.domain.validation import Validation
from service.storage import validations
from service.storage.session import Database, conninfo, sqlalchemy_url

Enqueue = Callable[..., Awaitable[Validation]]


async def test_a_block_that_raises_leaves_nothing(database: Database) -> None:
    async def fail() -> None:
        async with database.transaction() as connection:
            await connection.execute(text("CREATE TABLE half_done (x int)"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT to_regclass('half_done')"))).scalar_one() is None


async def test_a_read_sees_one_moment(database: Database, enqueue: Enqueue) -> None:
    async with database.read() as connection:
        before = await validations.list_page(connection, cluster="moment")
        await enqueue("moment")
        assert await validations.list_page(connection, cluster="moment") == before
    async with database.read() as connection:
        assert len((await validations.list_page(connection, cluster="moment")).items) == 1


async def test_a_read_cannot_write(database: Database) -> None:
    async with database.read() as connection:
        with pytest.raises(InternalError, match="read-only transaction"):
            await connection.execute(text("CREATE TABLE never (x int)"))
    async with database.transaction() as connection:
        await connection.execute(text("CREATE TABLE after_a_read (x int)"))


async def test_connections_that_the_server_dropped_are_replaced(database: Database, postgres_url: str) -> None:
    pool = Database(postgres_url, pool_size=1)
    async with pool.read() as connection:
        pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    async with database.transaction() as connection:
        await connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    await pool.ping()
    await pool.close()


@pytest.mark.parametrize("through_pooler", [True, False])
async def test_through_a_pooler_nothing_is_prepared(postgres_url: str, through_pooler: bool) -> None:
    pool = Database(postgres_url, pool_size=1, through_pooler=through_pooler)
    async with pool.read() as connection:
        for _ in range(10):
            await connection.execute(text("SELECT 1"))
        prepared = (await connection.execute(text("SELECT count(*) FROM pg_prepared_statements"))).scalar_one()
    await pool.close()
    assert (prepared == 0) is through_pooler


async def test_ping_says_when_there_is_no_database() -> None:
    nowhere = Database("postgresql://nobody@/nothing?host=/nonexistent&port=1", timeout_s=2)
    with pytest.raises(Exception, match="nonexistent"):
        await nowhere.ping()
    await nowhere.close()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_url_works(scheme: str) -> None:
    url = f"{scheme}://user:p%40ss@host:5/db?sslmode=require"
    assert (
        sqlalchemy_url(url).render_as_string(hide_password=False)
        == "postgresql+psycopg://user:p%40ss@host:5/db?sslmode=require"
    )
    assert conninfo(url) == "postgresql://user:p%40ss@host:5/db?sslmode=require"
