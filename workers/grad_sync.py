"""The phases of gradient synchronisation, in the order that an ordering names.

This is the code under test in every trial, golden vector and virtual mesh: what Megatron-LM's `finalize_model_grads`
does with a distributed optimizer and tied embeddings (DP sync of every bucket, then layernorms over tensor ranks,
then the tied weight between the first and the last stage, then the division by the step's valid tokens), and its
reordered variants. It does not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.communicator import Communicator, Pending, part
from workers.contract import Dtype, Mesh, Normalization, Phase, ProbeName, TrialSpec
from workers.errors import SpecError
from workers.grad_buffer import GradBuffer, tied_buffer
from workers.layout import PrescaleKind
from workers.mesh import Members, dp_members, pp_members, tie_members, tp_members
from workers.orderings import LAYERNORM_PHASES, Ordering, SyncPhase, ordering_of
from workers.padding import valid_tokens
from workers.parameters import is_sequence_parallel
from workers.wire import FLOAT32_WIRE, Wire


@dataclass(frozen=True, slots=True)
class Prescale:
    """The factor 1/divisor put on every bucket before its sum, on the wire; `kind` decides how it is rounded.

    With `in_collective` the collective averages: nothing is scaled before, and only what was summed is divided, so that
    what a rank does not own keeps the whole of its local value. Source: Megatron-LM's `average_in_collective`.
    """

    kind: PrescaleKind
    divisor: int
    in_collective: bool = False
    wire: Wire = FLOAT32_WIRE

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
    """What a trial does to every bucket before its sum: nothing where the sum is divided by its valid tokens."""
    ordering = ordering_of(spec)
    if SyncPhase.NUM_TOKENS_SCALE in ordering.phases:
        prescale = Prescale(ordering.rule.prescale, 1)
    else:
        prescale = prescale_for(ordering, spec.probe, spec.mesh.dp, spec.average_in_collective)
    if spec.grad_reduce_dtype is Dtype.FLOAT32:
        return prescale
    return replace(prescale, wire=Wire(spec.grad_reduce_dtype, spec.mesh.dp, prescale.divisor))


def scale_of(spec: TrialSpec) -> Prescale:
    """What the true sum of all local gradients is divided by in a trial, whatever its ordering makes of it."""
    if spec.normalization is Normalization.MICROBATCHES:
        return prescale_of(spec)
    divisor = token_divisor(spec.probe, sum(valid_tokens(spec)))
    return Prescale(PrescaleKind.MULTIPLY_BY_INVERSE, divisor, wire=prescale_of(spec).wire)


def token_divisor(probe: ProbeName, num_tokens: int) -> int:
    """What gradients are divided by for a number of valid tokens: at least 1; exact takes the next power of two."""
    clamped = max(1, num_tokens)
    return clamped if probe is ProbeName.GPT else 1 << (clamped - 1).bit_length()


def mean_factors(spec: TrialSpec) -> tuple[float, ...]:
    """By dp_rank: what a trial multiplies its contributions by where each replica divides by its own valid tokens."""
    factor = prescale_of(spec).factor
    return tuple(factor / token_divisor(spec.probe, num_tokens) for num_tokens in valid_tokens(spec))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Valid tokens of the step, int64 [1] by hosted world rank: right on the last stage, any value elsewhere."""

    probe: ProbeName
    counts: Mapping[int, Tensor]


def counted_tokens(spec: TrialSpec) -> TokenCounts:
    """What every rank of a trial counts in a step, for meshes that live in one process."""
    mesh, tokens = spec.mesh, valid_tokens(spec)
    at = [mesh.coordinates(world_rank) for world_rank in range(mesh.world_size)]
    counts = [tokens[rank.dp_rank] if rank.pp_rank == mesh.pp - 1 else 0 for rank in at]
    return TokenCounts(spec.probe, {world_rank: torch.tensor([count]) for world_rank, count in enumerate(counts)})


RankBuffers = Mapping[int, Sequence[GradBuffer]]
"""By hosted world rank: its gradient buffers, one per model chunk."""

