"""A validation's history: appended under its row lock, read by sequence number, announced by NOTIFY.

`seq` counts from 1 without gaps and in commit order: whoever appends first locks the validation's row, and a
rollback takes the number back. A reader that saw seq n can therefore never miss an event below n.

A notification carries no data, only the hint to read again: subscribe, read, wait, read again. Waiting holds no
database session; `EventHub` has the one connection of its process that listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import psycopg
from sqlalchemy import Text, func, select, update
from sqlalchemy.dialects.postgresql import ARRAY, array

from service.domain.validation import LEASED, TERMINAL, Event
from service.storage.session import Connection, conninfo
from service.storage.tables import events, validations

EVENTS_CHANNEL = "gradgate_events"
"""Payload: the validation's id; at its final event also the id with `END_MARK`, for those who wait for just that."""
END_MARK = "!"
QUEUE_CHANNEL = "gradgate_queue"
"""Payload: the cluster's name."""

_CHECK_S = 15.0
"""A listening connection that was silent this long is asked whether it still lives."""
_ANSWER_S = 10.0
_RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)

_log = logging.getLogger(__name__)

Entry = tuple[str, Mapping[str, Any]]
"""An event's type and data."""


async def append(
    connection: Connection,
    validation_id: str,
    event_type: str,
    data: Mapping[str, Any],
    *,
    attempt: int | None = None,
) -> int | None:
    """Append one event and return its seq; see `append_many`."""
    return await append_many(connection, validation_id, [(event_type, data)], attempt=attempt)


async def append_many(
    connection: Connection,
    validation_id: str,
    entries: Sequence[Entry],
    *,
    attempt: int | None = None,
) -> int | None:
    """Append events and return the seq of the last one.

    None, and nothing appended, where the validation is unknown or final (its history is closed), or, with
    `attempt`, where it is no longer held in that attempt.
    """
    allowed = [validations.c.id == validation_id, validations.c.state.not_in(TERMINAL)]
    if attempt is not None:
        allowed += [validations.c.attempt == attempt, validations.c.state.in_(LEASED)]
    reserve = (
        update(validations)
        .where(*allowed)
        .values(last_event_seq=validations.c.last_event_seq + len(entries))
        .returning(validations.c.last_event_seq)
    )
    last_seq: int | None = (await connection.execute(reserve)).scalar_one_or_none()
    if last_seq is None or not entries:
        return last_seq
    first_seq = last_seq - len(entries) + 1
    await record(connection, [(validation_id, first_seq + i, *entry) for i, entry in enumerate(entries)])
    return last_seq


async def record(connection: Connection, rows: Sequence[tuple[str, int, str, Mapping[str, Any]]]) -> None:
    """Write events under seqs that the caller reserved in this transaction, and announce them on commit."""
    if not rows:
        return
    names = ("validation_id", "seq", "type", "data")
    await connection.execute(events.insert(), [dict(zip(names, row, strict=True)) for row in rows])
    ended = {row[0] + END_MARK for row in rows if row[2] in TERMINAL}
    await notify(connection, EVENTS_CHANNEL, {row[0] for row in rows} | ended)


async def notify(connection: Connection, channel: str, payloads: set[str]) -> None:
    """Tell listeners of `channel`, once this transaction commits."""
    payload = func.unnest(array(sorted(payloads), type_=ARRAY(Text))).column_valued("payload")
    await connection.execute(select(func.pg_notify(channel, payload)))


async def read(connection: Connection, validation_id: str, after_seq: int = 0, limit: int = 500) -> tuple[Event, ...]:
    """Events with a seq above `after_seq`, oldest first; empty when there is nothing newer (or no such validation)."""
    query = (
        select(events)
        .where(events.c.validation_id == validation_id, events.c.seq > after_seq)
        .order_by(events.c.seq)
        .limit(limit)
    )
    return tuple(Event(**row) for row in (await connection.execute(query)).mappings())


class Subscription:
    """Wakes on every notification for its topic. One waiter at a time."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """True when something may have changed since the last wait; False after `timeout_s` of silence."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def wake(self) -> None:
        """Let the waiter, or the next one, go and read."""
        self._changed.set()


class EventHub:
    """The listening connection of this process, and who waits for what. Use as an async context manager.

    It reconnects for ever; since notifications sent meanwhile are lost, every subscriber is woken after that.
    """

    def __init__(self, database_url: str) -> None:
        self._url = conninfo(database_url)
        self._subscriptions: defaultdict[tuple[str, str], set[Subscription]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None
        self._connected = False

    @property
    def connected(self) -> bool:
        """Whether notifications arrive at present; without them waiters live on their timeouts alone."""
        return self._connected

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen_for_ever(), name="event hub")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening. Waiters are woken, so that they can see that their process ends."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._wake_all()

    @asynccontextmanager
    async def subscribe(self, validation_id: str) -> AsyncIterator[Subscription]:
        """Wake on events of one validation. Read after subscribing, or what came before is missed."""
        async with self._subscribe((EVENTS_CHANNEL, validation_id)) as subscription:
            yield subscription

    @asynccontextmanager
    async def subscribe_end(self, validation_id: str) -> AsyncIterator[Subscription]:
        """Wake when one validation has ended, and not for each step on its way there."""
        async with self._subscribe((EVENTS_CHANNEL, validation_id + END_MARK)) as subscription:
            yield subscription

    @asynccontextmanager
    async def subscribe_queue(self, cluster: str) -> AsyncIterator[Subscription]:
        """Wake when a cluster's queue has something new: a validation, or a wish to cancel one."""
        async with self._subscribe((QUEUE_CHANNEL, cluster)) as subscription:
            yield subscription

    @asynccontextmanager
    async def _subscribe(self, topic: tuple[str, str]) -> AsyncIterator[Subscription]:
        subscription = Subscription()
        self._subscriptions[topic].add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions[topic].discard(subscription)
            if not self._subscriptions[topic]:
                del self._subscriptions[topic]

    async def _listen_for_ever(self) -> None:
        failures = 0
        while True:
            try:
                async with await self._connect() as connection:
                    failures = 0
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                _log.warning("lost the connection that listens for notifications, reconnecting: %s", error)
            finally:
                self._connected = False
            await asyncio.sleep(_RECONNECT_S[min(failures, len(_RECONNECT_S) - 1)])
            failures += 1

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=round(_ANSWER_S), application_name="gradgate listen"
        )

    async def _listen(self, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(f"LISTEN {EVENTS_CHANNEL}")
        await connection.execute(f"LISTEN {QUEUE_CHANNEL}")
        self._connected = True
        self._wake_all()
        while True:
            async for notification in connection.notifies(timeout=_CHECK_S):
                self._wake(notification.channel, notification.payload)
            # Silence may mean that nothing happened, or that the server's host is gone: ask.
            async with asyncio.timeout(_ANSWER_S):
                await connection.execute("SELECT 1")

    def _wake(self, channel: str, payload: str) -> None:
        for subscription in self._subscriptions.get((channel, payload), ()):
            subscription.wake()

    def _wake_all(self) -> None:
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.wake()
