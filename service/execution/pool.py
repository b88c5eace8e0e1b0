"""Warm gangs: kept by shape, handed out again, evicted for whoever waits, rebuilt when their nodes change.

Holds gangs between validations only; while a gang works, its user owns it and either gives it back or kills it.
Decides nothing about validations.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

from service.execution.gang import Gang, GangShape, Reservation, group_state, release_group, request_group
from service.execution.messages import NodeCapacity
from workers.contract import Device

_FIRST_WAIT_S = 0.05
"""Free resources are granted within this; only a request that waits longer makes warm gangs leave."""
_WAIT_S = 0.1
_log = logging.getLogger("gradgate.pool")


class Pool:
    """The warm gangs of one driver, least recently used first."""

    def __init__(self, max_gangs: int, idle_s: float, gpu_idle_s: float) -> None:
        self._max_gangs = max_gangs
        self._idle_s = {Device.CPU: idle_s, Device.CUDA: gpu_idle_s}
        self._idle: list[Gang] = []
        self._leaving: set[asyncio.Task[object]] = set()
        self._num_hungry = 0

    async def acquire(self, name: str, shape: GangShape, nodes: Sequence[NodeCapacity]) -> Gang | Reservation:
        """A warm gang of this shape, or fresh resources for one. Waits for resources until its task is cancelled."""
        if (gang := self._take(shape)) is not None:
            return gang
        reservation = await asyncio.to_thread(request_group, name, shape, nodes)
        try:
            wait_s = _FIRST_WAIT_S
            while not await self._granted(reservation, wait_s):
                if (gang := self._take(shape)) is not None:
                    self._spawn(release_group(reservation.group))
                    return gang
                await self._evict_one()
                wait_s = _WAIT_S
        except BaseException:
            await release_group(reservation.group)
            raise
        return reservation

    @property
    def num_idle(self) -> int:
        """Warm gangs that nobody uses now."""
        return len(self._idle)

    def give_back(self, gang: Gang) -> None:
        """Keep a gang that worked well; the least recently used one leaves when there are too many."""
        gang.idle_since_s = time.monotonic()
        self._idle.append(gang)
        if self._num_hungry or len(self._idle) > self._max_gangs:
            self._spawn(self._evict_one())

    @asynccontextmanager
    async def kept_empty(self) -> AsyncIterator[None]:
        """No idle gang holds resources inside this block; for ranks that the pool does not start itself."""
        self._num_hungry += 1
        try:
            await self._evict(lambda _: True)
            yield
        finally:
            self._num_hungry -= 1

    async def sweep(self, nodes: Sequence[NodeCapacity]) -> None:
        """Drop gangs that idled too long, lost a rank, or stand on a node that is gone."""
        alive = {node.node_id for node in nodes}
        now_s = time.monotonic()
        await self._evict(
            lambda gang: (
                now_s - gang.idle_since_s > self._idle_s[gang.shape.device]
                or not gang.healthy
                or not gang.node_ids <= alive
            )
        )

    async def close(self) -> None:
        """Kill every idle gang."""
        await self._evict(lambda _: True)
        await asyncio.gather(*self._leaving)

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

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _evict_one(self) -> None:
        if self._idle:
            oldest = self._idle[0]
            await self._evict(lambda gang: gang is oldest)

    async def _evict(self, unwanted: Callable[[Gang], bool]) -> None:
        leaving = [gang for gang in self._idle if unwanted(gang)]
        self._idle = [gang for gang in self._idle if gang not in leaving]
        for gang in leaving:
            if (leak := await gang.kill()) is not None:
                _log.warning("an idle gang did not go away", extra={"gang": gang.name, "leak": leak})
