"""Judging every gradient that a rank owns, of any parameter of its stage, and naming the parameter that is wrong.

The tied weight's final value has a judge of its own (`workers.divergence`), which knows both ends; this file judges
what depends on one stage's replicas alone: every other parameter, and the tied weight as the data-parallel sync leaves
it. The same exchange, bounds and replays as there. Must not use the collectives under test.

Shape legend: N = elements of the judged parameters, flat, one after another; D = dp ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.communicator import ProcessGroups
from workers.contract import DivergenceRow, Mesh, ParameterElement, ParametersRow, Phase, ProbeName
from workers.divergence import EndJudgement, judge_end
from workers.exchange import Expectation, Holding, Replay
from workers.grad_sync import Prescale
from workers.intervals import Interval, Intervals, normalize, shift
from workers.mesh import Members
from workers.stacks.protocol import Stack


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter of this rank by its name."""

    name: str
    parameter: nn.Parameter


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a rank's parameters are judged; the same for all of them."""

    probe: ProbeName
    prescale: Prescale
    members: Members
    """The replicas of this rank's stages, by dp_rank."""
    world_rank: int
    stack: Stack
    communicator: ProcessGroups
    """The judge's own, never the one under test."""


class ParameterJudges:
    """All of one rank's parameters, in every step. Building and judging are collective over the dp replicas."""

    def __init__(self, scene: Scene, named: Sequence[Named], tied: nn.Parameter | None, ties_last: bool) -> None:
        """`ties_last`: the tied weight's data-parallel sync is over when its ends are added, and is judged then."""
        inner = [each for each in named if each.parameter is not tied]
        scattered = [each for each in named if each.parameter is tied and ties_last]
        self._inner = ParameterJudge(scene, inner) if inner else None
        self._scattered = ParameterJudge(scene, scattered) if scattered else None
        self._scattered_N: Tensor | None = None

    def remember(self, local_P: Tensor | None) -> None:
        """Keep the local gradients; that of the tied weight is given. Call before the first collective. Local."""
        if self._inner is not None:
            self._inner.remember()
        if self._scattered is not None:
            self._scattered.remember(local_P)

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

    def __init__(self, scene: Scene, judged: Sequence[Named]) -> None:
        self._scene = scene
        self._judged = judged
        self._local_N: Tensor | None = None
        self._expectation = Expectation(
            probe=scene.probe,
            mesh=Mesh(len(scene.members), 1),
            members=scene.members,
            prescale=scene.prescale,
            sharded=True,
            bit_tied=False,
            misowned=(),
            code=None,
            owned=gather_owned(self._owned(), scene.members, scene.communicator, judged[0].parameter.device),
        )

    def remember(self, local_N: Tensor | None = None) -> None:
        """Keep the local gradients, by copy unless they are given; call before the first collective. Local."""
        self._local_N = self._gradients(self._local_N) if local_N is None else local_N

    def copy(self) -> Tensor:
        """The gradients as they now stand, [N]. Local."""
        return self._gradients(None)

    def judge(self, phase: Phase, replay: Replay | None, synced_N: Tensor | None = None) -> ParametersRow:
        """What this rank owns, against the true sums. Collective over the dp replicas.

        `replay` is that of the next dp_rank's local gradients [N]; `synced_N` is what to judge, the gradients as they
        now stand where None; `phase` is what they have been through.
        """
        assert self._local_N is not None, "remember() was not called in this step"
        synced_N = self._gradients(None) if synced_N is None else synced_N
        holding = Holding(local_P=self._local_N, replay=replay, synced_P=synced_N, weight_P=synced_N, answer=None)
        judgement = judge_end(self._expectation, holding, self._scene.world_rank, self._scene.communicator)
        return self._row(phase, judgement)

    def _row(self, phase: Phase, judgement: EndJudgement) -> ParametersRow:
        row: DivergenceRow = judgement.divergence
        return ParametersRow(
            phase=phase,
            owned_elements=row.owned_elements,
            total_elements=self._total(),
            diverged_elements=row.diverged_elements,
            nonfinite_elements=row.nonfinite_elements,
            first_diverged=self._element(row.first_diverged),
            last_diverged=self._element(row.last_diverged),
            max_abs_error=row.max_abs_error,
            max_error_over_bound=row.max_error_over_bound,
            reference_max_abs_error=row.reference_max_abs_error,
            reference_exceeded_elements=row.reference_exceeded_elements,
            deviations=row.deviations,
            deviating_ranks=tuple(sorted(judgement.astray.world_ranks)),
            first_deviating=self._element(judgement.astray.span.first),
            last_deviating=self._element(judgement.astray.span.last),
        )

    def _gradients(self, out_N: Tensor | None) -> Tensor:
        return torch.cat([self._scene.stack.grad(named.parameter) for named in self._judged], out=out_N)

    def _owned(self) -> Intervals:
        """This rank's elements in flat coordinates."""
        return normalize(
            interval
            for offset, named in self._offsets()
            for interval in shift(self._scene.stack.owned(named.parameter), offset)
        )

    def _element(self, index: int | None) -> ParameterElement | None:
        if index is None:
            return None
        offset, named = max((pair for pair in self._offsets() if pair[0] <= index), key=lambda pair: pair[0])
        return ParameterElement(named.name, index - offset)

    def _offsets(self) -> Iterable[tuple[int, Named]]:
        offset = 0
        for named in self._judged:
            yield offset, named
            offset += named.parameter.numel()

    def _total(self) -> int:
        return sum(named.parameter.numel() for named in self._judged)


def name_parameters(modules: Sequence[nn.Module]) -> list[Named]:
    """Every parameter of a rank's chunks, as registered; with several chunks the names say which."""
    prefixes = [""] if len(modules) == 1 else [f"chunk {chunk}: " for chunk in range(len(modules))]
    return [
        Named(prefix + name, parameter)
        for prefix, module in zip(prefixes, modules, strict=True)
        for name, parameter in module.named_parameters()
    ]


def gather_owned(
    mine: Intervals, members: Members, communicator: ProcessGroups, device: torch.device
) -> tuple[Intervals, ...]:
    """Every member's intervals, in group order. Collective over `members`."""
    bounds = torch.tensor([[i.start, i.stop] for i in mine], dtype=torch.int64, device=device).flatten()
    size = torch.tensor([bounds.numel()], dtype=torch.int64, device=device)
    sizes = [int(received) for received in communicator.all_to_all(members, [size] * len(members), [1] * len(members))]
    gathered = communicator.all_to_all(members, [bounds] * len(members), sizes)
    return tuple(
        tuple(Interval(start, stop) for start, stop in zip(flat[::2], flat[1::2], strict=True))
        for flat in (received.tolist() for received in gathered)
    )
