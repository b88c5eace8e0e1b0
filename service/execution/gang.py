"""A gang: a Ray placement group and one actor per rank, from reservation to the last process gone.

The group is not detached and neither are the actors, so Ray removes both when the driver dies. Nothing here retries:
a gang that failed is killed whole. Functions here must run on the driver's event loop; calls of Ray that block go
to a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.domain.validation import FailureDetail
from service.execution.beacon import BeaconServer, Watch
from service.execution.ending import until_ended
from service.execution.failure import OWN_GRACE_S, Death, Symptom, Whereabouts, first_cause
from service.execution.messages import NodeCapacity, Placement
from service.execution.outbox import GangFailure, OnReports, Outbox
from service.execution.placement import bundle_selectors, rank_resources
from workers.checks.digest import workers_digest
from workers.contract import Device, Fingerprint, RankFailure, RankPhase, TrialSpec
from workers.rank_actor import Prepared, RankActor

GROUP_TIMEOUT_S = 1800.0
"""A collective that hangs this long raises by itself; deadlines end a validation much earlier."""
TEARDOWN_S = 5.0
"""How long a killed gang may take to vanish before it is reported as a leak."""
ANSWER_S = 1.0
"""A rank that takes longer to say where it is does not run any more."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class GangShape:
    """What makes two gangs interchangeable; `device` is resolved."""

    world_size: int
    device: Device
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources held for a gang that is yet to form."""

    name: str
    shape: GangShape
    group: PlacementGroup

    def node_names(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """The nodes that hold the bundles. Blocks for about a millisecond."""
        placed = placement_group_table(self.group).get("bundles_to_node_id", {}).values()
        return tuple(sorted({names.get(node_id, node_id) for node_id in placed}))


def request_group(name: str, shape: GangShape, nodes: Sequence[NodeCapacity]) -> Reservation:
    """Ask Ray for one bundle per rank. Returns at once; `is_reserved` tells when the resources are there. Blocks."""
    group = placement_group(
        [rank_resources(shape.device)] * shape.world_size,
        strategy=shape.placement.strategy,
        name=name,
        bundle_label_selector=bundle_selectors(nodes, shape.world_size, shape.device, shape.placement) or None,
    )
    return Reservation(name, shape, group)


def remove_group(name: str) -> bool:
    """Remove a placement group of this namespace by its name; False where there is none. Blocks."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return False
    remove_placement_group(group)
    return True


def group_state(group: PlacementGroup) -> str:
    """PENDING, CREATED, REMOVED ... Blocks for about a millisecond."""
    return str(placement_group_table(group).get("state", "REMOVED"))


async def release_group(group: PlacementGroup) -> str | None:
    """Give the resources back and wait until they are; what could not be removed, in words, or None."""
    await asyncio.to_thread(remove_placement_group, group)
    until_s = time.monotonic() + TEARDOWN_S
    while (state := await asyncio.to_thread(group_state, group)) != "REMOVED":
        if time.monotonic() > until_s:
            return f"placement group {group.id.hex()} is still {state} after {TEARDOWN_S:g} s"
        await asyncio.sleep(_POLL_S)
    return None


