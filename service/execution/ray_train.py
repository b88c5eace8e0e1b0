"""The same trials through `ray.train.torch.TorchTrainer`, for people who want the path of their training validated.

An actor hosts the trainer, so that killing this one process takes Train's controller and workers with it, and so
that Train's settings never enter the driver. Workers tell their words to the host, which streams them on. Nothing
is retried: a lost worker is a finding.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from service.domain.validation import FailureDetail
from service.execution.beacon import BeaconServer, Watch
from service.execution.failure import Death
from service.execution.gang import GROUP_TIMEOUT_S, TEARDOWN_S, GangShape, first_line
from service.execution.messages import NodeCapacity
from service.execution.outbox import GangFailure, OnReports, Outbox
from service.execution.placement import bundle_selectors, rank_resources
from workers.contract import Device, Fingerprint, TrialSpec
from workers.rank_actor import Collector, Joined, TrainTask, train_rank


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What the host needs to build its trainer."""

    name: str
    shape: GangShape
    selectors: tuple[dict[str, str], ...]
    storage_path: str
    trials: tuple[TrialSpec, ...]
    collector: Collector


class TrainHost:
    """The actor in which `TorchTrainer.fit` runs. Takes no CPU of its own."""

    def __init__(self, plan: TrainPlan) -> None:
        self._plan = plan
        self._words: queue.Queue[list[Any] | None] = queue.Queue()
        self._error: str | None = None

    def tell(self, words: list[Any]) -> None:
        """Called by a worker: what its rank says."""
        self._words.put(words)

    def words(self) -> Iterator[list[Any]]:
        """Train, and stream what the workers tell. Raises what the trainer raised, after the last word."""
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._fit, args=(me,), name="trainer", daemon=True).start()
        while (words := self._words.get()) is not None:
            yield words
        if self._error is not None:
            raise RuntimeError(self._error)

    def _fit(self, me: Any) -> None:
        try:
            build_trainer(self._plan, me).fit()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._words.put(None)


def build_trainer(plan: TrainPlan, host: Any) -> Any:
    """A TorchTrainer that runs the plan's trials and tells `host`; it gives up at the first failure."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cuda = plan.shape.device is Device.CUDA
    return TorchTrainer(
        train_rank,
        train_loop_config={"task": TrainTask(plan.trials, plan.shape.device, plan.collector, GROUP_TIMEOUT_S, host)},
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo", timeout_s=int(GROUP_TIMEOUT_S)),
        scaling_config=ScalingConfig(
            num_workers=plan.shape.world_size,
            use_gpu=cuda,
            resources_per_worker=rank_resources(plan.shape.device),
            placement_strategy=plan.shape.placement.strategy,
            label_selector=list(plan.selectors) or None,
        ),
        run_config=RunConfig(
            name=plan.name,
            storage_path=plan.storage_path,
            # Train's own default tries again for ever when its controller fails.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )


class TrainGang:
    """The ranks of one Ray Train run, seen as a gang: joins, runs its trials once, is killed."""

    def __init__(
        self,
        name: str,
        shape: GangShape,
        nodes: Sequence[NodeCapacity],
        trials: Sequence[TrialSpec],
        beacons: BeaconServer,
        storage_path: str,
    ) -> None:
        self.name = name
        self.shape = shape
        self.fingerprints: tuple[Fingerprint, ...] = ()
        self.node_names: dict[int, str] = {}
        self.watch: Watch
        self.watch, collector = beacons.watch()
        self._beacons = beacons
        self._outbox = Outbox(shape.world_size)
        self._joined: dict[int, Joined] = {}
        self._all_joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        selectors = tuple(bundle_selectors(nodes, shape.world_size, shape.device, shape.placement))
        plan = TrainPlan(name, shape, selectors, storage_path, tuple(trials), collector)
        host = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"relay": 1, "ears": 1})(TrainHost)
        self._host = host.remote(plan)
        self._relay = asyncio.create_task(self._listen())

    async def join(self, node_names: dict[str, str]) -> None:
        """Wait until every worker's rank has joined. Raises GangFailure where Train gives up before."""
        await self._all_joined
        ranks = [self._joined[world_rank] for world_rank in range(self.shape.world_size)]
        self.node_names = {r.world_rank: node_names.get(r.node_id, r.fingerprint.node) for r in ranks}
        self.fingerprints = tuple(rank.fingerprint for rank in ranks)

    async def run(self, trials: Sequence[TrialSpec], on_reports: OnReports) -> None:
        """Hand over the reports of the trials that this run was made for. Raises GangFailure."""
        self.watch.on_loss = lambda world_rank: self._outbox.put(self._death(world_rank))
        await self._outbox.collect(on_reports)

    async def kill(self) -> str | None:
        """End the trainer and every rank; what is left after a bounded wait, in words, or None."""
        self.watch.on_loss = None
        self._relay.cancel()
        await asyncio.to_thread(ray.kill, self._host, no_restart=True)
        gone = await self.watch.wait_until_gone(TEARDOWN_S)
        leak = None if gone else f"{self.name}: Ray Train's workers {sorted(self.watch.connected)} have not ended"
        self._beacons.forget(self.watch)
        return leak

    def _death(self, world_rank: int) -> Death:
        return Death(world_rank, self.node_names.get(world_rank, "unknown"), self.watch.positions.get(world_rank))

    async def _listen(self) -> None:
        stream = self._host.words.options(num_returns="streaming", concurrency_group="relay").remote()
        try:
            async for reference in stream:
                for word in await reference:
                    self._hear(word)
        except RayActorError as error:
            self._give_up(first_line(error))
        except Exception as error:
            self._give_up(first_line(getattr(error, "cause", None) or error))

    def _hear(self, word: Any) -> None:
        if not isinstance(word, Joined):
            self._outbox.put(word)
            return
        self._joined[word.world_rank] = word
        if len(self._joined) == self.shape.world_size and not self._all_joined.done():
            self._all_joined.set_result(None)

    def _give_up(self, message: str) -> None:
        detail = FailureDetail("ray_train_failed", f"Ray Train ended before its ranks did: {message}")
        if not self._all_joined.done():
            self._all_joined.set_exception(GangFailure(detail))
        self._outbox.put(detail)