Observer = Callable[[Phase], None]
"""Called after each phase, with the name of what the gradients have just been through."""

Announce = Callable[[Tensor, Tensor], None]
"""Called before each bucket's sum, with the bucket and what is summed of it: itself, or a copy in the wire's dtype."""


def sync_gradients(
    ordering: Ordering,
    mesh: Mesh,
    buffers: RankBuffers,
    communicator: Communicator,
    prescale: Prescale,
    observe: Observer,
    finish_started: Callable[[], None] | None = None,
    tokens: TokenCounts | None = None,
    announce: Announce | None = None,
) -> None:
    """Run an ordering's phases over the hosted ranks' buffers, in place. Collective over the whole mesh.

    With overlap every bucket's dp sync was started during backward (`workers.overlap`): `finish_started` waits for
    them, and stands where that phase stands. `tokens` are needed where a phase divides by them.
    Source: the phase orders are those of the catalogue (`workers.orderings`), each with its own source.
    """
    for phase in ordering.phases:
        if phase is SyncPhase.TIE_ALL_REDUCE:
            all_reduce_tied(mesh, buffers, communicator)
            observe(Phase.TIED)
        elif phase in LAYERNORM_PHASES:
            all_reduce_layernorms(phase, mesh, buffers, communicator)
            observe(Phase.LAYERNORM)
        elif phase in (SyncPhase.NUM_TOKENS_SCALE, SyncPhase.OWN_TOKENS_SCALE):
            scale_by_tokens(phase, mesh, buffers, communicator, tokens)
            observe(Phase.NORMALIZED)
        else:
            if finish_started is not None:
                finish_started()
            else:
                sync_dp(phase, mesh, buffers, communicator, prescale, announce)
            observe(Phase.SCATTERED)


def sync_dp(
    phase: SyncPhase,
    mesh: Mesh,
    buffers: RankBuffers,
    communicator: Communicator,
    prescale: Prescale,
    announce: Announce | None = None,
) -> None:
    """Scale and sum every bucket of every chunk over its data-parallel replicas, in place."""
    for members in _dp_groups(mesh):
        hosted = _hosted(members, communicator)
        if not hosted:
            continue
        for chunk, index in _buckets(buffers[hosted[0]]):
            buckets = {world_rank: buffers[world_rank][chunk].bucket(index) for world_rank in hosted}
            start_bucket(phase, members, buckets, communicator, prescale, announce).wait()


def start_bucket(
    phase: SyncPhase,
    members: Members,
    buckets: Mapping[int, Tensor],
    communicator: Communicator,
    prescale: Prescale,
    announce: Announce | None = None,
) -> Pending:
    """Scale one bucket [N] on the hosted replicas and start its sum, in place. All of `members` must start it."""
    carried = {rank: prescale.wire.load(bucket_N) for rank, bucket_N in buckets.items()}
    for rank, carried_N in carried.items():
        prescale.apply(carried_N)
        if announce is not None:
            announce(buckets[rank], carried_N)
    if phase is SyncPhase.DP_REDUCE_SCATTER:
        started = communicator.start_reduce_scatter(members, carried)
        summed = [part(carried_N, members.index(rank), len(members)) for rank, carried_N in carried.items()]
    else:
        started, summed = communicator.start_all_reduce(members, carried), list(carried.values())
    return _Settling(started, summed, [(carried[rank], buckets[rank]) for rank in buckets], prescale)


@dataclass(frozen=True, slots=True)
class _Settling:
    """A bucket's sum under way, and what it takes to be the mean."""

    started: Pending
    summed: list[Tensor]
    carried: list[tuple[Tensor, Tensor]]
    """What is on the wire, and the bucket it came from."""
    prescale: Prescale

    def wait(self) -> None:
        """See `Pending`."""
        self.started.wait()
        for summed_n in self.summed:
            self.prescale.settle(summed_n)
        for carried_N, bucket_N in self.carried:
            self.prescale.wire.unload(carried_N, bucket_N)


