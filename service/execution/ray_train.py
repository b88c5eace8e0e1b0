"""The same trials through `ray.train.torch.TorchTrainer`, for people who want the path of their training validated.

The trainer runs in a process of its own that is a Ray driver: when that process dies, Ray removes everything its job
owns, whatever state Train was in, and Train's settings never enter our driver. Workers tell their words to a mailbox
actor of that job; the process passes them on through a pipe. Nothing is retried: a lost worker is a finding.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import ray

from service.domain.validation import FailureDetail
from service.execution.beacon import BeaconServer, Watch
from service.execution.cluster import join, python_path
from service.execution.failure import Death, Whereabouts, first_cause
from service.execution.gang import GROUP_TIMEOUT_S, TEARDOWN_S, GangShape, first_line
from service.execution.messages import NodeCapacity
from service.execution.outbox import GangFailure, OnReports, Outbox
from service.execution.placement import bundle_selectors, rank_resources
from workers.contract import Device, Fingerprint, TrialSpec
from workers.rank_actor import Collector, Joined, TrainTask, train_rank

WIND_DOWN_S = 10.0
"""Train notices the end of its workers about once a second, then takes its group down."""


@dataclass(frozen=True, slots=True)
class TrainSite:
    """Where Ray Train runs."""

    ray_address: str
    cluster: str
    runtime_env: dict[str, Any] | None
    storage_path: str


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The first message to the trainer's process: all it needs."""

    name: str
    site: TrainSite
    shape: GangShape
    selectors: tuple[dict[str, str], ...]
    trials: tuple[TrialSpec, ...]
    collector: Collector
    node_names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainEnded:
    """The last message from the trainer's process; `error` is None where Train was content."""

    error: str | None


# The trainer's process.


