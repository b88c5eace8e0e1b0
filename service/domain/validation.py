"""A validation and its state machine: `queued -> starting -> running -> completed | failed | cancelled`.

Pure. The storage layer applies these rules inside a transaction; nothing else may decide what a legal move is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from service.domain.cause import Cause
from service.domain.errors import IllegalMove
from service.domain.ids import sortable_id
from workers.contract import CollectiveSummary, Observation, Reason, TrialSummary, Verdict

MAX_ATTEMPTS = 3
"""How many attempts a validation may lose, with their dispatcher or driver; the last of them fails it. A dispatcher
that stops in good order hands its attempts back, and that costs none."""

ID_PREFIX = "val_"


class State(StrEnum):
    """Where a validation is. API string = database value."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing can change it any more."""
        return self in TERMINAL


class EventType(StrEnum):
    """What happened to a validation, in the order in which it happened."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    RESERVED = "reserved"
    FORMED = "formed"
    TRIAL_STARTED = "trial_started"
    STEP = "step"
    TRIAL_FINISHED = "trial_finished"
    REPEATING_ELSEWHERE = "repeating_elsewhere"
    REPEATED_ELSEWHERE = "repeated_elsewhere"
    CANCEL_REQUESTED = "cancel_requested"
    REQUEUED = "requeued"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """How an attempt ended, in the ledger."""

    REQUEUED = "requeued"
    """It was lost."""
    HANDED_BACK = "handed_back"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
LEASED = frozenset({State.STARTING, State.RUNNING})
"""States in which a dispatcher holds the validation."""

LEGAL_MOVES: Mapping[State, frozenset[State]] = {
    # queued fails when nobody took it up for too long.
    State.QUEUED: frozenset({State.STARTING, State.FAILED, State.CANCELLED}),
    # starting and running go back to queued when a lost attempt is taken over.
    State.STARTING: frozenset({State.RUNNING, State.QUEUED, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.COMPLETED, State.QUEUED, State.FAILED, State.CANCELLED}),
    State.COMPLETED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


def check_move(current: State, target: State) -> None:
    """Raise IllegalMove unless a validation may go from `current` to `target`."""
    if target not in LEGAL_MOVES[current]:
        allowed = ", ".join(sorted(LEGAL_MOVES[current])) or "nothing: it is final"
        raise IllegalMove(f"a validation that is {current} cannot become {target}; it can become {allowed}")


def sources(target: State) -> tuple[State, ...]:
    """The states from which `target` can be reached."""
    return tuple(state for state, targets in LEGAL_MOVES.items() if target in targets)


def new_validation_id() -> str:
    """A new validation's id."""
    return sortable_id(ID_PREFIX)


@dataclass(frozen=True, slots=True)
class FailureDetail:
    """Why an attempt failed: the first cause, with its place where one is known. Never a survivor's complaint."""

    code: str
    message: str
    world_rank: int | None = None
    node: str | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a validation's history; `seq` counts from 1 without gaps, in commit order."""

    validation_id: str
    seq: int
    type: str
    data: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Validation:
    """One `POST /validate`: the request, the queue entry and the result."""

    id: str
    cluster: str
    state: State
    verdict: Verdict | None
    cause: Cause | None
    reasons: tuple[Reason, ...]
    observations: tuple[Observation, ...]
    collectives: tuple[CollectiveSummary, ...]
    request: dict[str, Any]
    labels: dict[str, str]
    num_ranks: int
    deadline_s: float
    drill: bool
    trials: tuple[TrialSummary, ...]
    error: FailureDetail | None
    fingerprint: Any
    timings: dict[str, Any]
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    dispatcher_id: str | None
    lease_expires_at: datetime | None
    schema_version: int
    verdict_rules_version: int
    last_event_seq: int
    revision: int = field(default=0)
    """Rises with every change of the row except lease renewals and progress events: a strong ETag's content."""
    created_by: str = ""
    """The id of the API key that it came with; empty where no keys are configured."""
