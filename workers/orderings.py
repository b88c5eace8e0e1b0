"""The catalogue of orderings: each a named pair of buffer layout and sequence of sync phases, with its source.

Pure data. The live step runs these phases (`workers.grad_sync`), the static analysis predicts from them
(`workers.prediction`) and the service lists them; nothing else may define an ordering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from workers.contract import (
    ForeignOrdering,
    Normalization,
    OrderingName,
    RankPhase,
    Role,
    TrialOrdering,
    TrialSpec,
)
from workers.layout import RULES, LayoutRule, LayoutVersion


class SyncPhase(StrEnum):
    """One collective phase over a step's gradients."""

    DP_REDUCE_SCATTER = "dp_reduce_scatter"
    """Every bucket is scaled and reduce-scattered in place over the dp replicas: each owner gets its shard's sum."""
    DP_ALL_REDUCE = "dp_all_reduce"
    """Every bucket is scaled and all-reduced over the dp replicas."""
    TIE_ALL_REDUCE = "tie_all_reduce"
    """The tied weight's gradient is all-reduced between the first and the last stage of each pipeline."""
    LAYERNORM_ALL_REDUCE = "layernorm_all_reduce"
    """Gradients of layernorms and of biases behind row-parallel layers, of which each tensor-parallel rank has the part
    of its piece of the sequence, are summed over tp."""
    LAYERNORM_AVERAGE = "layernorm_average"
    """The same parts are averaged over tp."""
    NUM_TOKENS_SCALE = "num_tokens_scale"
    """Valid tokens, counted on the last stage, are broadcast over pp and summed over dp; they divide every gradient."""
    OWN_TOKENS_SCALE = "own_tokens_scale"
    """All gradients of a rank are divided by the valid tokens of its own pipeline."""


LAYERNORM_PHASES = (SyncPhase.LAYERNORM_ALL_REDUCE, SyncPhase.LAYERNORM_AVERAGE)
"""Those that have a place only where tp is 2 or more."""

DP_PHASES = (SyncPhase.DP_REDUCE_SCATTER, SyncPhase.DP_ALL_REDUCE)
"""Those that sum over the dp replicas, of which every ordering has one."""


RANK_PHASES: Mapping[SyncPhase, RankPhase] = MappingProxyType(
    {
        SyncPhase.DP_REDUCE_SCATTER: RankPhase.DP_SYNC,
        SyncPhase.DP_ALL_REDUCE: RankPhase.DP_SYNC,
        SyncPhase.LAYERNORM_ALL_REDUCE: RankPhase.LAYERNORM,
        SyncPhase.LAYERNORM_AVERAGE: RankPhase.LAYERNORM,
        SyncPhase.TIE_ALL_REDUCE: RankPhase.TIE,
        SyncPhase.NUM_TOKENS_SCALE: RankPhase.NORMALIZE,
        SyncPhase.OWN_TOKENS_SCALE: RankPhase.NORMALIZE,
    }
)
"""Where a rank is during each of them."""


