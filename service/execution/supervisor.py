"""The leader at work: claims queued validations, orders the driver to run them, writes down what comes back.

NOTIFY is a hint, polling is the truth. Leases are renewed while an attempt runs; whoever loses one stops. A driver
child that dies loses its attempts, which go back to the queue, and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Coroutine
from datetime import UTC, datetime

from service.domain.validation import FailureDetail
from service.execution.child import DriverChild, driver_config
from service.execution.measures import Measures
from service.execution.messages import (
    Alive,
    Cancel,
    Cancelled,
    Capacity,
    Failed,
    FromDriver,
    LeftBehind,
    Ready,
    Sweep,
    ToDriver,
    WorkKey,
)
from service.execution.order import to_start
from service.execution.patience import patience
from service.execution.record import Record, Requeue
from service.execution.silence import Silence
from service.settings import Settings
from service.storage import queue, reaping
from service.storage.capacity import CapacitySnapshot, store_snapshot
from service.storage.events import EventHub, Subscription
from service.storage.session import Database
from workers.encoding import plain
from workers.errors import UnknownStackError
from workers.stacks.registry import known_stacks, unknown_stack

DRIVER_SILENCE_S = 20.0
"""A driver whose event loop does not turn for this long hangs: stopped, or stuck in a call."""
CLUSTER_SILENCE_S = 90.0
"""Nor is one of use that cannot read its cluster for this long. Ray itself ends one that lost it after 60 s."""
STARTUP_SILENCE_S = 180.0
OVERDUE_S = 60.0
"""How long after an attempt's deadline its driver may take for its last words; teardowns are bounded far below."""
_TICK_S = 1.0
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
RECORD_TIMEOUT_S = 5.0
"""How long stopping waits for the database to take the last words."""
_log = logging.getLogger("gradgate.dispatcher")


