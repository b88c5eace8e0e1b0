"""What must hold whatever broke. `Witness` remembers every end that it saw; a later look must find the same.

Each check returns complaints in words; none is good.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .stack import NUM_CPUS, Stack

SETTLE_S = 240.0
"""Within this every validation ends once all is mended: its deadline, three lost attempts, the queue before it."""
FREE_S = 45.0
"""Within this everything is free after that: idle gangs leave after 3 s, stopped ranks miss their driver after 30."""

ENDS = (
    "SELECT id, state, verdict, error->>'code' AS code, error->>'message' AS message, revision, finished_at, attempt, "
    "last_event_seq, request->'drill'->>'fault' AS drill, cancel_requested_at IS NOT NULL AS wished "
    "FROM validations WHERE finished_at IS NOT NULL ORDER BY id"
)
RESULTS = (
    "SELECT v.id, v.state, count(e.seq) AS num_ends, max(e.type) AS type, "
    "(SELECT count(*) FROM trials t WHERE t.validation_id = v.id) AS num_trials, "
    "(SELECT count(*) FROM attempts a WHERE a.validation_id = v.id AND a.ended_at IS NULL) AS num_open, "
    "(SELECT count(*) FROM events x WHERE x.validation_id = v.id) AS num_events, v.last_event_seq "
    "FROM validations v LEFT JOIN events e "
    "ON e.validation_id = v.id AND e.type IN ('completed', 'failed', 'cancelled') "
    "WHERE v.finished_at IS NOT NULL GROUP BY v.id"
)
BREAKS = "kill_", "raise_"
INFRASTRUCTURE = frozenset(
    {
        "rank_died",
        "rank_raised",
        "gang_not_formed",
        "gang_not_ended",
        "deadline_exceeded",
        "capacity_wait_expired",
        "attempts_exhausted",
        "infeasible",
        "collective_failed",
        "driver_error",
    }
)
"""How a validation may fail that a fault of the stack struck."""


@dataclass(slots=True)
class Witness:
    """The ends seen so far, by validation."""

    ends: dict[str, dict[str, Any]] = field(default_factory=dict)

    def look(self, stack: Stack) -> list[str]:
        """Cheap: the database alone."""
        complaints = []
        for end in stack.query(ENDS):
            if (before := self.ends.setdefault(end["id"], end)) != end:
                complaints.append(f"{end['id']} had ended and changed: {before} became {end}")
        complaints += [f"attempts overlap: {row}" for row in stack.overlaps()]
        return complaints + self._results(stack)

    def _results(self, stack: Stack) -> list[str]:
        complaints = []
        for row in stack.query(RESULTS):
            if (row["num_ends"], row["type"]) != (1, row["state"]):
                complaints.append(f"{row['id']} has {row['num_ends']} final events, {row['type']}: {row}")
            if (row["num_trials"] > 0) != (row["state"] == "completed"):
                complaints.append(f"{row['id']} is {row['state']} with {row['num_trials']} trials")
            if row["num_open"] or row["num_events"] != row["last_event_seq"]:
                complaints.append(f"{row['id']} has an attempt open or an event lost: {row}")
        return complaints

    def judge(self) -> list[str]:
        """Whether each end is a right one for what was asked."""
        return [complaint for end in self.ends.values() if (complaint := _wrong(end)) is not None]

    def tally(self) -> dict[str, int]:
        """How many ended how."""
        counts: dict[str, int] = {}
        for end in self.ends.values():
            how = end["verdict"] or end["code"] or end["state"]
            counts[how] = counts.get(how, 0) + 1
        return dict(sorted(counts.items()))


def _wrong(end: dict[str, Any]) -> str | None:
    drill = end["drill"]
    if end["state"] == "cancelled":
        return None if end["wished"] else f"{end['id']} was cancelled and nobody wished it"
    if end["state"] == "completed":
        if drill is None:
            return None if end["verdict"] == "pass" else f"a healthy run got a verdict {end['verdict']}: {end}"
        if drill.startswith(BREAKS):
            return f"a run that must break was completed: {end}"
        return None if end["verdict"] == "fail" else f"a fault was not seen: {end}"
    return None if end["code"] in INFRASTRUCTURE else f"failed for a reason that no fault of the stack explains: {end}"


def settle(stack: Stack) -> list[str]:
    """Wait until every validation has ended and everything is free; what does not come to that."""
    until_s = time.monotonic() + SETTLE_S
    while active := stack.query(
        "SELECT id, state, attempt, dispatcher_id FROM validations WHERE finished_at IS NULL ORDER BY id"
    ):
        if time.monotonic() > until_s:
            return [f"stuck after {SETTLE_S:g} s: {row}" for row in active]
        time.sleep(0.3)
    until_s = time.monotonic() + FREE_S
    while complaints := _held(stack):
        if time.monotonic() > until_s:
            return complaints
        time.sleep(0.5)
    return []


def _held(stack: Stack) -> list[str]:
    seen = stack.look_at_ray()
    complaints = [f"a rank is left: pid {rank.pid}, {rank.status()}" for rank in stack.ranks()]
    if "error" in seen:
        return [*complaints, f"Ray does not answer: {seen['error']}"]
    if not seen["total"] == seen["free"] == NUM_CPUS:
        complaints.append(f"{seen['free']} of {seen['total']} CPUs are free, of {NUM_CPUS}")
    return complaints + [f"a placement group is left: {name}" for name in seen["groups"]]
