"""What broke first: from the symptoms that ranks show within a short grace to one cause with its place.

When a rank dies its neighbours raise within milliseconds and everyone else blocks, so the first complaint to
arrive is usually a victim's. A death outranks a rank's own error, which outranks a broken collective. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.domain.validation import FailureDetail
from workers.contract import REFERENCE_STACK, Position, RankFailure, RankPhase

DEATH_GRACE_S = 0.1
"""After a death: nothing outranks it; this only lets an earlier one be seen."""
OWN_GRACE_S = 0.5
"""After a rank's own error: a death that caused it would show within this."""
COLLATERAL_GRACE_S = 2.0
"""After a broken collective: the cause may take this long to be noticed on another node."""

NO_WORD = "its process ended without a word (killed, out of memory, or its node is gone)"


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's process went away. `position` is the last one it published."""

    world_rank: int
    node: str
    position: Position | None
    message: str = NO_WORD


Symptom = RankFailure | Death


def grace_s(symptom: Symptom) -> float:
    """How long to wait for a symptom that outranks this one."""
    if isinstance(symptom, Death):
        return DEATH_GRACE_S
    return COLLATERAL_GRACE_S if symptom.collateral else OWN_GRACE_S


def first_cause(symptoms: Sequence[Symptom]) -> FailureDetail:
    """The detail to report, from symptoms in order of arrival (at least one)."""
    return _describe(min(symptoms, key=_severity))  # min keeps the earliest of equals


def _severity(symptom: Symptom) -> int:
    if isinstance(symptom, Death):
        return 0
    return 2 if symptom.collateral else 1


def _describe(symptom: Symptom) -> FailureDetail:
    if isinstance(symptom, RankFailure):
        place = _place(symptom.phase, symptom.trial_index, symptom.step)
        message = f"world_rank {symptom.world_rank} on {symptom.node} failed {place}: {symptom.message}"
        return FailureDetail(symptom.code, message, symptom.world_rank, symptom.node, symptom.phase.value)
    position = symptom.position or Position(symptom.world_rank, RankPhase.FORMING, None, None, 0)
    place = _place(position.phase, position.trial_index, position.step)
    message = f"world_rank {symptom.world_rank} on {symptom.node} died {place}: {symptom.message}"
    return FailureDetail("rank_died", message, symptom.world_rank, symptom.node, position.phase.value)


def _place(phase: RankPhase, trial_index: int | None, step: int | None) -> str:
    trial = "" if trial_index is None else f", trial {trial_index}"
    return f"in phase {phase.value}{trial}" + ("" if step is None else f", step {step}")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a gang's ranks are when its time is up. `silent` ranks did not even answer where they are."""

    world_size: int
    positions: Mapping[int, Position]
    nodes: Mapping[int, str]
    silent: frozenset[int] = frozenset()

    def of(self, world_rank: int) -> Position:
        """The last position a rank published; a rank that never did is still forming."""
        return self.positions.get(world_rank) or Position(world_rank, RankPhase.FORMING, None, None, 0)


def deadline_detail(deadline_s: float, ranks: Whereabouts, stacks: Sequence[str] = ()) -> FailureDetail:
    """A hang, told by who holds up the others: ranks that do not answer, else those that entered the fewest phases.

    `stacks` says whose code each trial ran.
    """
    everyone = [ranks.of(world_rank) for world_rank in range(ranks.world_size)]
    fewest = min(position.sequence for position in everyone)
    silent = [position for position in everyone if position.world_rank in ranks.silent]
    late = silent or [position for position in everyone if position.sequence == fewest]
    accused = late[0] if len(late) < ranks.world_size or ranks.world_size == 1 else None
    place = _place(late[0].phase, late[0].trial_index, late[0].step)
    names = ", ".join(str(position.world_rank) for position in late[:8]) + (" ..." if len(late) > 8 else "")
    if accused is None:
        story = f"none of {ranks.world_size} ranks got beyond what they were doing {place}"
    elif silent:
        story = f"world_rank {names} does not answer and was last seen {place}"
    else:
        others = max(everyone, key=lambda position: position.sequence)
        further = _place(others.phase, others.trial_index, others.step)
        story = f"world_rank {names} never got beyond what it did {place}; world_rank {others.world_rank} is {further}"
    stack = REFERENCE_STACK if late[0].trial_index is None or not stacks else stacks[late[0].trial_index]
    story += "" if stack == REFERENCE_STACK else f", with stack {stack!r} under test"
    message = f"not finished when deadline_s={deadline_s:g} ran out: {story}; look at that rank, or raise deadline_s"
    world_rank = None if accused is None else accused.world_rank
    node = None if world_rank is None else ranks.nodes.get(world_rank)
    return FailureDetail("deadline_exceeded", message, world_rank, node, late[0].phase.value)
