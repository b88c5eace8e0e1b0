"""What an owner says of its wrong elements: whose share is missing, doubled or scaled, or whose sum they are instead.

Collects the stories of `workers.explanation` over the pieces of a shard, and looks for another owner's sum where none
explains it. What nothing explains is corrupt, and nobody is named. Must not communicate, and must not decide what is
wrong (`workers.divergence` does).

Shape legend: C = contributors, in the order of `workers.mesh.ends_members`; n = wrong elements; P = elements of the
tied weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.contract import Deviation, DeviationKind
from workers.exchange import Answer, Expectation
from workers.explanation import Story, Wrong, explain
from workers.intervals import Intervals

MAX_NAMED = 8
"""Contributors that a deviation lists; it counts them all."""
MAX_DEVIATIONS = 8
"""Stories that a shard tells, most elements first."""
MAX_REMEMBERED = 1 << 20
"""Wrong elements kept to find the shard whose sum they are; with more nobody looks."""

_Key = tuple[DeviationKind, tuple[int, ...], float | None]


class Attribution:
    """Collects one owner's stories, piece by piece."""

    def __init__(self, expectation: Expectation, index: int) -> None:
        self._expectation = expectation
        self._index = index
        self._told: dict[_Key, _Entry] = {}
        self._remembered: list[tuple[Tensor, Tensor]] = []
        self._num_wrong = 0

    def add(self, wrong: Wrong) -> None:
        """Explain the wrong elements of one piece."""
        self._num_wrong += len(wrong)
        if self._num_wrong <= MAX_REMEMBERED:
            self._remembered.append((wrong.elements_n, wrong.values_n))
        for story, elements_n in explain(wrong, self._expectation, self._index):
            self._tell(story, elements_n)

    def add_local(self, elements_n: Tensor, astray_Cn: Tensor) -> None:
        """Each contributor's own gradient is wrong in the elements of its mask."""
        for contributor in astray_Cn.any(dim=1).nonzero().flatten().tolist():
            self._tell(Story(DeviationKind.LOCAL, (contributor,)), elements_n[astray_Cn[contributor]])

    def conclude(self, answer: Answer | None) -> tuple[Deviation, ...]:
        """The stories, most elements first."""
        unexplained = any(kind is DeviationKind.CORRUPT for kind, _, _ in self._told)
        if answer is not None and unexplained and 2 <= self._num_wrong <= MAX_REMEMBERED:
            self._find_owner(answer() * self._expectation.prescale.factor)
        told = sorted(self._told.items(), key=lambda item: (-item[1].num_elements, item[1].first_element))
        return tuple(self._deviation(key, entry) for key, entry in told[:MAX_DEVIATIONS])

    def _find_owner(self, answer_P: Tensor) -> None:
        """Whether all that is wrong here is the sum of another shard, and then whose."""
        elements_n, values_n = (torch.cat(parts) for parts in zip(*self._remembered, strict=True))
        answer_P = answer_P.to(values_n.device)
        for owner, shift in _shifts(self._expectation.owned, self._index, self._expectation.mesh.dp):
            moved_n = elements_n + shift
            # Past the ends of the tied weight the other shard holds other parameters.
            inside_n = (moved_n >= 0) & (moved_n < answer_P.numel())
            if int(inside_n.sum()) >= 2 and torch.equal(answer_P[moved_n[inside_n]], values_n[inside_n]):
                self._told = {key: entry for key, entry in self._told.items() if key[0] is DeviationKind.LOCAL}
                self._tell(Story(DeviationKind.WRONG_OWNER, (owner,)), elements_n[inside_n])
                self._tell(Story(DeviationKind.CORRUPT), elements_n[~inside_n])
                return

    def _tell(self, story: Story, elements_n: Tensor) -> None:
        if elements_n.numel():
            first = int(elements_n.min())
            entry = self._told.setdefault((story.kind, story.named, story.factor), _Entry(first))
            entry.first_element = min(entry.first_element, first)
            entry.num_elements += elements_n.numel()
            entry.uncertainty = max(entry.uncertainty, story.uncertainty)

    def _deviation(self, key: _Key, entry: _Entry) -> Deviation:
        kind, named, factor = key
        listed = tuple(self._expectation.contributor(index) for index in named[:MAX_NAMED])
        return Deviation(kind, listed, len(named), factor, entry.uncertainty, entry.first_element, entry.num_elements)


@dataclass(slots=True)
class _Entry:
    first_element: int
    num_elements: int = 0
    uncertainty: float = 0.0


def _shifts(owned: Sequence[Intervals], index: int, dp: int) -> list[tuple[int, int]]:
    """(owner, distance of its elements from ours) for every other owner at the same end.

    Shards of one bucket are equally long, so that starts or, for a shard that the weight cuts short, stops line up.
    """
    first = index // dp * dp
    mine = owned[index]
    found = []
    for owner in range(first, first + dp):
        theirs = owned[owner]
        if owner != index and mine and theirs:
            shifts = {theirs[0].start - mine[0].start, theirs[-1].stop - mine[-1].stop}
            found += [(owner, shift) for shift in sorted(shifts) if shift]
    return found
