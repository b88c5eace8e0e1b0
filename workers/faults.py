"""Faults injected on purpose by drills: what can break a rank around a collective of the data-parallel sync.

Each strikes once, on the drill's world_rank in the drill's step of the first trial that reaches it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from workers.communicator import Moment
from workers.contract import Drill, RankPhase
from workers.errors import DrillError


class FaultName(StrEnum):
    """The catalogue. `raise` leaves by an exception, `kill` by SIGKILL; `in` means issued and not yet waited for."""

    RAISE_BEFORE = "raise_before_collective"
    RAISE_IN = "raise_in_collective"
    RAISE_AFTER = "raise_after_collective"
    KILL_BEFORE = "kill_before_collective"
    KILL_IN = "kill_in_collective"
    KILL_AFTER = "kill_after_collective"


_MOMENTS = {
    FaultName.RAISE_BEFORE: Moment.BEFORE,
    FaultName.KILL_BEFORE: Moment.BEFORE,
    FaultName.RAISE_IN: Moment.IN,
    FaultName.KILL_IN: Moment.IN,
    FaultName.RAISE_AFTER: Moment.AFTER,
    FaultName.KILL_AFTER: Moment.AFTER,
}


@dataclass(frozen=True, slots=True)
class Striker:
    """Watches one rank's collectives and strikes at the drill's moment, in phase `dp_sync` of the drill's step."""

    drill: Drill
    where: Callable[[], tuple[RankPhase, int | None]]
    """Tells the rank's phase and step."""

    def __call__(self, moment: Moment) -> None:
        """Called by the communicator before, in and after each collective."""
        fault = FaultName(self.drill.fault)
        if _MOMENTS[fault] is moment and self.where() == (RankPhase.DP_SYNC, self.drill.step):
            strike(fault)


def strike(fault: FaultName) -> None:
    """Break this process. Raises DrillError, or does not return."""
    if fault in (FaultName.KILL_BEFORE, FaultName.KILL_IN, FaultName.KILL_AFTER):
        os.kill(os.getpid(), signal.SIGKILL)
    raise DrillError(f"drill {fault.value}: this rank was told to break here; run without `drill` to validate for real")