@dataclass(frozen=True, slots=True)
class Ordering:
    """How gradients are laid out and synchronised."""

    name: TrialOrdering
    layout: LayoutVersion
    phases: tuple[SyncPhase, ...]
    distributed_optimizer: bool
    role: Role
    bit_tied: bool
    """Whether both ends add the same terms in the same order, so that they must agree to the bit."""
    source: str
    summary: str
    expectation: str

    @property
    def rule(self) -> LayoutRule:
        """The layout's rule."""
        return RULES[self.layout]

    @property
    def ties_after_sync(self) -> bool:
        """Whether the data-parallel sync, of either kind, is over when the two ends are added."""
        [sync] = [phase for phase in self.phases if phase in DP_PHASES]
        return self.phases.index(sync) < self.phases.index(SyncPhase.TIE_ALL_REDUCE)

    @property
    def ties_after_scatter(self) -> bool:
        """Whether the tie adds gradients that are complete at their owners only: where misownership hurts."""
        scatter, tie = SyncPhase.DP_REDUCE_SCATTER, SyncPhase.TIE_ALL_REDUCE
        return scatter in self.phases and self.phases.index(scatter) < self.phases.index(tie)

    @property
    def averages_means(self) -> bool:
        """Whether each replica's mean over its own tokens counts alike, however many it has."""
        return SyncPhase.OWN_TOKENS_SCALE in self.phases

    def normalized(self, normalization: Normalization) -> Ordering:
        """The same ordering with gradients divided as asked for.

        By microbatches every rank divides before backward, so that there is nothing left to take a wrong mean of.
        """
        if normalization is Normalization.MICROBATCHES:
            kept = tuple(phase for phase in self.phases if phase is not SyncPhase.OWN_TOKENS_SCALE)
            return self if kept == self.phases else replace(self, phases=kept)
        return self if self.averages_means else replace(self, phases=(*self.phases, SyncPhase.NUM_TOKENS_SCALE))

    @property
    def mistakes_layernorms(self) -> bool:
        """Whether tensor-parallel ranks do not end up with the sum of their parts of layernorm gradients."""
        return self.name in (OrderingName.LAYERNORM_SKIPPED, OrderingName.LAYERNORM_AVERAGED)

    def over_tensor_ranks(self, tp: int) -> Ordering:
        """The same ordering with layernorm gradients summed over tp, after the dp sync, where there is a sum to take.

        Source: Megatron-LM, `finalize_model_grads` with sequence parallelism.
        """
        if tp == 1:
            kept = tuple(phase for phase in self.phases if phase not in LAYERNORM_PHASES)
            return self if kept == self.phases else replace(self, phases=kept)
        if self.mistakes_layernorms:
            return self
        after = 1 + next(index for index, phase in enumerate(self.phases) if phase in DP_PHASES)
        return replace(self, phases=(*self.phases[:after], SyncPhase.LAYERNORM_ALL_REDUCE, *self.phases[after:]))

    def overlapped(self) -> Ordering:
        """The same ordering where the dp sync starts from backward hooks: nothing can be tied before it.

        What would tie first has to wait for the scatter, so that it becomes a control.
        """
        if self.phases != _TIE_THEN_SCATTER:
            return self
        return replace(self, phases=_SCATTER_THEN_TIE, role=Role.CONTROL)


_SCATTER_THEN_TIE = (SyncPhase.DP_REDUCE_SCATTER, SyncPhase.TIE_ALL_REDUCE)
_TIE_THEN_SCATTER = (SyncPhase.TIE_ALL_REDUCE, SyncPhase.DP_REDUCE_SCATTER)


