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
    """A parameter of the stage by its name."""

    name: str
    parameter: nn.Parameter


class ParameterJudge:
    """Judges some parameters of one rank's stage in every step. Building it is collective over the dp replicas."""

    def __init__(
        self,
        probe: ProbeName,
        prescale: Prescale,
        members: Members,
        world_rank: int,
        judged: Sequence[Named],
        stack: Stack,
        communicator: ProcessGroups,
    ) -> None:
        self._members = members
        self._world_rank = world_rank
        self._judged = judged
        self._stack = stack
        self._communicator = communicator
        self._local_N: Tensor | None = None
        owned = gather_owned(self._owned(), members, communicator, self._device())
        self._expectation = Expectation(
            probe=probe,
            mesh=Mesh(len(members), 1),
            members=members,
            prescale=prescale,
            sharded=True,
            bit_tied=False,
            misowned=(),
            owned=owned,
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
        holding = Holding(local_P=self._local_N, replay=replay, synced_P=synced_N, weight_P=synced_N)
        judgement = judge_end(self._expectation, holding, self._world_rank, self._communicator)
        return self._row(phase, judgement)

    def _row(self, phase: Phase, judgement: EndJudgement) -> ParametersRow:
        row: DivergenceRow = judgement.divergence
        return ParametersRow(
            phase=phase,
            owned_elements=row.owned_elements,
            total_elements=self._total(),
            diverged_elements=row.diverged_elements,
            nonfinite_elements=row.nonfinite_elements,
            first_diverged=None if row.first_diverged is None else self._element(row.first_diverged),
            max_abs_error=row.max_abs_error,
            max_error_over_bound=row.max_error_over_bound,
            reference_max_abs_error=row.reference_max_abs_error,
            reference_exceeded_elements=row.reference_exceeded_elements,
            deviating_ranks=row.deviating_ranks,
        )

    def _gradients(self, out_N: Tensor | None) -> Tensor:
        return torch.cat([self._stack.grad(named.parameter) for named in self._judged], out=out_N)

    def _owned(self) -> Intervals:
        """This rank's elements in flat coordinates."""
        return normalize(
            interval
            for offset, named in self._offsets()
            for interval in shift(self._stack.owned(named.parameter), offset)
        )

    def _element(self, index: int) -> ParameterElement:
        offset, named = max((pair for pair in self._offsets() if pair[0] <= index), key=lambda pair: pair[0])
        return ParameterElement(named.name, index - offset)

    def _offsets(self) -> Iterable[tuple[int, Named]]:
        offset = 0
        for named in self._judged:
            yield offset, named
            offset += named.parameter.numel()

    def _total(self) -> int:
        return sum(named.parameter.numel() for named in self._judged)

    def _device(self) -> torch.device:
        return self._judged[0].parameter.device


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