class Gang:
    """Ranks that have joined one world and serve trials until they fail or are killed."""

    def __init__(
        self,
        reservation: Reservation,
        actors: Sequence[Any],
        watch: Watch,
        beacons: BeaconServer,
    ) -> None:
        self.name = reservation.name
        self.shape = reservation.shape
        self.watch = watch
        self.fingerprints: tuple[Fingerprint, ...] = ()
        self.node_ids: frozenset[str] = frozenset()
        self.node_names: dict[int, str] = {}
        self.idle_since_s = 0.0
        self._group = reservation.group
        self._actors = list(actors)
        self._beacons = beacons

    @property
    def healthy(self) -> bool:
        """Whether every rank's line is up."""
        return len(self.watch.connected) == self.shape.world_size

    def death(
        self, world_rank: int, message: str = "its process ended without a word (killed, or its node lost)"
    ) -> Death:
        """A rank that went away, at its last published position."""
        return Death(
            world_rank, self.node_names.get(world_rank, "unknown"), self.watch.positions.get(world_rank), message
        )

    async def join(self, node_names: Mapping[str, str]) -> None:
        """Compare the ranks' code, then let them meet at world_rank 0's store. Raises GangFailure."""
        prepared = await self._ask_all("prepare", [(GROUP_TIMEOUT_S,)] * self.shape.world_size)
        self.node_ids = frozenset(rank.node_id for rank in prepared)
        self.node_names = {rank.world_rank: node_names.get(rank.node_id, rank.host) for rank in prepared}
        self._check_code(prepared)
        first = prepared[0]
        meeting = [(first.host, first.store_port, GROUP_TIMEOUT_S, self.node_names[r]) for r in range(len(prepared))]
        self.fingerprints = tuple(await self._ask_all("join", meeting))

    async def run(self, trials: Sequence[TrialSpec], on_reports: OnReports) -> None:
        """Run trials on every rank, handing over reports as they come. Raises GangFailure with the first cause."""
        outbox = Outbox(self.shape.world_size)
        self.watch.on_loss = lambda world_rank: outbox.put(self.death(world_rank))
        for world_rank in set(range(self.shape.world_size)) - self.watch.connected:
            outbox.put(self.death(world_rank))  # lost before anybody listened
        streams = [actor.run.options(num_returns="streaming").remote(tuple(trials)) for actor in self._actors]
        followers = [asyncio.create_task(self._follow(r, stream, outbox)) for r, stream in enumerate(streams)]
        try:
            await outbox.collect(on_reports)
        finally:
            self.watch.on_loss = None
            for follower in followers:
                follower.cancel()

    async def whereabouts(self) -> Whereabouts:
        """Where every rank is, and which cannot say any more: a rank that waits in a collective still answers."""
        asked = [asyncio.create_task(self._ask(r, "position", ())) for r in range(len(self._actors))]
        answered, pending = await asyncio.wait(asked, timeout=ANSWER_S)
        for task in pending:
            task.cancel()
        for task in answered:
            if task.exception() is None:
                self.watch.positions[task.result().world_rank] = task.result()
        silent = frozenset(r for r, task in enumerate(asked) if task in pending or task.exception() is not None)
        return Whereabouts(self.shape.world_size, self.watch.positions, self.node_names, silent)

    async def kill(self) -> str | None:
        """End every rank and give the resources back; what is left after a bounded wait, in words, or None."""
        unheard = await self._end_ranks()
        leak = await release_group(self._group)
        return await self._see_off(unheard) or leak

    async def vacate(self) -> Reservation:
        """End every rank and keep the resources, for other ranks. Raises GangFailure where one does not end."""
        unheard = await self._end_ranks()
        if (leak := await self._see_off(unheard)) is not None:
            raise GangFailure(FailureDetail("gang_not_ended", leak))
        return Reservation(self.name, self.shape, self._group)

    async def _end_ranks(self) -> dict[int, Any]:
        """Kill every actor; those whose line never came up, by world_rank."""
        self.watch.on_loss = None
        actors, self._actors = self._actors, []
        unheard = {r: actor for r, actor in enumerate(actors) if r not in self.watch.heard}
        await asyncio.to_thread(_kill, actors)
        return unheard

    async def _see_off(self, unheard: Mapping[int, Any]) -> str | None:
        ends = {r: asyncio.create_task(until_ended(actor)) for r, actor in unheard.items()}
        if ends:
            await asyncio.wait(ends.values(), timeout=TEARDOWN_S)
        gone = await self.watch.wait_until_gone(TEARDOWN_S)
        left = self.watch.connected | {r for r, end in ends.items() if not end.done() or end.exception()}
        for end in ends.values():
            end.cancel()
        self._beacons.forget(self.watch)
        return None if gone and not left else f"{self.name}: the processes of ranks {sorted(left)} have not ended"

    async def _ask_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        asked = [asyncio.create_task(self._ask(r, method, arguments[r])) for r in range(len(self._actors))]
        try:
            # The others would wait for a rank that broke until their group's timeout: give them a grace only.
            _, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=OWN_GRACE_S)
        finally:
            for task in asked:
                task.cancel()
        errors = [task.exception() for task in asked if task.done() and not task.cancelled()]
        if symptoms := [error.symptom for error in errors if isinstance(error, _RankBrokeError)]:
            raise GangFailure(first_cause(symptoms))
        return [task.result() for task in asked]

    async def _ask(self, world_rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await getattr(self._actors[world_rank], method).remote(*arguments)
        except RayActorError as error:
            raise _RankBrokeError(self.death(world_rank, first_line(error))) from error
        except Exception as error:
            raise _RankBrokeError(self._own_failure(world_rank, "gang_not_formed", error)) from error

    def _own_failure(self, world_rank: int, code: str, error: Exception) -> RankFailure:
        cause = getattr(error, "cause", None) or error
        position = self.watch.positions.get(world_rank)
        phase = RankPhase.FORMING if position is None else position.phase
        node = self.node_names.get(world_rank, "unknown")
        message = f"{type(cause).__name__}: {first_line(cause)}"
        return RankFailure(world_rank, node, phase, None, None, code, message, collateral=False)

    def _check_code(self, prepared: Sequence[Prepared]) -> None:
        ours = workers_digest()
        for rank in prepared:
            if rank.workers_digest != ours:
                message = (
                    f"world_rank {rank.world_rank} runs another workers package ({rank.workers_digest[:12]}) than the "
                    f"dispatcher ({ours[:12]}); all must run one version: update the image of that node"
                )
                node = self.node_names[rank.world_rank]
                forming = RankPhase.FORMING.value
                raise GangFailure(FailureDetail("workers_differ", message, rank.world_rank, node, forming))

    async def _follow(self, world_rank: int, stream: AsyncIterator[Any], outbox: Outbox) -> None:
        try:
            async for reference in stream:
                for item in await reference:
                    outbox.put(item)
            outbox.put(world_rank)
        except RayActorError as error:
            outbox.put(self.death(world_rank, first_line(error)))
        except Exception as error:
            outbox.put(self._own_failure(world_rank, "rank_raised", error))


class _RankBrokeError(Exception):
    def __init__(self, symptom: Symptom) -> None:
        super().__init__()
        self.symptom = symptom


def start_ranks(reservation: Reservation, beacons: BeaconServer, bundles: Sequence[int] | None = None) -> Gang:
    """Start one actor per bundle; they begin to import at once. `Gang.join` waits for them.

    `bundles` gives each world rank its bundle; by default each has the one of its own number.
    """
    watch, collector = beacons.watch()
    shape = reservation.shape
    bundles = bundles or range(shape.world_size)
    cls = ray.remote(concurrency_groups={"work": 1, "control": 1})(RankActor)
    actors = [
        cls.options(
            num_cpus=1,
            num_gpus=1 if shape.device is Device.CUDA else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, bundles[world_rank]),
        ).remote(world_rank, shape.world_size, shape.device, collector)
        for world_rank in range(shape.world_size)
    ]
    return Gang(reservation, actors, watch, beacons)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)


def first_line(error: BaseException) -> str:
    """What an error says, without Ray's tracebacks and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
