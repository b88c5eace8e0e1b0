"""The phases of gradient synchronisation, in the order that an ordering names.

This is the code under test in every trial, golden vector and virtual mesh: what Megatron-LM's `finalize_model_grads`
does with a distributed optimizer and tied embeddings (DP sync of every bucket, then the tied weight between
the first and the last stage), and its reordered variants. It does not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.communicator import Communicator, Pending, part
from workers.contract import Mesh, Phase, ProbeName, TrialSpec
from workers.grad_buffer import GradBuffer, tied_buffer
from workers.layout import PrescaleKind
from workers.mesh import Members, dp_members, tie_members
from workers.orderings import Ordering, SyncPhase, ordering_of


@dataclass(frozen=True, slots=True)
class Prescale:
    """The factor 1/divisor put on every bucket before its sum; `kind` decides how it is rounded.

    With `in_collective` the collective averages: nothing is scaled before, and only what was summed is divided, so that
    what a rank does not own keeps the whole of its local value. Source: Megatron-LM's `average_in_collective`.
    """

    kind: PrescaleKind
    divisor: int
    in_collective: bool = False

    def apply(self, bucket_N: Tensor) -> None:
        """Scale a bucket before its sum, in place."""
        if not self.in_collective:
            self._scale(bucket_N)

    def settle(self, summed_n: Tensor) -> None:
        """Scale what was summed, in place. gloo has no average, so that this is the collective's second half."""
        if self.in_collective:
            self._scale(summed_n)

    def _scale(self, bucket_N: Tensor) -> None:
        if self.kind is PrescaleKind.DIVIDE:
            bucket_N.div_(self.divisor)
        else:
            bucket_N.mul_(1.0 / self.divisor)

    @property
    def factor(self) -> float:
        """What a contribution to a sum is multiplied by, 1/divisor in double precision."""
        return 1.0 / self.divisor

    @property
    def local_factor(self) -> float:
        """What a rank's own contribution is multiplied by where nothing is summed."""
        return 1.0 if self.in_collective else self.factor


def prescale_for(ordering: Ordering, probe: ProbeName, dp: int, in_collective: bool = False) -> Prescale:
    """Gpt averages over dp; exact divides by the next power of two, so that no bit is lost."""
    divisor = dp if probe is ProbeName.GPT else 1 << (dp - 1).bit_length()
    return Prescale(ordering.rule.prescale, divisor, in_collective)


def prescale_of(spec: TrialSpec) -> Prescale:
    """A trial's."""
    return prescale_for(ordering_of(spec), spec.probe, spec.mesh.dp, spec.average_in_collective)


RankBuffers = Mapping[int, Sequence[GradBuffer]]
"""By hosted world rank: its gradient buffers, one per model chunk."""

Observer = Callable[[Phase], None]
"""Called after each phase, with the name of what the gradients have just been through."""


def sync_gradients(
    ordering: Ordering,
    mesh: Mesh,
    buffers: RankBuffers,
    communicator: Communicator,
    prescale: Prescale,
    observe: Observer,
    finish_started: Callable[[], None] | None = None,
) -> None:
    """Run an ordering's phases over the hosted ranks' buffers, in place. Collective over the whole mesh.

    With overlap every bucket's dp sync was started during backward (`workers.overlap`): `finish_started` waits for
    them, and stands where that phase stands.
    Source: the phase orders are those of the catalogue (`workers.orderings`), each with its own source.
    """
    for phase in ordering.phases:
        if phase is SyncPhase.TIE_ALL_REDUCE:
            all_reduce_tied(mesh, buffers, communicator)
            observe(Phase.TIED)
        else:
            if finish_started is not None:
                finish_started()
            else:
                sync_dp(phase, mesh, buffers, communicator, prescale)
            observe(Phase.SCATTERED)


def sync_dp(phase: SyncPhase, mesh: Mesh, buffers: RankBuffers, communicator: Communicator, prescale: Prescale) -> None:
    """Scale and sum every bucket of every chunk over its data-parallel replicas, in place."""
    for members in (dp_members(mesh, pp_rank) for pp_rank in range(mesh.pp)):
        hosted = _hosted(members, communicator)
        if not hosted:
            continue
        for chunk, index in _buckets(buffers[hosted[0]]):
            buckets = {world_rank: buffers[world_rank][chunk].bucket(index) for world_rank in hosted}
            start_bucket(phase, members, buckets, communicator, prescale).wait()


def start_bucket(
    phase: SyncPhase,
    members: Members,
    buckets: Mapping[int, Tensor],
    communicator: Communicator,
    prescale: Prescale,
) -> Pending:
    """Scale one bucket [N] on the hosted replicas and start its sum, in place. All of `members` must start it."""
    for bucket_N in buckets.values():
        prescale.apply(bucket_N)
    if phase is SyncPhase.DP_REDUCE_SCATTER:
        started = communicator.start_reduce_scatter(members, buckets)
        summed = [part(bucket_N, members.index(rank), len(members)) for rank, bucket_N in buckets.items()]
    else:
        started, summed = communicator.start_all_reduce(members, buckets), list(buckets.values())
    return _Settling(started, summed, prescale)


@dataclass(frozen=True, slots=True)
class _Settling:
    """A bucket's sum under way, and what it takes to be the mean."""

    started: Pending
    summed: list[Tensor]
    prescale: Prescale

    def wait(self) -> None:
        """See `Pending`."""
        self.started.wait()
        for summed_n in self.summed:
            self.prescale.settle(summed_n)


def all_reduce_tied(mesh: Mesh, buffers: RankBuffers, communicator: Communicator) -> None:
    """Sum the tied weight's whole gradient between the first and the last stage of each pipeline, in place."""
    if mesh.pp == 1:
        return
    for members in (tie_members(mesh, dp_rank) for dp_rank in range(mesh.dp)):
        hosted = _hosted(members, communicator)
        if hosted:
            tied = {world_rank: tied_buffer(buffers[world_rank]).tied_grad() for world_rank in hosted}
            communicator.all_reduce(members, tied)


def _buckets(chunks: Sequence[GradBuffer]) -> list[tuple[int, int]]:
    """(chunk, bucket) of every bucket of a rank, in the order in which all replicas sum them."""
    return [(chunk, index) for chunk, buffer in enumerate(chunks) for index in buffer.buckets()]


def _hosted(members: Members, communicator: Communicator) -> Members:
    return tuple(world_rank for world_rank in members if world_rank in communicator.hosted)
