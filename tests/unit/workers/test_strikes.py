"""Strikes hit at the named moment, phase and step, and leave everything else as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import cast

import pytest
import torch
from lockstep import Lockstep

from workers.communicator import Moment, ProcessGroups
from workers.contract import Drill, RankPhase
from workers.errors import DrillError
from workers.faults import FaultName
from workers.strikes import Striker, StruckCommunicator, flip_bit, strike

STRUCK = (RankPhase.DP_SYNC, RankPhase.FORWARD_BACKWARD)


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
    [(RankPhase.DP_SYNC, 1), (RankPhase.DP_SYNC, None), *[(phase, 2) for phase in RankPhase if phase not in STRUCK]],
)
def test_other_phases_and_steps_are_left_alone(where: tuple[RankPhase, int | None]) -> None:
    Striker(Drill(FaultName.RAISE_IN, world_rank=0, step=2), lambda: where)(Moment.IN)


@pytest.mark.parametrize("phase", STRUCK)
def test_the_dp_sync_is_struck_also_where_it_starts_during_backward(phase: RankPhase) -> None:
    with pytest.raises(DrillError):
        Striker(Drill(FaultName.RAISE_BEFORE, world_rank=0, step=2), lambda: (phase, 2))(Moment.BEFORE)


def test_a_kill_leaves_no_chance_to_clean_up() -> None:
    code = (
        "import atexit; from workers.faults import FaultName; from workers.strikes import strike\n"
        "atexit.register(print, 'cleaned up')\nstrike(FaultName.KILL_IN)\nprint('survived')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == ""


def test_a_raise_says_that_it_was_asked_for() -> None:
    with pytest.raises(DrillError, match="told to break"):
        strike(FaultName.RAISE_AFTER)


def test_one_bit_of_one_element_is_flipped() -> None:
    values = torch.tensor([1.0, -8.0, 3.0])
    flip_bit(values)
    assert values.tolist() == [1.0, -12.0, 3.0]
    flip_bit(values)
    assert values.tolist() == [1.0, -8.0, 3.0]


@pytest.mark.parametrize("struck_rank", [0, 1])
@pytest.mark.parametrize("at", [(RankPhase.DP_SYNC, 0), (RankPhase.DP_SYNC, 1), (RankPhase.TIE, 0)])
def test_a_receive_buffer_is_hit_in_its_step_on_its_rank(struck_rank: int, at: tuple[RankPhase, int]) -> None:
    drill = Drill(FaultName.BIT_IN_RECEIVE_BUFFER, struck_rank)

    def rank_main(rank: int, inner: ProcessGroups) -> list[torch.Tensor]:
        communicator = (
            cast(ProcessGroups, StruckCommunicator(inner, drill, lambda: at)) if rank == struck_rank else inner
        )
        buckets = [torch.full((6,), float(1 + index)) for index in range(2)]
        for bucket in buckets:
            communicator.reduce_scatter((0, 1), {rank: bucket})
        return [bucket[3 * rank : 3 * rank + 3] for bucket in buckets]

    for rank, owned in enumerate(Lockstep(2).run(rank_main)):
        wrong = [int((part != 2.0 * (1 + index)).sum()) for index, part in enumerate(owned)]
        assert wrong == ([1, 1] if rank == struck_rank and at == (RankPhase.DP_SYNC, 0) else [0, 0])
