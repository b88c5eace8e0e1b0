"""Judging what tensor-parallel ranks replicate and must sum: layernorms, and biases behind row-parallel layers.

Under sequence parallelism each tp rank sees one part of every sequence, so its gradient of such a parameter is a part;
the true gradient is the sum over all dp and tp ranks of the stage, and every tp rank must end up with it. Judged like
the tied weight (`workers.divergence`), with all ranks of a stage as contributors. Must not use the collectives under
test, save that there is nothing to judge, and nothing done, where tp is 1.

Shape legend: N = elements of these parameters, of all chunks of a rank, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from workers.communicator import ProcessGroups
from workers.contract import Coordinates, DivergenceRow, Mesh, TrialSpec
from workers.contributions import LayernormSync
from workers.divergence import judge_end
from workers.exchange import Expectation, Holding
from workers.grad_sync import mean_factors, scale_of
from workers.intervals import Interval, Intervals, lay_end_to_end
from workers.mesh import stage_members
from workers.orderings import SyncPhase, ordering_of
from workers.parameters import is_sequence_parallel, sequence_parallel_parameters
from workers.prediction import layernorm_exposed, stage_layout
from workers.replays import ReplaySource
from workers.stacks.protocol import Stack


class LayernormJudge:
    """One rank's layernorms, in every step of a trial; `judge` is collective over the stage's dp and tp ranks."""

    def __init__(
        self, spec: TrialSpec, at: Coordinates, modules: Sequence[nn.Module], communicator: ProcessGroups
    ) -> None:
        self._spec, self._at, self._communicator = spec, at, communicator
        named = (pair for module in modules for pair in module.named_parameters())
        judged = [parameter for name, parameter in named if is_sequence_parallel(name)]
        self._judged = judged if spec.mesh.tp > 1 else []
        self._expectation = expect_layernorms(spec, at.pp_rank) if self._judged else None
        self._local_N: Tensor | None = None

    def remember(self, local_grad: Callable[[nn.Parameter], Tensor]) -> None:
        """Keep this rank's own gradients, by copy; call before the sync. Local."""
        if self._judged:
            self._local_N = torch.cat([local_grad(parameter) for parameter in self._judged])

    def judge(self, step: int, stack: Stack, replay: ReplaySource) -> tuple[DivergenceRow, ...]:
        """What this rank owns, against the true sums; nothing where there is nothing to sum over tp."""
        if self._expectation is None or self._local_N is None:
            return ()
        members, world_rank = self._expectation.members, self._at.world_rank
        neighbour = members[(members.index(world_rank) + 1) % len(members)]
        synced_N = torch.cat([stack.grad(parameter) for parameter in self._judged])
        holding = Holding(
            local_P=self._local_N,
            replay=replay.layernorms(self._spec, step, self._spec.mesh.coordinates(neighbour)),
            synced_P=synced_N,
            weight_P=synced_N,
        )
        return (judge_end(self._expectation, holding, world_rank, self._communicator).divergence,)


def expect_layernorms(spec: TrialSpec, pp_rank: int) -> Expectation:
    """What the trial's ordering does to the layernorms of one pipeline rank: pure, the same on all its ranks."""
    members = stage_members(spec.mesh, pp_rank)
    return Expectation(
        probe=spec.probe,
        mesh=Mesh(len(members), 1),
        members=members,
        prescale=scale_of(spec),
        sharded=ordering_of(spec).distributed_optimizer,
        bit_tied=False,
        tied_sync=_sync(spec, pp_rank),
        owned=tuple(_owned(spec, pp_rank, spec.mesh.coordinates(member).dp_rank) for member in members),
        code=None,
        layernorms_over=spec.mesh.tp,
    )


def _sync(spec: TrialSpec, pp_rank: int) -> LayernormSync | None:
    if not layernorm_exposed(spec):
        return None
    ordering, dp, tp = ordering_of(spec), spec.mesh.dp, spec.mesh.tp
    factors = mean_factors(spec) if ordering.averages_means else (scale_of(spec).factor,) * dp
    own = others = 1.0
    if SyncPhase.LAYERNORM_AVERAGE in ordering.phases:
        own = others = 1.0 / tp
    elif SyncPhase.LAYERNORM_ALL_REDUCE not in ordering.phases:
        others = 0.0
    everything = (Interval(0, _num_elements(spec, pp_rank)),)
    return LayernormSync(everything, factors, own, others, tp)


def _owned(spec: TrialSpec, pp_rank: int, dp_rank: int) -> Intervals:
    """What a dp rank owns, in flat coordinates."""
    if not ordering_of(spec).distributed_optimizer:
        return (Interval(0, _num_elements(spec, pp_rank)),)
    return lay_end_to_end(
        (parameter.numel, stage_layout(spec, stage).owned_intervals(parameter.name, dp_rank))
        for stage in spec.mesh.stages(pp_rank)
        for parameter in sequence_parallel_parameters(spec, stage)
    )


def _num_elements(spec: TrialSpec, pp_rank: int) -> int:
    stages = spec.mesh.stages(pp_rank)
    return sum(parameter.numel for stage in stages for parameter in sequence_parallel_parameters(spec, stage))
