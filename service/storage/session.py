"""Connections to Postgres. Hand one to a storage function, do not keep it: nothing may hold one while it waits.

`read()` is one consistent snapshot for as many statements as needed; `transaction()` commits at its end, or rolls
back when its block raises. Business rules do not belong here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from workers.encoding import dumps

Connection = AsyncConnection
"""What storage functions take: an open transaction."""


# psycopg's own, too: a COPY does not pass through SQLAlchemy, which would have wrapped them.
DATABASE_AWAY = (
    OperationalError,
    InterfaceError,
    PoolTimeoutError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    OSError,
)
"""What storage functions raise while the database does not answer; the same call may succeed later."""


def sqlalchemy_url(url: str) -> URL:
    """The URL of any Postgres spelling, for SQLAlchemy on psycopg 3."""
    return make_url(url.replace("postgres://", "postgresql://", 1)).set(drivername="postgresql+psycopg")


def conninfo(url: str) -> str:
    """The same URL for psycopg itself."""
    return sqlalchemy_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


class Database:
    """A pool of connections to one database. Opens the first one on use."""

    def __init__(self, url: str, *, pool_size: int = 10, timeout_s: float = 10.0, through_pooler: bool = False) -> None:
        self.url = url
        self.engine: AsyncEngine = create_async_engine(
            sqlalchemy_url(url),
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=timeout_s,
            # A server that restarted must cost one retry here, not one failed request per pooled connection.
            pool_pre_ping=True,
            json_serializer=dumps,
            connect_args={
                "connect_timeout": max(2, round(timeout_s)),
                "application_name": "gradgate",
                # Behind a transaction pooler the next transaction may meet a session that prepared nothing.
                **({"prepare_threshold": None} if through_pooler else {}),
            },
        )
        self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A read-write transaction."""
        async with self.engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A read-only transaction in which every statement sees the same moment."""
        async with self._reader.connect() as connection:
            yield connection

    async def ping(self) -> None:
        """Raise unless the database answers."""
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every pooled connection."""
        await self.engine.dispose()
