"""A rank that breaks: leaves by an exception or by SIGKILL around a collective of the data-parallel sync."""

from __future__ import annotations

import os
import signal

from workers.communicator import Moment
from workers.contract import RankPhase
from workers.errors import DrillError
from workers.faults import FaultName
from workers.strikes.strike import Strike, Victim

MOMENTS = {
    FaultName.RAISE_BEFORE: Moment.BEFORE,
    FaultName.KILL_BEFORE: Moment.BEFORE,
    FaultName.RAISE_IN: Moment.IN,
    FaultName.KILL_IN: Moment.IN,
    FaultName.RAISE_AFTER: Moment.AFTER,
    FaultName.KILL_AFTER: Moment.AFTER,
}
_KILLS = (FaultName.KILL_BEFORE, FaultName.KILL_IN, FaultName.KILL_AFTER)


class Breakdown(Strike):
    """Called by the communicator before, in and after each collective."""

    def __init__(self, victim: Victim, step: int, fault: FaultName) -> None:
        super().__init__(victim, step)
        self._fault = fault

    def __call__(self, moment: Moment) -> None:
        """Break at the fault's moment, in the data-parallel sync of the step to strike in."""
        phase, step = self.victim.where()
        # With overlap the sync starts during backward, which has no other collective of the stack.
        in_dp_sync = phase in (RankPhase.DP_SYNC, RankPhase.FORWARD_BACKWARD)
        if MOMENTS[self._fault] is moment and in_dp_sync and step == self._step:
            break_down(self._fault)


def break_down(fault: FaultName) -> None:
    """Break this process. Raises DrillError, or does not return."""
    if fault in _KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    raise DrillError(f"drill {fault.value}: this rank was told to break here; run without `drill` to validate for real")
