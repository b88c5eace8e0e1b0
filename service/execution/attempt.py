"""One attempt at one validation on the driver's side: reserve, form, run, and leave nothing behind.

Talks to the supervisor through `send` only. Whatever ends an attempt - reports, a failure, the deadline, a cancel -
exactly one final message follows, and it follows the gang's end wherever the gang is not kept warm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from service import telemetry
from service.domain.cause import unknown
from service.domain.validation import FailureDetail
from service.execution.beacon import BeaconServer
from service.execution.completion import complete
from service.execution.failure import deadline_detail
from service.execution.gang import Gang, GangShape, Reservation, release_group, remove_group, start_ranks
from service.execution.messages import (
    Cancelled,
    Failed,
    Finished,
    Formed,
    FromDriver,
    LeftBehind,
    NodeCapacity,
    Progress,
    Repeated,
    Repeating,
    Reserved,
    Start,
)
from service.execution.outbox import GangFailure
from service.execution.placement import choose_device, shortfall
from service.execution.pool import Pool
from service.execution.ray_train import WIND_DOWN_S, TrainGang, TrainSite
from service.execution.repeat import (
    NO_PERMUTATION_BY_TRAIN,
    Failure,
    failure_of,
    move,
    other_seats,
    run_elsewhere,
    seats_of,
)
from service.execution.sweep import group_name
from service.execution.teardown import TEARDOWN_LIMIT_S, bounded
from workers.contract import Device, Launcher, StepReport, TrialSpec
from workers.plan import trials

PROGRESS_INTERVAL_S = 0.03
"""Reports cross the pipe at most this often."""
_log = logging.getLogger("gradgate.driver")


@dataclass(frozen=True, slots=True)
class Workplace:
    """What attempts share: the pool, the position lines, the node table and the way back to the supervisor."""

    pool: Pool
    beacons: BeaconServer
    nodes: Callable[[], tuple[NodeCapacity, ...]]
    fresh_nodes: Callable[[], tuple[NodeCapacity, ...]]
    """Asks the cluster; blocks."""
    send: Callable[[FromDriver], None]
    train_site: TrainSite


class Attempt:
    """Runs one `Start`. Its task may be cancelled at any time, more than once too."""

    def __init__(self, start: Start, workplace: Workplace) -> None:
        self._start = start
        self._work = workplace
        self._gang: Gang | TrainGang | None = None
        self._reserved = False
        self._why_device: str | None = None
        self._reports: list[StepReport] = []
        """Not yet sent."""
        self._plan: tuple[TrialSpec, ...] = ()
        self._heard: list[StepReport] = []
        self._moved = False
        """The gang is no longer the one that the pool handed out."""
        self._flush: asyncio.TimerHandle | None = None
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Work until there is a final message, and send it."""
        telemetry.attempt.set((self._start.key.validation_id, self._start.key.attempt))
        try:
            async with asyncio.timeout(self._start.remaining_s):
                await self._work_through()
            ending = self._finish(await self._explain())
        except GangFailure as failure:
            ending = self._fail(failure.detail)
        except TimeoutError:
            ending = self._fail_overdue()
        except asyncio.CancelledError:
            ending = self._cancelled()
        except Exception as error:
            _log.exception("an attempt broke")
            message = f"the driver could not run this attempt: {type(error).__name__}: {error}"
            ending = self._fail(FailureDetail("driver_error", message))
        # A cancel that comes now must not keep the final message from being sent.
        await complete(ending)

    async def _work_through(self) -> None:
        start = self._start
        nodes = await self._feasible_nodes()
        choice = choose_device(start.spec.device, nodes, start.spec.mesh.world_size, start.placement)
        self._why_device = choice.why
        shape = GangShape(start.spec.mesh.world_size, choice.device, start.placement)
        plan = self._plan = trials(start.spec, shape.device)
        gang: Gang | TrainGang
        if start.launcher is Launcher.RAY_TRAIN:
            gang = await self._form_by_train(shape, nodes, plan)
        else:
            gang = await self._form_by_pool(shape, nodes)
        self._work.send(Formed(start.key, gang.fingerprints, self._elapsed_s()))
        await gang.run(plan, self._hear)

    async def _explain(self) -> Repeated | None:
        """What a failed run follows; None where nothing failed. Never fails: the run is done, and its result counts."""
        began_s = self._elapsed_s()
        try:
            failure = await asyncio.to_thread(failure_of, self._plan, self._heard)
            repeated = await self._repeat(failure) if failure.titles else None
        except TimeoutError:
            repeated = Repeated(
                unknown("the repeat with the ranks in other seats was not done when deadline_s ran out")
            )
        except GangFailure as broken:
            repeated = Repeated(unknown(f"the repeat with the ranks in other seats broke: {broken.detail.message}"))
        except Exception as error:
            _log.exception("a failed run could not be repeated")
            repeated = Repeated(
                unknown(f"the repeat with the ranks in other seats broke: {type(error).__name__}: {error}")
            )
        return repeated and replace(repeated, seconds=self._elapsed_s() - began_s)

    async def _repeat(self, failure: Failure) -> Repeated:
        gang = self._gang
        if not isinstance(gang, Gang):
            return Repeated(unknown(NO_PERMUTATION_BY_TRAIN))
        seats = seats_of(gang.fingerprints)
        taken = other_seats(failure, seats)
        if isinstance(taken, Repeated):
            return taken
        suspects = tuple(sorted(failure.seen_from(seats).accused))
        nodes = tuple(seats[bundle].node for bundle in taken)
        self._work.send(Repeating(self._start.key, self._take_reports(), failure.titles, suspects, nodes))
        async with asyncio.timeout(self._start.remaining_s - self._elapsed_s()):
            self._moved = True
            self._gang = gang = await move(gang, taken, self._work.beacons)
            names = {node.node_id: node.name for node in self._work.nodes()}
            return await run_elsewhere(gang, names, failure, seats)

    async def _finish(self, repeated: Repeated | None) -> None:
        gang = self._gang
        if isinstance(gang, Gang) and not self._moved:
            self._gang = None
            self._work.pool.give_back(gang)
        # Before anything is torn down: a teardown that hangs, or a driver that dies in it, must not lose a result.
        self._work.send(Finished(self._start.key, self._take_reports(), repeated))
        # Ranks in other seats are of no use to anybody else, nor are Ray Train's.
        leak = await (self._wind_down(gang) if isinstance(gang, TrainGang) else self._kill())
        if leak is not None:
            self._work.send(LeftBehind(self._start.key, leak))

    async def _wind_down(self, gang: TrainGang) -> str | None:
        self._gang = None
        return await bounded(gang.wind_down(), TEARDOWN_LIMIT_S + WIND_DOWN_S)

    async def _cancelled(self) -> None:
        self._work.send(Cancelled(self._start.key, await self._kill()))

    async def _feasible_nodes(self) -> tuple[NodeCapacity, ...]:
        nodes = self._work.nodes()
        if self._lacks(nodes) is not None:
            nodes = await asyncio.to_thread(self._work.fresh_nodes)
            if (lack := self._lacks(nodes)) is not None:
                raise GangFailure(FailureDetail("infeasible", lack))
        return nodes

    def _lacks(self, nodes: tuple[NodeCapacity, ...]) -> str | None:
        spec, placement = self._start.spec, self._start.placement
        choice = choose_device(spec.device, nodes, spec.mesh.world_size, placement)
        return shortfall(nodes, spec.mesh.world_size, choice.device, placement)

    async def _form_by_pool(self, shape: GangShape, nodes: tuple[NodeCapacity, ...]) -> Gang:
        key = self._start.key
        if key.attempt > 1:  # whoever held the attempt before may have left its resources reserved
            await asyncio.to_thread(remove_group, group_name(key.validation_id, key.attempt - 1))
        held = await self._work.pool.acquire(group_name(key.validation_id, key.attempt), shape, nodes)
        names = {node.node_id: node.name for node in nodes}
        if isinstance(held, Gang):
            self._gang = held
            self._say_reserved(shape, tuple(sorted(set(held.node_names.values()))), warm=True)
            return held
        gang = await self._start_ranks(held)
        self._gang = gang
        self._say_reserved(shape, await asyncio.to_thread(held.node_names, names), warm=False)
        await gang.join(names)
        return gang

    async def _start_ranks(self, reservation: Reservation) -> Gang:
        try:
            return start_ranks(reservation, self._work.beacons)
        except BaseException:
            await complete(release_group(reservation.group))
            raise

    async def _form_by_train(
        self, shape: GangShape, nodes: tuple[NodeCapacity, ...], plan: tuple[TrialSpec, ...]
    ) -> TrainGang:
        key = self._start.key
        name = f"gradgate-{key.validation_id}-{key.attempt}"
        async with self._work.pool.kept_empty(shape.world_size):
            gang = TrainGang(name, shape, nodes, plan, self._work.beacons, self._work.train_site)
            self._gang = gang
            await gang.join()
        self._say_reserved(shape, tuple(sorted(set(gang.node_names.values()))), warm=False)
        return gang

    def _say_reserved(self, shape: GangShape, nodes: tuple[str, ...], *, warm: bool) -> None:
        self._reserved = True
        self._work.send(Reserved(self._start.key, shape.device, nodes, warm, self._elapsed_s(), self._why_device))

    def _hear(self, reports: list[StepReport]) -> None:
        self._reports += reports
        self._heard += reports
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(PROGRESS_INTERVAL_S, self._send_progress)

    def _send_progress(self) -> None:
        self._flush = None
        self._work.send(Progress(self._start.key, self._take_reports()))

    def _take_reports(self) -> tuple[StepReport, ...]:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        taken, self._reports = tuple(self._reports), []
        return taken

    async def _fail(self, detail: FailureDetail) -> None:
        leak = await self._kill()
        self._work.send(Failed(self._start.key, detail, self._take_reports(), leak))

    async def _kill(self) -> str | None:
        gang, self._gang = self._gang, None
        return None if gang is None else await bounded(gang.kill(), TEARDOWN_LIMIT_S)

    async def _fail_overdue(self) -> None:
        if (detail := self._never_reserved()) is None:
            assert self._gang is not None
            ranks = await self._gang.whereabouts()
            detail = deadline_detail(self._start.remaining_s, ranks, self._stacks())
        await self._fail(detail)

    def _stacks(self) -> tuple[str, ...]:
        """Whose code ran, by trial index."""
        return tuple(trial.stack for trial in trials(self._start.spec, Device.CPU))

    def _never_reserved(self) -> FailureDetail | None:
        spec, remaining_s = self._start.spec, self._start.remaining_s
        if isinstance(self._gang, TrainGang) and not self._reserved:
            message = (
                f"Ray Train had not brought up {spec.mesh.world_size} ranks when deadline_s={remaining_s:g} ran out"
            )
            return FailureDetail("deadline_exceeded", f"{message}; raise deadline_s, or see what else runs there")
        if not self._reserved:
            message = (
                f"waited {remaining_s:.0f} s for room for {spec.mesh.world_size} ranks, until deadline_s ran out; the "
                "cluster is large enough but busy: try again, or raise deadline_s"
            )
            return FailureDetail("capacity_wait_expired", message)
        return None

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