def main(connection_fd: int) -> None:
    """Run one plan: read it from the pipe, train, pass on words, say how it ended. Ends when the pipe breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(connection_fd)
    plan: TrainPlan = connection.recv()
    threading.Thread(target=_end_with_pipe, args=(connection,), daemon=True).start()
    join(plan.site.ray_address, plan.site.cluster, plan.site.runtime_env)
    mailbox = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"relay": 1, "ears": 1})(Mailbox).remote()
    errors: list[str] = []
    # Not on the main thread, where Train would install a signal handler of its own.
    trainer = threading.Thread(target=_train, args=(plan, mailbox, errors), daemon=True)
    trainer.start()
    for reference in mailbox.words.options(num_returns="streaming", concurrency_group="relay").remote():
        connection.send(ray.get(reference))
    trainer.join()
    ray.shutdown()
    connection.send(TrainEnded(errors[0] if errors else None))


def _train(plan: TrainPlan, mailbox: Any, errors: list[str]) -> None:
    try:
        build_trainer(plan, mailbox).fit()
    except BaseException as error:
        errors.append(first_line(error))
    finally:
        ray.get(mailbox.close.remote())


def _end_with_pipe(connection: Connection[Any, Any]) -> None:
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


class Mailbox:
    """The actor that workers tell their words to. Takes no CPU."""

    def __init__(self) -> None:
        self._words: queue.Queue[list[Any] | None] = queue.Queue()

    def tell(self, words: list[Any]) -> None:
        """Called by a worker: what its rank says."""
        self._words.put(words)

    def close(self) -> None:
        """No more words will come."""
        self._words.put(None)

    def words(self) -> Iterator[list[Any]]:
        """Stream words until the box is closed."""
        while (words := self._words.get()) is not None:
            yield words


def build_trainer(plan: TrainPlan, mailbox: Any) -> Any:
    """A TorchTrainer that runs the plan's trials and tells `mailbox`; it gives up at the first failure."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class JobOwnedTrainer(TorchTrainer):  # type: ignore[misc]
        """Without Train's detached cleaner, which outlives a killed run for ever where the state API is missing.

        Our job's end removes the placement group, so nothing is left for it to clean.
        """

        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    cuda = plan.shape.device is Device.CUDA
    task = TrainTask(plan.trials, plan.shape.device, plan.collector, GROUP_TIMEOUT_S, mailbox, plan.node_names)
    return JobOwnedTrainer(
        train_rank,
        train_loop_config={"task": task},
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
            storage_path=plan.site.storage_path,
            # Train's own default tries again for ever when its controller fails.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )


# The driver's side.


class TrainGang:
    """The ranks of one Ray Train run, seen as a gang: joins, runs its trials once, is killed."""

    def __init__(
        self,
        name: str,
        shape: GangShape,
        nodes: Sequence[NodeCapacity],
        trials: Sequence[TrialSpec],
        beacons: BeaconServer,
        site: TrainSite,
    ) -> None:
        self.name = name
        self.shape = shape
        self.fingerprints: tuple[Fingerprint, ...] = ()
        self.node_names: dict[int, str] = {}
        self.watch: Watch
        self.watch, collector = beacons.watch()
        # From the beginning: Train's ranks start their trials as soon as they have joined.
        self._lost: list[int] = []
        self.watch.on_loss = self._lost.append
        self._beacons = beacons
        self._outbox = Outbox(shape.world_size)
        self._node_ids = {node.node_id: node.name for node in nodes}
        self._joined: dict[int, Joined] = {}
        self._loop = asyncio.get_running_loop()
        self._all_joined: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        selectors = tuple(bundle_selectors(nodes, shape.world_size, shape.device, shape.placement))
        self._start(TrainPlan(name, site, shape, selectors, tuple(trials), collector, self._node_ids))

    def _start(self, plan: TrainPlan) -> None:
        self._connection, theirs = Pipe()
        command = f"from service.execution import ray_train; ray_train.main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
        theirs.close()
        self._connection.send(plan)
        threading.Thread(target=self._read, args=(self._connection,), name="trainer pipe", daemon=True).start()

    async def join(self) -> None:
        """Wait until every worker's rank has joined. Raises GangFailure where Train gives up before."""
        await self._all_joined
        ranks = [self._joined[world_rank] for world_rank in range(self.shape.world_size)]
        named = ((rank.fingerprint, self.node_names[rank.world_rank]) for rank in ranks)
        self.fingerprints = tuple(replace(fingerprint, node=node) for fingerprint, node in named)

    async def run(self, trials: Sequence[TrialSpec], on_reports: OnReports) -> None:
        """Hand over the reports of the trials that this run was made for. Raises GangFailure."""
        self.watch.on_loss = lambda world_rank: self._outbox.put(self._death(world_rank))
        for world_rank in self._lost:
            self._outbox.put(self._death(world_rank))
        await self._outbox.collect(on_reports)

    async def whereabouts(self) -> Whereabouts:
        """Where every rank was when it last said so."""
        return Whereabouts(self.shape.world_size, self.watch.positions, self.node_names)

    async def wind_down(self) -> str | None:
        """Let Train end in good order, since all its ranks are done; then as `kill`."""
        self.watch.on_loss = None
        try:
            async with asyncio.timeout(WIND_DOWN_S):
                await self._ended.wait()
        except TimeoutError:
            pass
        return await self.kill()

    async def kill(self) -> str | None:
        """End the trainer and every rank; what is left after a bounded wait, in words, or None."""
        self.watch.on_loss = None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        gone = await self.watch.wait_until_gone(TEARDOWN_S)
        leak = None if gone else f"{self.name}: Ray Train's workers {sorted(self.watch.connected)} have not ended"
        self._beacons.forget(self.watch)
        return leak

    def _death(self, world_rank: int) -> Death:
        return Death(world_rank, self.node_names.get(world_rank, "unknown"), self.watch.positions.get(world_rank))

    def _read(self, connection: Connection[Any, Any]) -> None:
        try:
            while not isinstance(message := connection.recv(), TrainEnded):
                self._loop.call_soon_threadsafe(self._hear, message)
            error = message.error or "it ended in good order, but not every rank had reported"
        except (EOFError, OSError):
            error = "the trainer's process died"
        self._loop.call_soon_threadsafe(self._end, error)

    def _hear(self, words: list[Any]) -> None:
        for word in words:
            if not isinstance(word, Joined):
                self._outbox.put(word)
                continue
            self._joined[word.world_rank] = word
            self.node_names[word.world_rank] = self._node_ids.get(word.node_id, word.fingerprint.node)
            if len(self._joined) == self.shape.world_size and not self._all_joined.done():
                self._all_joined.set_result(None)

    def _end(self, error: str) -> None:
        self._ended.set()
        detail = FailureDetail("ray_train_failed", f"Ray Train ended before its ranks did: {error}")
        if not self._all_joined.done():
            cause = first_cause([self._death(self._lost[0])]) if self._lost else detail
            self._all_joined.set_exception(GangFailure(cause))
        self._outbox.put(detail)
