"""Warm gangs: kept by shape, handed out again, evicted for whoever waits, rebuilt when their nodes change.

Holds gangs between validations only; while a gang works, its user owns it and either gives it back or kills it.
Whatever gives resources back runs in a task of the pool, so that a request that is cancelled leaves nothing behind.
Decides nothing about validations.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from service.execution.completion import complete
from service.execution.gang import Gang, GangShape, Reservation, group_state, release_group, request_group
from service.execution.line import Line
from service.execution.messages import NodeCapacity
from workers.contract import Device

_FIRST_WAIT_S = 0.05
"""Free resources are granted within this; only a request that waits longer makes warm gangs leave."""
_WAIT_S = 0.1
_PASS_WAIT_S = 0.5
"""Who may pass an older request has this long to get room."""
_Result = TypeVar("_Result")
_log = logging.getLogger("gradgate.pool")


class Pool:
    """The warm gangs of one driver, least recently used first, and the line of those who wait for room."""

    def __init__(self, max_gangs: int, idle_s: float, gpu_idle_s: float) -> None:
        self._max_gangs = max_gangs
        self._idle_s = {Device.CPU: idle_s, Device.CUDA: gpu_idle_s}
        self._idle: list[Gang] = []
        self._leaving: set[asyncio.Task[Any]] = set()
        self._line = Line()

    async def acquire(self, name: str, shape: GangShape, nodes: Sequence[NodeCapacity]) -> Gang | Reservation:
        """A warm gang of this shape, or fresh resources for one. Waits its turn until its task is cancelled."""
        with self._line.join(shape.world_size) as place:
            held: Gang | Reservation | None = None
            if not place.is_first and place.may_pass:
                held = await self._reserve(name, shape, nodes, insist=False)
            if held is None:
                await place.until_first()
                held = await self._reserve(name, shape, nodes, insist=True)
                assert held is not None
            place.serve()
            return held

    @property
    def num_idle(self) -> int:
        """Warm gangs that nobody uses now."""
        return len(self._idle)

    def give_back(self, gang: Gang) -> None:
        """Keep a gang that worked well; the least recently used one leaves when there are too many."""
        gang.idle_since_s = time.monotonic()
        self._idle.append(gang)
        if len(self._idle) > self._max_gangs:
            self._evict(self._idle[:1])

    @asynccontextmanager
    async def kept_empty(self, num_ranks: int) -> AsyncIterator[None]:
        """The first place in line, and no idle gang that holds resources; for ranks that the pool does not start."""
        with self._line.join(num_ranks) as place:
            await place.until_first()
            sweeping = self._own(self._evict_always())
            try:
                yield
            finally:
                sweeping.cancel()

    async def sweep(self, nodes: Sequence[NodeCapacity]) -> None:
        """Drop gangs that idled too long, lost a rank, or stand on a node that is gone."""
        alive = {node.node_id for node in nodes}
        now_s = time.monotonic()
        unwanted = [
            gang
            for gang in self._idle
            if now_s - gang.idle_since_s > self._idle_s[gang.shape.device]
            or not gang.healthy
            or not gang.node_ids <= alive
        ]
        await asyncio.shield(self._evict(unwanted))

    async def close(self) -> None:
        """Kill every idle gang, and wait for all that is being given back."""
        self._evict(list(self._idle))
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _reserve(
        self, name: str, shape: GangShape, nodes: Sequence[NodeCapacity], *, insist: bool
    ) -> Gang | Reservation | None:
        """What `acquire` hands out. Without `insist` only what is free now: None where nothing is."""
        if (gang := self._take(shape)) is not None:
            return gang
        requested = self._own(asyncio.to_thread(request_group, name, shape, nodes))
        try:
            reservation = await asyncio.shield(requested)
            wait_s = _FIRST_WAIT_S if insist else _PASS_WAIT_S
            while not await self._granted(reservation, wait_s):
                if (gang := self._take(shape)) is not None or not insist:
                    break
                await asyncio.shield(self._evict(self._idle[:1]))
                wait_s = _WAIT_S
            else:
                return reservation
        except BaseException:
            await complete(self._own(_withdraw(requested)))
            raise
        withdrawing = self._own(_withdraw(requested))
        if gang is None:
            await complete(withdrawing)  # or it could not ask again under the same name
        return gang

    def _take(self, shape: GangShape) -> Gang | None:
        for gang in reversed(self._idle):
            if gang.shape == shape and gang.healthy:
                self._idle.remove(gang)
                return gang
        return None

    async def _granted(self, reservation: Reservation, wait_s: float) -> bool:
        until_s = time.monotonic() + wait_s
        while await asyncio.to_thread(group_state, reservation.group) != "CREATED":
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.005)
        return True

    def _own(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """A task that lives on when whoever asked for it is cancelled."""
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    def _evict(self, unwanted: Sequence[Gang]) -> asyncio.Future[Any]:
        """Kill idle gangs, all at once; the future is done when they are gone."""
        self._idle = [gang for gang in self._idle if gang not in unwanted]
        return asyncio.gather(*(self._own(_see_off(gang)) for gang in unwanted))

    async def _evict_always(self) -> None:
        while True:
            self._evict(list(self._idle))
            await asyncio.sleep(_WAIT_S)


async def _see_off(gang: Gang) -> None:
    try:
        leak = await gang.kill()
    except Exception as error:
        leak = repr(error)
    if leak is not None:
        _log.warning("an idle gang did not go away", extra={"gang": gang.name, "leak": leak})


async def _withdraw(requested: asyncio.Task[Reservation]) -> None:
    """Give up a reservation that was asked for, once it is known."""
    try:
        reservation = await requested
    except Exception:
        return  # whoever asked is told
    if (leak := await release_group(reservation.group)) is not None:
        _log.warning("a reservation did not go away", extra={"group": reservation.name, "leak": leak})