def _catalogue() -> Iterator[Ordering]:
    yield Ordering(
        name=OrderingName.BUGGY,
        layout=LayoutVersion.DE4028A,
        phases=_SCATTER_THEN_TIE,
        distributed_optimizer=True,
        role=Role.CONTROL,
        bit_tied=False,
        source="Megatron-LM de4028a, finalize_model_grads; issue 844",
        summary="Reduce-scatter over dp, then add the two copies of the tied weight, both inside their common buckets.",
        expectation="Wrong exactly where the owner of an element differs between the first and the last stage.",
    )
    yield Ordering(
        name=OrderingName.FIXED,
        layout=LayoutVersion.DE4028A,
        phases=_TIE_THEN_SCATTER,
        distributed_optimizer=True,
        role=Role.SUBJECT,
        bit_tied=False,
        source="Megatron-LM issue 844, the reporter's fix",
        summary="Add the two copies of the tied weight while both are still local, then reduce-scatter over dp.",
        expectation="Clean. The ends may differ by rounding from dp=3 on, since their shards add in other orders.",
    )
    yield Ordering(
        name=OrderingName.OWN_BUCKET,
        layout=LayoutVersion.V0_13,
        phases=_SCATTER_THEN_TIE,
        distributed_optimizer=True,
        role=Role.SUBJECT,
        bit_tied=True,
        source="Megatron-LM daf0006, as completed in core_v0.13",
        summary="Reduce-scatter, then tie; the tied weight has a bucket of its own that both stages shard alike.",
        expectation="Clean, and both ends agree to the bit.",
    )
    yield Ordering(
        name=OrderingName.OWN_BUCKET_UNALIGNED,
        layout=LayoutVersion.C0650D83,
        phases=_SCATTER_THEN_TIE,
        distributed_optimizer=True,
        role=Role.CONTROL,
        bit_tied=False,
        source="Megatron-LM 4b44f0a1ee up to 5467bef346 (0650d83)",
        summary="As own_bucket, but the tied weight may begin inside the padding of the bucket in front of it.",
        expectation="Wrong on the edges of shards where the tied weight begins in padding; clean where it does not.",
    )
    yield Ordering(
        name=OrderingName.ALL_REDUCE,
        layout=LayoutVersion.DE4028A,
        phases=(SyncPhase.DP_ALL_REDUCE, SyncPhase.TIE_ALL_REDUCE),
        distributed_optimizer=False,
        role=Role.SUBJECT,
        bit_tied=True,
        source="Megatron-LM de4028a without --use-distributed-optimizer",
        summary="All-reduce over dp, then tie; every rank owns every element.",
        expectation="Clean, and both ends agree to the bit.",
    )
    yield Ordering(
        name=OrderingName.MEAN_OF_MEANS,
        layout=LayoutVersion.V0_13,
        phases=(SyncPhase.OWN_TOKENS_SCALE, *_SCATTER_THEN_TIE),
        distributed_optimizer=True,
        role=Role.CONTROL,
        bit_tied=True,
        source="Megatron-LM before --calculate-per-token-loss; normalization num_tokens only",
        summary="As own_bucket, but each rank divides by its own valid tokens and the replicas' means are averaged.",
        expectation="Wrong wherever ranks hold different numbers of valid tokens: tokens of fuller ranks count less.",
    )
    yield Ordering(
        name=OrderingName.LAYERNORM_SKIPPED,
        layout=LayoutVersion.V0_13,
        phases=_SCATTER_THEN_TIE,
        distributed_optimizer=True,
        role=Role.CONTROL,
        bit_tied=True,
        source="Megatron-LM finalize_model_grads without _allreduce_layernorm_grads; tp >= 2 only",
        summary="As own_bucket, but layernorm gradients stay each tensor-parallel rank's own part.",
        expectation="The tied weight is right; layernorm gradients are wrong everywhere, and copies drift apart.",
    )
    yield Ordering(
        name=OrderingName.LAYERNORM_AVERAGED,
        layout=LayoutVersion.V0_13,
        phases=(SyncPhase.DP_REDUCE_SCATTER, SyncPhase.LAYERNORM_AVERAGE, SyncPhase.TIE_ALL_REDUCE),
        distributed_optimizer=True,
        role=Role.CONTROL,
        bit_tied=True,
        source="Megatron-LM finalize_model_grads, _allreduce_layernorm_grads with a mean for its sum; tp >= 2 only",
        summary="As own_bucket, but layernorm gradients are averaged over tensor-parallel ranks instead of summed.",
        expectation="The tied weight is right; layernorm gradients are 1/tp of the right ones, alike on all tp ranks.",
    )


ORDERINGS: Mapping[TrialOrdering, Ordering] = MappingProxyType({ordering.name: ordering for ordering in _catalogue()})
"""Every ordering by its name. What a foreign stack does is not among them."""

FOREIGN = Ordering(
    name=ForeignOrdering.STACK,
    layout=LayoutVersion.V0_13,
    phases=(SyncPhase.DP_ALL_REDUCE, SyncPhase.TIE_ALL_REDUCE),
    distributed_optimizer=False,
    role=Role.SUBJECT,
    bit_tied=False,
    source="the stack's own code",
    summary="Whatever the stack does: its phases are unknown, what it owns is asked of it.",
    expectation="Clean.",
)
"""Stands for the ordering in a foreign stack's trial: what a right sum amounts to, however the stack goes about it."""


def ordering_of(spec: TrialSpec) -> Ordering:
    """A trial's ordering as its other settings turn it out: phases, role and all."""
    if isinstance(spec.ordering, ForeignOrdering):
        return FOREIGN.normalized(spec.normalization)
    return compose(spec.ordering, spec.overlap, spec.normalization, spec.mesh.tp)


def compose(name: OrderingName, overlap: bool, normalization: Normalization, tp: int = 1) -> Ordering:
    """An ordering of the catalogue as these settings turn it out."""
    ordering = ORDERINGS[name].overlapped() if overlap else ORDERINGS[name]
    return ordering.over_tensor_ranks(tp).normalized(normalization)