class Supervisor:
    """Serves one term as leader."""

    def __init__(self, settings: Settings, database: Database, hub: EventHub, measures: Measures) -> None:
        self._settings = settings
        self._measures = measures
        measures.attempts_running.set_function(lambda: len(self._records))
        self._database = database
        self._hub = hub
        self._records: dict[WorkKey, Record] = {}
        self._tasks: dict[WorkKey, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._child: DriverChild | None = None
        self._driver_ready = False
        self._driver_silence = Silence()
        self._cluster_silence = Silence()
        self._news = Subscription()
        self._stacks = known_stacks(settings.stacks)

    async def serve(self, ending: Awaitable[object]) -> None:
        """Work until `ending` is done, then give back what runs. Raises what broke a loop, if one did."""
        async with self._hub.subscribe_queue(self._settings.cluster) as self._news:
            loops = [asyncio.create_task(loop()) for loop in (self._claim_loop, self._lease_loop, self._driver_loop)]
            try:
                await asyncio.wait([asyncio.ensure_future(ending), *loops], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for loop in loops:
                    loop.cancel()
                results = await asyncio.gather(*loops, return_exceptions=True)
                await self._stop()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _claim_loop(self) -> None:
        while True:
            with patience("claim"):
                await self._claim()
                if self._records:
                    await self._renew()  # the notification may have been a wish to cancel
            await self._news.wait(self._settings.poll_s)

    async def _claim(self) -> None:
        limit = self._settings.max_parallel - len(self._records)
        if not self._driver_ready or limit <= 0:
            return
        settings = self._settings
        async with self._database.transaction() as connection:
            claims = await queue.claim(
                connection,
                cluster=settings.cluster,
                dispatcher_id=settings.dispatcher_id,
                lease_s=settings.lease_s,
                limit=limit,
            )
        for claim in claims:
            self._begin(claim)

    def _begin(self, claim: queue.Claim) -> None:
        key = WorkKey(claim.id, claim.attempt)
        claimed_at = claim.lease_expires_at.timestamp() - self._settings.lease_s
        queued_s = max(0.0, claimed_at - claim.created_at.timestamp())
        record = Record(self._database, key, queued_s, self._measures, claim.traceparent)
        self._records[key] = record
        self._tasks[key] = asyncio.create_task(self._keep(record))
        try:
            start = to_start(key, claim.request, claim.deadline_s)
        except (KeyError, TypeError, ValueError) as error:
            message = f"the stored request cannot be read by this version: {error!r}; send it again"
            record.hear(Failed(key, FailureDetail("invalid_request", message)))
            return
        if start.spec.stack not in self._stacks:
            message = unknown_stack(start.spec.stack, self._stacks)
            record.hear(Failed(key, FailureDetail(UnknownStackError.code, message)))
            return
        record.begin(start)
        overdue_s = start.remaining_s + OVERDUE_S
        record.alarm = asyncio.get_running_loop().call_later(overdue_s, self._break_off, record, start.remaining_s)
        self._order(start)

    def _break_off(self, record: Record, deadline_s: float) -> None:
        """End an attempt whose driver does not, and that driver with it: nobody knows what it still holds."""
        if record.heard_final or self._child is None:
            return
        message = (
            f"not finished when deadline_s={deadline_s:g} ran out, and the driver process had not ended it "
            f"{OVERDUE_S:g} s later; that process was replaced: validate again, and look at the dispatcher's log"
        )
        _log.error("the driver does not end an attempt", extra={"pid": self._child.pid, "attempt": str(record.key)})
        record.hear(Failed(record.key, FailureDetail("deadline_exceeded", message)))
        self._child.strike()

    async def _keep(self, record: Record) -> None:
        key = record.key
        try:
            await record.run()
        except Exception as error:
            _log.exception("an attempt could not be written down")
            record.lost = True
            await self._give_up(key, error)
        finally:
            record.stop_alarm()
            self._records.pop(key, None)
            self._tasks.pop(key, None)
            self._news.wake()
            if record.lost:
                self._measures.leases_lost.inc()
                _log.warning("dropped an attempt that is no longer ours")
                self._order(Cancel(key))

    async def _give_up(self, key: WorkKey, error: Exception) -> None:
        detail = FailureDetail("not_stored", f"the result could not be stored: {error!r}"[:2000])
        with patience("fail an attempt"):
            async with self._database.transaction() as connection:
                await queue.fail(connection, key.validation_id, key.attempt, detail)

    async def _lease_loop(self) -> None:
        answering_since_s: float | None = None
        while True:
            answered = False
            with patience("renew leases"):
                await self._renew()
                answered = True
                answering_since_s = answering_since_s or time.monotonic()
                # Leases lapse while the database is away. Whoever held them renews first, another dispatcher too.
                if time.monotonic() - answering_since_s >= self._settings.lease_s / 2:
                    await self._reap()
            if not answered:
                answering_since_s = None
            await asyncio.sleep(self._settings.lease_s / 3)

    async def _reap(self) -> None:
        """Take over what silent dispatchers held, and fail what waited too long."""
        settings = self._settings
        async with self._database.transaction() as connection:
            lapsed = await reaping.requeue_expired(connection, cluster=settings.cluster)
            expired = await reaping.expire_waiting(connection, cluster=settings.cluster, wait_s=settings.queue_wait_s)
        self._measures.leases_lapsed.inc(len(lapsed))
        await self._sweep()
        if expired:
            _log.warning("validations waited too long in the queue", extra={"ids": expired[:20], "num": len(expired)})

    async def _sweep(self) -> None:
        """Let the driver remove what others left on the cluster, once it is known who holds what."""
        with patience("see who holds what"):
            async with self._database.read() as connection:
                held = await reaping.held_now(connection, self._settings.cluster)
            if self._driver_ready:
                self._order(Sweep(frozenset(WorkKey(*attempt) for attempt in held)))

    async def _renew(self) -> None:
        settings = self._settings
        held = {(key.validation_id, key.attempt): record for key, record in self._records.items()}
        async with self._database.transaction() as connection:
            found = await queue.extend(
                connection, dispatcher_id=settings.dispatcher_id, held=list(held), lease_s=settings.lease_s
            )
        for pair, record in held.items():
            if record.key not in self._tasks:  # it ended, or learnt of its loss, while this asked
                continue
            if pair not in found.still_held and not record.ending:
                record.lost = True
                self._tasks[record.key].cancel()
            elif pair in found.cancel_requested and not record.cancel_requested:
                record.cancel_requested = True
                self._order(Cancel(record.key))

    async def _driver_loop(self) -> None:
        num_failures = 0
        while True:
            await asyncio.sleep(RESTART_DELAYS_S[min(num_failures, len(RESTART_DELAYS_S) - 1)])
            began_s = time.monotonic()
            self._driver_silence, self._cluster_silence = Silence(), Silence()
            child = self._child = DriverChild(driver_config(self._settings), self._hear)
            how = await self._until_dead(child)
            self._driver_ready = False
            await child.kill()
            for record in list(self._records.values()):
                record.hear(Requeue(f"the driver process {how}"))
            self._measures.driver_deaths.inc()
            num_failures = 0 if time.monotonic() - began_s > 60 else num_failures + 1
            extra = {"pid": child.pid, "how": how, "in_a_row": num_failures}
            _log.warning("the driver process is gone, starting another", extra=extra)

    async def _until_dead(self, child: DriverChild) -> str:
        """Wait until the child is of no use any more; says how it came to that."""
        while not child.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await child.ended.wait()
            silent_s, blind_s = self._driver_silence.grow(_TICK_S), self._cluster_silence.grow(_TICK_S)
            if silent_s > (DRIVER_SILENCE_S if self._driver_ready else STARTUP_SILENCE_S):
                return f"said nothing for {silent_s:g} s and was killed"
            if self._driver_ready and blind_s > CLUSTER_SILENCE_S:
                return f"could not read its cluster for {blind_s:g} s and was killed"
        return "died"

    def _order(self, message: ToDriver) -> None:
        if self._child is not None:
            self._child.send(message)

    def _hear(self, message: FromDriver) -> None:
        self._driver_silence.end()
        if isinstance(message, Alive):
            return
        if isinstance(message, Ready):
            self._driver_ready = True
            _log.info("the driver is ready", extra={"ray": message.ray_version, "pid": message.pid})
            self._news.wake()
            self._spawn(self._sweep())
        elif isinstance(message, Capacity):
            self._cluster_silence.end()
            self._measures.gangs_idle.set(message.num_idle_gangs)
            self._spawn(self._store_capacity(message))
        elif isinstance(message, LeftBehind):
            self._measures.leaks.inc()
            _log.error("a gang did not go away", extra={"attempt": str(message.key), "leak": message.leak})
        elif (record := self._records.get(message.key)) is not None:
            if isinstance(message, Cancelled) and not record.cancel_requested:
                record.hear(Requeue("the dispatcher stopped", lost=False))
            else:
                record.hear(message)

    async def _store_capacity(self, message: Capacity) -> None:
        snapshot = CapacitySnapshot(
            cluster=self._settings.cluster,
            observed_at=datetime.now(UTC),
            num_nodes=len(message.nodes),
            num_cpus=sum(node.num_cpus for node in message.nodes),
            num_gpus=sum(node.num_gpus for node in message.nodes),
            nodes=plain(message.nodes),
            stacks=self._stacks,
        )
        with patience("store a capacity snapshot"):
            async with self._database.transaction() as connection:
                await store_snapshot(connection, snapshot.cluster, self._settings.dispatcher_id, snapshot)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _stop(self) -> None:
        """Let the driver kill its gangs, then give every attempt back to the queue."""
        if self._child is not None:
            await self._child.stop()
        await asyncio.sleep(0)  # the driver's last messages
        for record in list(self._records.values()):
            record.hear(Requeue("the dispatcher stopped", lost=False))
        if tasks := [*self._tasks.values(), *self._background]:
            _, late = await asyncio.wait(tasks, timeout=RECORD_TIMEOUT_S)
            for task in late:  # the lease will lapse, and another dispatcher takes over
                task.cancel()
