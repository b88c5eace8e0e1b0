"""The catalogue of faults that a drill can inject, and when one strikes.

Pure data and pure rules: requests are checked against it where torch must not be loaded. How a fault perturbs a step
is in `workers.strikes`; nothing here or there touches a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from workers.contract import Drill, TrialSpec


class FaultName(StrEnum):
    """The catalogue. `raise` leaves by an exception, `kill` by SIGKILL; `in` means issued and not yet waited for."""

    RAISE_BEFORE = "raise_before_collective"
    RAISE_IN = "raise_in_collective"
    RAISE_AFTER = "raise_after_collective"
    KILL_BEFORE = "kill_before_collective"
    KILL_IN = "kill_in_collective"
    KILL_AFTER = "kill_after_collective"
    BIT_IN_RECEIVE_BUFFER = "bit_flipped_in_receive_buffer"


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the catalogue."""

    name: FaultName
    summary: str
    """What the struck rank does, in one sentence."""


_SUMMARIES = {
    FaultName.RAISE_BEFORE: "Raises before a collective of the data-parallel sync.",
    FaultName.RAISE_IN: "Raises with a collective of the data-parallel sync issued and not yet waited for.",
    FaultName.RAISE_AFTER: "Raises after a collective of the data-parallel sync.",
    FaultName.KILL_BEFORE: "Is killed before a collective of the data-parallel sync.",
    FaultName.KILL_IN: "Is killed with a collective of the data-parallel sync issued and not yet waited for.",
    FaultName.KILL_AFTER: "Is killed after a collective of the data-parallel sync.",
    FaultName.BIT_IN_RECEIVE_BUFFER: "One bit is flipped in what each collective of the data-parallel sync left here.",
}

FAULTS: Mapping[FaultName, Fault] = MappingProxyType({name: Fault(name, _SUMMARIES[name]) for name in FaultName})
"""Every fault by its name."""


def is_struck(spec: TrialSpec, world_rank: int, node: str) -> bool:
    """Whether the trial's drill strikes on this rank: it is bound to it or to its node, and the draw says so."""
    drill = spec.drill
    if drill is None or (drill.world_rank != world_rank if drill.node is None else drill.node != node):
        return False
    return draw(spec, drill, world_rank) < drill.probability


def draw(spec: TrialSpec, drill: Drill, world_rank: int) -> float:
    """A number in [0, 1) that follows from the trial's seed and names alone, evenly spread over trials and ranks."""
    what = (spec.seed, spec.repeat, spec.probe.value, spec.ordering.value, drill.fault, drill.step, world_rank)
    drawn = blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big") / 2**64


DRILL_FORM = "FAULT[:WORLD_RANK|@NODE[:STEP[:PROBABILITY]]]"
_DRILL = re.compile(
    r"(?P<fault>[^:]+)(:((?P<world_rank>\d+)|@(?P<node>[^:]+))(:(?P<step>\d+)(:(?P<probability>\d*\.?\d+))?)?)?"
)


def read_drill(text: str) -> dict[str, Any]:
    """The fields of a drill written as `DRILL_FORM`; what was left out is left out. ValueError for another form."""
    found = _DRILL.fullmatch(text)
    if found is None:
        raise ValueError(f"needs the form {DRILL_FORM}, as kill_in_collective:1:0")
    kinds = {"fault": str, "world_rank": int, "node": str, "step": int, "probability": float}
    return {name: kinds[name](value) for name, value in found.groupdict().items() if value is not None}
