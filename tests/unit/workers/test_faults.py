"""Drills strike once, at the named moment, phase and step, on the named rank and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from workers.communicator import Moment
from workers.contract import Drill, RankPhase
from workers.errors import DrillError
from workers.faults import FaultName, Striker, strike
from workers.plan import DRILL_FAULTS


def test_the_plan_knows_every_fault() -> None:
    assert tuple(FaultName) == DRILL_FAULTS


@pytest.mark.parametrize("fault", [name for name in FaultName if name.startswith("raise")])
@pytest.mark.parametrize("moment", list(Moment))
def test_a_raise_strikes_at_its_moment_only(fault: FaultName, moment: Moment) -> None:
    striker = Striker(Drill(fault, world_rank=1, step=2), lambda: (RankPhase.DP_SYNC, 2))
    if fault == f"raise_{moment}_collective":
        with pytest.raises(DrillError, match=fault):
            striker(moment)
    else:
        striker(moment)


@pytest.mark.parametrize(
    "where",
    [(RankPhase.DP_SYNC, 1), (RankPhase.DP_SYNC, None), *[(p, 2) for p in RankPhase if p is not RankPhase.DP_SYNC]],
)
def test_other_phases_and_steps_are_left_alone(where: tuple[RankPhase, int | None]) -> None:
    Striker(Drill(FaultName.RAISE_IN, world_rank=0, step=2), lambda: where)(Moment.IN)


def test_a_kill_leaves_no_chance_to_clean_up() -> None:
    code = (
        "import atexit; from workers.faults import FaultName, strike\n"
        "atexit.register(print, 'cleaned up')\nstrike(FaultName.KILL_IN)\nprint('survived')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == ""


def test_a_raise_says_that_it_was_asked_for() -> None:
    with pytest.raises(DrillError, match="told to break"):
        strike(FaultName.RAISE_AFTER)
