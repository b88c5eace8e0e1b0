"""A rank that serves trials: joined to its world once, process groups kept per mesh, one failure report at the end.

Ray actors, Ray Train workers and torchrun processes all run trials through this file; it knows none of them.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.checks.collectives import SWEEP_SIZES, WARM_SIZES, check_collectives
from workers.checks.fingerprint import node_name, read_fingerprint
from workers.contract import (
    CollectiveRow,
    Device,
    Fingerprint,
    Mesh,
    Position,
    RankFailure,
    RankPhase,
    StepReport,
    TrialSpec,
)
from workers.errors import CollectiveError, SpecError, WorkerError
from workers.grad_norm import NormReferences
from workers.mesh import MeshGroups
from workers.phase_clock import PhaseClock
from workers.replays import ReplayMemo
from workers.step import RankTrial

MAX_CACHED_MESHES = 4
DEFAULT_TIMEOUT_S = 60.0
_COLLATERAL_SIGNS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "socket closed",
    "pair closure",
    "timed out",
    "gloo",
    "nccl",
    "peer",
)


class RankSession:
    """One rank of a joined world. Not thread-safe, save for `position`."""

    def __init__(
        self,
        device: Device,
        timeout_s: float,
        node: str | None = None,
    ) -> None:
        """Use `join` or `adopt`."""
        self.world_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device_kind = device
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if device is Device.CUDA else torch.device("cpu")
        )
        self._timeout_s = timeout_s
        self._node = node or node_name()
        self._clock = PhaseClock(self.world_rank)
        self._groups: OrderedDict[Mesh, MeshGroups] = OrderedDict()
        self._swept: set[Mesh] = set()
        self._replays = ReplayMemo(self._device)
        self._references = NormReferences(self._device)
        _configure_torch()

    @classmethod
    def join(
        cls,
        store: dist.Store,
        world_rank: int,
        world_size: int,
        device: Device,
        timeout_s: float,
        node: str | None = None,
        backend: str | None = None,
    ) -> RankSession:
        """Form the default group over `store`. Collective over the world.

        `backend` None takes NCCL on CUDA and gloo on CPU; gloo on CUDA lets several ranks share one GPU.
        """
        dist.init_process_group(
            backend=backend or ("nccl" if device is Device.CUDA else "gloo"),
            store=store,
            rank=world_rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(device, timeout_s, node)

    @classmethod
    def adopt(
        cls,
        device: Device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: str | None = None,
    ) -> RankSession:
        """Use the default group that torchrun or Ray Train has formed."""
        return cls(device, timeout_s, node)

    def fingerprint(self) -> Fingerprint:
        """What this rank runs on."""
        return read_fingerprint(self.world_rank, self._device_kind, self._node)

    @property
    def on_position(self) -> Callable[[Position], None] | None:
        """Called at every change of position, in the rank's own thread."""
        return self._clock.on_position

    @on_position.setter
    def on_position(self, callback: Callable[[Position], None] | None) -> None:
        self._clock.on_position = callback

    def position(self) -> Position:
        """Where this rank is right now; may be called from another thread."""
        return self._clock.position

    def run(self, trials: Sequence[TrialSpec]) -> Iterator[StepReport | RankFailure]:
        """Run trials in order, yielding a report a step. A failure is the last item, never raised.

        Collective over the world: every rank must be given the same trials.
        """
        try:
            tested: set[Mesh] = set()
            for trial_index, spec in enumerate(trials):
                rows = () if spec.mesh in tested else self._check_collectives(spec.mesh, trial_index)
                tested.add(spec.mesh)
                for report in self._trial(spec, trial_index).run():
                    yield replace(report, collectives=rows) if rows else report
                    rows = ()
        except Exception as error:
            yield failure_of(error, self._clock.position, self._node)
        self._clock.enter(RankPhase.IDLE)

    def trial(self, spec: TrialSpec, trial_index: int = 0) -> RankTrial:
        """Build one trial without running it; for measuring steps one by one."""
        return self._trial(spec, trial_index)

    def close(self) -> None:
        """Leave the world."""
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _check_collectives(self, mesh: Mesh, trial_index: int) -> tuple[CollectiveRow, ...]:
        """Self-test the mesh's groups: a whole sweep the first time, a short one on a warm gang."""
        groups = self._form(mesh, trial_index)
        self._clock.enter(RankPhase.COLLECTIVES, trial_index)
        sizes = WARM_SIZES if mesh in self._swept else SWEEP_SIZES
        rows = check_collectives(mesh, mesh.coordinates(self.world_rank), groups, self._device, sizes)
        self._swept.add(mesh)
        return rows

    def _form(self, mesh: Mesh, trial_index: int) -> MeshGroups:
        if mesh.world_size != self.world_size:
            raise SpecError(
                f"mesh of {mesh.world_size} ranks on a world of {self.world_size}: start dp x pp x tp ranks"
            )
        self._clock.enter(RankPhase.FORMING, trial_index)
        return self.mesh_groups(mesh)

    def _trial(self, spec: TrialSpec, trial_index: int) -> RankTrial:
        groups = self._form(spec.mesh, trial_index)
        coordinates = spec.mesh.coordinates(self.world_rank)
        return RankTrial(
            spec,
            trial_index,
            coordinates,
            groups,
            self._device,
            self._clock,
            self._replays,
            self._references,
            self._node,
        )

    def mesh_groups(self, mesh: Mesh) -> MeshGroups:
        """Groups of this mesh, built on first use. All ranks see the same trials, so all drop the same mesh."""
        if mesh not in self._groups:
            if len(self._groups) >= MAX_CACHED_MESHES:
                dropped, dropped_groups = self._groups.popitem(last=False)
                dropped_groups.close()
                self._swept.discard(dropped)
            self._groups[mesh] = MeshGroups(mesh, self.world_rank, self._timeout_s)
        self._groups.move_to_end(mesh)
        return self._groups[mesh]


def failure_of(error: Exception, position: Position, node: str) -> RankFailure:
    """What a rank at `position` says of the exception that ended it."""
    # The pipeline wraps what a stage raised into an error of its own.
    chain = list(_causes(error))
    known = next((cause for cause in chain if isinstance(cause, WorkerError)), None)
    collateral = any(map(is_collateral, chain))
    code = known.code if known else "collective_failed" if collateral else "rank_raised"
    said = ["".join(traceback.format_exception_only(cause)).strip() for cause in chain]
    return RankFailure(
        world_rank=position.world_rank,
        node=node,
        phase=position.phase,
        trial_index=position.trial_index,
        step=position.step,
        code=code,
        message=str(known) if known else "; because of ".join(said),
        collateral=collateral,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def is_collateral(error: BaseException) -> bool:
    """Whether an exception only says that a peer went away: such a rank is a victim, not the cause."""
    if isinstance(error, CollectiveError | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _COLLATERAL_SIGNS)


def first_cause(failures: Iterable[RankFailure]) -> RankFailure | None:
    """Of several ranks' failures the one to report: a rank that broke by itself, before those that only noticed."""
    return min(failures, key=lambda failure: (failure.collateral, failure.world_rank), default=None)


def host_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The rendezvous store, on a port that the system chooses. Rank 0 keeps it for the life of the world."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, store.port


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Rank 0's store, from another rank."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _configure_torch() -> None:
    """Full float32 arithmetic: reduced-precision shortcuts would hide in the floor."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
