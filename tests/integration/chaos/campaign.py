"""One run: validations are kept in flight while a seed's faults strike one after another; then all is checked."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg
from sqlalchemy.exc import SQLAlchemyError

from .faults import draw_faults
from .invariants import Witness, settle
from .stack import CLUSTER, NUM_CPUS, Stack, running

IN_FLIGHT = 4
CHECK_EVERY = 20
"""Faults between two times when everything is let come to rest and looked at."""
HEALTHY = {"probes": ["exact"], "orderings": ["buggy", "fixed"], "steps": 2, "device": "cpu", "deadline_s": 25}
LONG = {"probes": ["gpt"], "orderings": ["buggy", "fixed"], "steps": 6, "device": "cpu", "deadline_s": 40}
MESHES = ({"dp": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"dp": 3, "pp": 2})
DRILLS = ("kill_in_collective", "raise_before_collective", "tie_skipped", "nan_before_dp_sync")
PASSES_WITHIN_S = 120.0


@dataclass(slots=True)
class Outcome:
    """What a run found."""

    num_faults: int = 0
    num_validations: int = 0
    complaints: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def run(seed: int, num_faults: int, tell: Callable[[str], None]) -> Outcome:
    """Strike `num_faults` times, or until an invariant is broken."""
    outcome, rng, began_s = Outcome(), random.Random(seed), time.monotonic()
    with running() as stack:
        try:
            stack.mend()
            stack.wait_ready()
            _strike_all(stack, rng, num_faults, outcome, tell)
        except (AssertionError, psycopg.Error, SQLAlchemyError, httpx.HTTPError) as error:
            outcome.complaints.append(f"{type(error).__name__}: {error}")
        outcome.complaints += stack.stop()
        if outcome.complaints:
            for name in stack.processes:
                tell(f"-- {name}'s log ends with:\n{stack.tail(name, 40)}")
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _strike_all(
    stack: Stack, rng: random.Random, num_faults: int, outcome: Outcome, tell: Callable[[str], None]
) -> None:
    witness = Witness()
    for number, fault in enumerate(draw_faults(rng, num_faults), 1):
        own = random.Random(rng.random())  # so that what one fault draws does not shift the next one's
        outcome.num_validations += _fill(stack, own)
        time.sleep(own.uniform(0, 2.5))
        told = fault(stack, own)
        outcome.num_faults = number
        tell(f"{number:4d} {fault.__name__}: {told}")
        stack.mend()
        stack.wait_ready()
        outcome.complaints += witness.look(stack)
        if number % CHECK_EVERY == 0 or number == num_faults:
            outcome.complaints += settle(stack) + witness.look(stack)
            outcome.num_validations += 1
            outcome.complaints += _next_passes(stack) + witness.look(stack) + witness.judge()
            outcome.ends = witness.tally()
            tell(f"     at rest: {outcome.ends}")
        if outcome.complaints:
            return


def _fill(stack: Stack, rng: random.Random) -> int:
    """Submit until enough are in flight; how many."""
    num_active = len(stack.query("SELECT id FROM validations WHERE finished_at IS NULL"))
    num_missing = max(0, IN_FLIGHT - num_active)
    for _ in range(num_missing):
        stack.api.post("/validate", json=_request(rng)).raise_for_status()
    return num_missing


def _request(rng: random.Random) -> dict[str, Any]:
    request = {"cluster": CLUSTER, **rng.choice((HEALTHY, LONG)), "mesh": rng.choice(MESHES)}
    if rng.random() < 0.25:
        request |= {"drill": {"fault": rng.choice(DRILLS), "world_rank": rng.randrange(2), "step": 0}}
    if rng.random() < 0.15:
        request |= {"placement": {"nodes": 3}, "mesh": {"dp": 3, "pp": 2}}
    return request


def _next_passes(stack: Stack) -> list[str]:
    request = {"cluster": CLUSTER, **HEALTHY, "mesh": {"dp": NUM_CPUS // 2, "pp": 2}, "deadline_s": 60}
    validation = stack.api.post("/validate", json=request).raise_for_status().json()
    until_s = time.monotonic() + PASSES_WITHIN_S
    while validation["finished_at"] is None and time.monotonic() < until_s:
        time.sleep(0.3)
        with contextlib.suppress(httpx.HTTPError):
            validation = stack.api.get(f"/validations/{validation['id']}").raise_for_status().json()
    if validation["verdict"] == "pass":
        return []
    return [f"the next validation did not pass: {validation['state']}, {validation['verdict']}, {validation['error']}"]
