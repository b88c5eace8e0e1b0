"""Judging every gradient that a rank owns, of any parameter of its stage, and naming the parameter that is wrong.

The tied weight's final value has a judge of its own (`workers.divergence`), which knows both ends, and so has what
tensor-parallel ranks sum (`workers.checks.layernorms`). This file judges what depends on one stage's replicas alone:
every other parameter, and those two as the data-parallel sync leaves them. The same exchange, bounds and replays as
there. Must not use the collectives under test.

Shape legend: N = elements of the judged parameters, flat, one after another; D = dp ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.checks.named import Named
from workers.checks.ownership import gather_claims
from workers.communicator import ProcessGroups
from workers.contract import Coordinates, Mesh, ParameterElement, ParametersRow, Phase, ProbeName, TrialSpec
from workers.contributions import EarlyScatter, MeanOfMeans
from workers.divergence import EndJudgement, judge_end
from workers.exchange import Expectation, Holding, Replay
from workers.grad_sync import Prescale, mean_factors, prescale_of, scale_of
from workers.intervals import Interval, Intervals, lay_end_to_end
from workers.mesh import Members, dp_members
from workers.orderings import ordering_of
from workers.parameters import is_sequence_parallel
from workers.prediction import trial_early, trial_exposed
from workers.stacks.protocol import Stack


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a rank's parameters are judged; the same for all of them."""

    spec: TrialSpec
    at: Coordinates
    stack: Stack
    local_grad: Callable[[nn.Parameter], Tensor]
    """This rank's own sum over its microbatches, asked for before the first collective."""
    communicator: ProcessGroups
    """The judge's own, never the one under test."""

    @property
    def members(self) -> Members:
        """The replicas of this rank's stages, by dp_rank."""
        return dp_members(self.spec.mesh, self.at.pp_rank, self.at.tp_rank)


@dataclass(frozen=True, slots=True)
class Sync:
    """What the data-parallel sync is to leave of some parameters."""

    prescale: Prescale
    """What the true sum is divided by."""
    otherwise: EarlyScatter | MeanOfMeans | None
    """Where and how the ordering leaves something else."""


class ParameterJudges:
    """All of one rank's parameters, in every step. Building and judging are collective over the dp replicas."""

    def __init__(self, scene: Scene, named: Sequence[Named], tied: nn.Parameter | None) -> None:
        spec = scene.spec
        # Where the data-parallel sync is over when the ends are added, the tied weight is judged then, too.
        is_scattered = spec.mesh.pp > 1 and ordering_of(spec).ties_after_sync
        # What tensor-parallel ranks sum has in the end a judge of its own.
        summed = [each for each in named if spec.mesh.tp > 1 and is_sequence_parallel(each.name)]
        inner = [each for each in named if each.parameter is not tied and each not in summed]
        # The tied weight first: elements of it that are scattered too early count from its start.
        scattered = [each for each in named if each.parameter is tied and is_scattered] + summed
        self._inner = ParameterJudge(scene, inner, final_sync(spec, _size(inner))) if inner else None
        self._scattered: ParameterJudge | None = None
        if scattered:
            sync = scattered_sync(spec, scene.at.pp_rank, _size(scattered))
            self._scattered = ParameterJudge(scene, scattered, sync)
        self._is_tied_alone = not summed
        self._scattered_N: Tensor | None = None

    def remember(self, local_P: Tensor | None, late_P: Tensor | None) -> None:
        """Keep the local gradients; that of the tied weight, and of its last microbatch, are given. Local.

        Call before the first collective.
        """
        if self._inner is not None:
            self._inner.remember()
        if self._scattered is not None:
            self._scattered.remember(local_P if self._is_tied_alone else None, late_P)

    def observe(self, phase: Phase) -> None:
        """The gradients have just been through `phase`. Local."""
        if self._scattered is not None and phase is Phase.SCATTERED:
            self._scattered_N = self._scattered.copy()

    def judge(self, replay: Replay | None) -> tuple[ParametersRow, ...]:
        """What this rank's elements show; `replay` is of the next dp_rank's parameters but the tied weight."""
        rows = [] if self._inner is None else [self._inner.judge(Phase.FINAL, replay)]
        if self._scattered is not None and self._scattered_N is not None:
            rows.append(self._scattered.judge(Phase.SCATTERED, None, self._scattered_N))
        return tuple(rows)