def all_reduce_tied(mesh: Mesh, buffers: RankBuffers, communicator: Communicator) -> None:
    """Sum the tied weight's whole gradient between the first and the last stage of each pipeline, in place."""
    if mesh.pp == 1:
        return
    for members in (tie_members(mesh, dp_rank, tp_rank) for dp_rank in range(mesh.dp) for tp_rank in range(mesh.tp)):
        hosted = _hosted(members, communicator)
        if hosted:
            tied = {world_rank: tied_buffer(buffers[world_rank]).tied_grad() for world_rank in hosted}
            communicator.all_reduce(members, tied)


def all_reduce_layernorms(phase: SyncPhase, mesh: Mesh, buffers: RankBuffers, communicator: Communicator) -> None:
    """Sum (or, a catalogued mistake, average) over tp the gradients of which each tp rank has a part, in place.

    All of a rank's are moved as one tensor, slices that it does not own included. Source: Megatron-LM,
    `_allreduce_layernorm_grads`.
    """
    for members in (tp_members(mesh, dp_rank, pp_rank) for pp_rank in range(mesh.pp) for dp_rank in range(mesh.dp)):
        hosted = _hosted(members, communicator)
        held = {world_rank: _layernorm_grads(buffers[world_rank]) for world_rank in hosted}
        if not any(held.values()):
            continue
        flat = {world_rank: torch.cat(grads) for world_rank, grads in held.items()}
        communicator.all_reduce(members, flat)
        for world_rank, grads in held.items():
            if phase is SyncPhase.LAYERNORM_AVERAGE:
                flat[world_rank].div_(mesh.tp)
            for grad_P, summed_P in zip(grads, flat[world_rank].split([grad.numel() for grad in grads]), strict=True):
                grad_P.copy_(summed_P)


def scale_by_tokens(
    phase: SyncPhase, mesh: Mesh, buffers: RankBuffers, communicator: Communicator, tokens: TokenCounts | None
) -> None:
    """Divide every whole buffer by the valid tokens: of all replicas, or (a catalogued mistake) of its own pipeline.

    The last stage's count is broadcast over its pipeline and, where it is to be everybody's, summed over dp. Source:
    Megatron-LM, `finalize_model_grads` with `num_tokens`. Raises SpecError where no tokens were counted.
    """
    if tokens is None:
        raise SpecError(f"phase {phase.value} divides by valid tokens, and none were counted; pass `tokens`")
    for members in (pp_members(mesh, dp_rank, tp_rank) for dp_rank in range(mesh.dp) for tp_rank in range(mesh.tp)):
        if hosted := _hosted(members, communicator):
            communicator.broadcast(members, members[-1], {rank: tokens.counts[rank] for rank in hosted})
    if phase is SyncPhase.NUM_TOKENS_SCALE:
        for members in _dp_groups(mesh):
            if hosted := _hosted(members, communicator):
                communicator.all_reduce(members, {rank: tokens.counts[rank] for rank in hosted})
    for world_rank, chunks in buffers.items():
        divisor = token_divisor(tokens.probe, int(tokens.counts[world_rank]))
        for buffer in chunks:
            buffer.main_grad.mul_(1.0 / divisor)


def _buckets(chunks: Sequence[GradBuffer]) -> list[tuple[int, int]]:
    """(chunk, bucket) of every bucket of a rank, in the order in which all replicas sum them."""
    return [(chunk, index) for chunk, buffer in enumerate(chunks) for index in buffer.buckets()]


def _layernorm_grads(chunks: Sequence[GradBuffer]) -> list[Tensor]:
    names = ((buffer, placed.name) for buffer in chunks for placed in buffer.layout.params)
    return [buffer.grad(name) for buffer, name in names if is_sequence_parallel(name)]


def _dp_groups(mesh: Mesh) -> list[Members]:
    return [dp_members(mesh, pp_rank, tp_rank) for pp_rank in range(mesh.pp) for tp_rank in range(mesh.tp)]


def _hosted(members: Members, communicator: Communicator) -> Members:
    return tuple(world_rank for world_rank in members if world_rank in communicator.hosted)
