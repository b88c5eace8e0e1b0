"""One dispatcher leads a cluster; the others wait. A Postgres advisory lock on a connection of its own decides.

The lock ends with the connection, so a dead leader never blocks its successor. Nor does one that lives and says nothing
(stopped, or stuck): the server ends a session that was idle for too long. A leader whose connection broke takes the
lock again and goes on, however long the database is away: what its gangs found must not be lost with it. Two leaders
for a moment (a connection that broke unnoticed) are harmless: claims skip locked rows and every write is fenced by
attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any

import psycopg

from service.storage.session import conninfo

_REFUSED_S = 5.0
"""The server may need this long to notice that this process's own broken connection is gone."""
_log = logging.getLogger("gradgate.dispatcher")


def lock_key(cluster: str) -> int:
    """The lock's number: 64 bits of the cluster's name."""
    digest = hashlib.blake2b(f"gradgate dispatcher {cluster}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class Leadership:
    """Held until `lost` is set or `close` is called."""

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        database_url: str,
        cluster: str,
        check_s: float,
        silence_s: float,
    ) -> None:
        self.lost = asyncio.Event()
        self._database_url = database_url
        self._cluster = cluster
        self._connection = connection
        self._silence_s = silence_s
        self._watch = asyncio.create_task(self._check(check_s))

    async def close(self) -> None:
        """Give the lead up."""
        self._watch.cancel()
        await self._connection.close()

    async def _check(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                async with asyncio.timeout(max(5.0, interval_s)):
                    await self._connection.execute("SELECT 1")
            except (psycopg.Error, OSError) as error:
                _log.warning("the leader's connection broke, taking the lock again", extra={"reason": str(error)})
                await self._connection.close()
                if not await self._take_again(interval_s):
                    _log.warning("lost the leader's lock: another dispatcher has it")
                    self.lost.set()
                    return

    async def _take_again(self, interval_s: float) -> bool:
        """Wait for the database; False once it says for a while that somebody else has the lock."""
        refused_since_s: float | None = None
        while refused_since_s is None or time.monotonic() - refused_since_s < _REFUSED_S:
            try:
                if (connection := await _try_lock(self._database_url, self._cluster, self._silence_s)) is not None:
                    self._connection = connection
                    _log.info("leading again", extra={"cluster": self._cluster})
                    return True
                refused_since_s = refused_since_s or time.monotonic()
            except (psycopg.Error, OSError):
                refused_since_s = None
            await asyncio.sleep(interval_s)
        return False


async def lead(database_url: str, cluster: str, poll_s: float, silence_s: float = 10.0) -> Leadership:
    """Wait until this process leads the cluster; it loses the lead when it says nothing for `silence_s`."""
    silence_s = max(silence_s, 3 * poll_s)
    standing_by = False
    while True:
        try:
            if (connection := await _try_lock(database_url, cluster, silence_s)) is not None:
                _log.info("leading", extra={"cluster": cluster})
                return Leadership(connection, database_url, cluster, poll_s, silence_s)
            if not standing_by:
                _log.info("standing by: another dispatcher leads", extra={"cluster": cluster})
                standing_by = True
        except (psycopg.Error, OSError) as error:
            _log.warning("cannot reach the database", extra={"reason": str(error)})
        await asyncio.sleep(poll_s)


async def _try_lock(database_url: str, cluster: str, silence_s: float) -> psycopg.AsyncConnection[Any] | None:
    connection = await psycopg.AsyncConnection[Any].connect(
        conninfo(database_url), autocommit=True, connect_timeout=10, application_name="gradgate leader"
    )
    await connection.execute("SELECT set_config('idle_session_timeout', %s, false)", [f"{round(silence_s * 1000)}ms"])
    cursor = await connection.execute("SELECT pg_try_advisory_lock(%s::bigint)", [lock_key(cluster)])
    row = await cursor.fetchone()
    if row is not None and row[0]:
        return connection
    await connection.close()
    return None