class ParameterJudge:
    """Some parameters of one rank. Building it and judging are collective over the dp replicas."""

    def __init__(self, scene: Scene, judged: Sequence[Named], sync: Sync) -> None:
        self._scene = scene
        self._judged = judged
        self._local_N: Tensor | None = None
        self._late_N: Tensor | None = None
        device = judged[0].parameter.device
        gathered = gather_claims(scene.communicator, scene.members, [self._owned()], device)
        owned = tuple(claim for (claim,) in gathered)
        self._expectation = stage_expectation(scene.spec.probe, scene.members, sync, owned)

    def remember(self, local_N: Tensor | None = None, late_N: Tensor | None = None) -> None:
        """Keep the local gradients, by copy unless they are given; call before the first collective. Local."""
        self._local_N = self._gather(self._scene.local_grad, self._local_N) if local_N is None else local_N
        self._late_N = late_N

    def copy(self) -> Tensor:
        """The gradients as they now stand, [N]. Local."""
        return self._gather(self._scene.stack.grad, None)

    def judge(self, phase: Phase, replay: Replay | None, synced_N: Tensor | None = None) -> ParametersRow:
        """What this rank owns, against the true sums. Collective over the dp replicas.

        `replay` is that of the next dp_rank's local gradients [N]; `synced_N` is what to judge, the gradients as they
        now stand where None; `phase` is what they have been through.
        """
        assert self._local_N is not None, "remember() was not called in this step"
        synced_N = self.copy() if synced_N is None else synced_N
        holding = Holding(self._local_N, replay, synced_N, weight_P=synced_N, late_P=self._late_N)
        judgement = judge_end(self._expectation, holding, self._scene.at.world_rank, self._scene.communicator)
        return parameters_row(phase, [(each.name, each.parameter.numel()) for each in self._judged], judgement)

    def _gather(self, source: Callable[[nn.Parameter], Tensor], out_N: Tensor | None) -> Tensor:
        return torch.cat([source(each.parameter) for each in self._judged], out=out_N)

    def _owned(self) -> Intervals:
        """This rank's elements in flat coordinates."""
        return lay_end_to_end(
            (each.parameter.numel(), self._scene.stack.owned(each.parameter)) for each in self._judged
        )


def final_sync(spec: TrialSpec, num_elements: int) -> Sync:
    """What parameters other than the tied weight are when all phases are over: sums over the replicas."""
    return Sync(scale_of(spec), _means(spec, num_elements))


def scattered_sync(spec: TrialSpec, pp_rank: int, num_elements: int) -> Sync:
    """What the tied weight is when its data-parallel sync is over and nothing is tied yet."""
    if ordering_of(spec).averages_means:
        return Sync(scale_of(spec), _means(spec, num_elements))
    prescale, early = prescale_of(spec), trial_early(spec) if pp_rank == 0 else ()
    return Sync(prescale, EarlyScatter(spec.mesh.dp, prescale.factor, early) if early else None)


def _means(spec: TrialSpec, num_elements: int) -> MeanOfMeans | None:
    if not (ordering_of(spec).averages_means and trial_exposed(spec)):
        return None
    return MeanOfMeans((Interval(0, num_elements),), mean_factors(spec), num_ends=1)


def _size(named: Sequence[Named]) -> int:
    return sum(each.parameter.numel() for each in named)


def stage_expectation(probe: ProbeName, members: Members, sync: Sync, owned: tuple[Intervals, ...]) -> Expectation:
    """What the replicas of one stage are to hold of some parameters, flat one after another. The same on each."""
    return Expectation(
        probe=probe,
        mesh=Mesh(len(members), 1),
        members=members,
        prescale=sync.prescale,
        sharded=True,
        bit_tied=False,
        tied_sync=sync.otherwise,
        owned=owned,
        code=None,
    )


def parameters_row(phase: Phase, sizes: Sequence[tuple[str, int]], judgement: EndJudgement) -> ParametersRow:
    """A judgement over parameters of these names and sizes, laid out one after another."""
    row, surprise, astray = judgement.divergence, judgement.surprise, judgement.astray
    return ParametersRow(
        phase=phase,
        owned_elements=row.owned_elements,
        total_elements=sum(size for _, size in sizes),
        unexpected_elements=row.unexpected_elements,
        nonfinite_elements=row.nonfinite_elements,
        first_unexpected=_element(sizes, surprise.span.first),
        last_unexpected=_element(sizes, surprise.span.last),
        max_abs_error=surprise.max_abs,
        max_error_over_bound=surprise.max_over_bound,
        min_detectable_share=row.min_detectable_share,
        reference_max_abs_error=row.reference_max_abs_error,
        reference_exceeded_elements=row.reference_exceeded_elements,
        deviations=row.deviations,
        deviating_ranks=tuple(sorted(astray.world_ranks)),
        first_deviating=_element(sizes, astray.span.first),
        last_deviating=_element(sizes, astray.span.last),
    )


def _element(sizes: Iterable[tuple[str, int]], index: int | None) -> ParameterElement | None:
    if index is None:
        return None
    for name, size in sizes:
        if index < size:
            return ParameterElement(name, index)
        index -= size
    raise IndexError(f"element {index} lies past the last parameter")
