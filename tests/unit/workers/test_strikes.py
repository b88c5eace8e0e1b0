"""Strikes hit at the named moment, phase and step, and leave everything else as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch
from lockstep import Lockstep

from workers.communicator import Finished, Moment, Pending, ProcessGroups
from workers.contract import BatchSpec, Drill, Mesh, ModelSpec, OrderingName, ProbeName, RankPhase, TrialSpec
from workers.errors import DrillError
from workers.faults import FaultName
from workers.mesh import Members
from workers.prediction import stage_layout
from workers.strikes.arsenal import STRIKES, arm
from workers.strikes.process import Breakdown, break_down
from workers.strikes.strike import Strike, Victim, flip_bit, largest

STRUCK = (RankPhase.DP_SYNC, RankPhase.FORWARD_BACKWARD)
MODEL = ModelSpec(8, 4, 2, 1, 4)
Where = tuple[RankPhase, int | None]


def victim_of(fault: FaultName, where: Where, world_rank: int = 0, step: int = 0, dp: int = 2) -> Victim:
    drill = Drill(fault, world_rank, step)
    spec = TrialSpec(ProbeName.GPT, OrderingName.OWN_BUCKET, Mesh(dp, 1), MODEL, BatchSpec(1, 2), drill=drill)
    links = cast("ProcessGroups", None)
    return Victim(spec, spec.mesh.coordinates(world_rank), lambda: where, links)


def breakdown(fault: FaultName, where: Where, step: int) -> Breakdown:
    strike = STRIKES[fault](victim_of(fault, where, step=step), step)
    assert isinstance(strike, Breakdown)
    return strike


def test_every_fault_has_a_strike() -> None:
    assert set(STRIKES) == set(FaultName)


@pytest.mark.parametrize("fault", [name for name in FaultName if name.startswith("raise")])
@pytest.mark.parametrize("moment", list(Moment))
def test_a_raise_strikes_at_its_moment_only(fault: FaultName, moment: Moment) -> None:
    strike = breakdown(fault, (RankPhase.DP_SYNC, 2), step=2)
    if fault == f"raise_{moment}_collective":
        with pytest.raises(DrillError, match=fault):
            strike(moment)
    else:
        strike(moment)


@pytest.mark.parametrize(
    "where",
    [(RankPhase.DP_SYNC, 1), (RankPhase.DP_SYNC, None), *[(phase, 2) for phase in RankPhase if phase not in STRUCK]],
)
def test_other_phases_and_steps_are_left_alone(where: Where) -> None:
    breakdown(FaultName.RAISE_IN, where, step=2)(Moment.IN)


@pytest.mark.parametrize("phase", STRUCK)
def test_the_dp_sync_is_struck_also_where_it_starts_during_backward(phase: RankPhase) -> None:
    with pytest.raises(DrillError):
        breakdown(FaultName.RAISE_BEFORE, (phase, 2), step=2)(Moment.BEFORE)


def test_a_kill_leaves_no_chance_to_clean_up() -> None:
    code = (
        "import atexit; from workers.faults import FaultName; from workers.strikes.process import break_down\n"
        "atexit.register(print, 'cleaned up')\nbreak_down(FaultName.KILL_IN)\nprint('survived')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == ""


def test_a_raise_says_that_it_was_asked_for() -> None:
    with pytest.raises(DrillError, match="told to break"):
        break_down(FaultName.RAISE_AFTER)


def test_one_bit_of_one_element_is_flipped() -> None:
    values = torch.tensor([1.0, -8.0, 3.0])
    flip_bit(values, largest(values))
    assert values.tolist() == [1.0, -12.0, 3.0]
    flip_bit(values, 1)
    assert values.tolist() == [1.0, -8.0, 3.0]
    halves = torch.tensor([1.0, -8.0], dtype=torch.bfloat16)
    flip_bit(halves, 1)
    assert halves.tolist() == [1.0, -12.0]


def test_a_rank_that_is_not_meant_is_armed_with_nothing() -> None:
    victim = victim_of(FaultName.TIE_SKIPPED, (RankPhase.TIE, 0), world_rank=1)
    assert type(arm(victim, "node")) is not Strike
    other = Victim(victim.spec, victim.spec.mesh.coordinates(0), victim.where, victim.links)
    assert type(arm(other, "node")) is Strike


def synced(fault: FaultName, struck_rank: int, where: Where, buckets: int = 2) -> list[list[torch.Tensor]]:
    """Each rank's whole buckets [6] of a reduce-scatter over two, which hold (1 + index + rank, ...)."""

    def rank_main(rank: int, inner: ProcessGroups) -> list[torch.Tensor]:
        communicator = inner
        if rank == struck_rank:
            strike = arm(victim_of(fault, where, struck_rank), "node")
            strike.before_forward()
            communicator = cast("ProcessGroups", strike.around_communicator(inner))
        held = [torch.full((6,), float(1 + index + rank)) for index in range(buckets)]
        for bucket in held:
            communicator.start_reduce_scatter((0, 1), {rank: bucket}).wait()
        return held

    return Lockstep(2).run(rank_main)


@pytest.mark.parametrize("struck_rank", [0, 1])
@pytest.mark.parametrize("at", [(RankPhase.DP_SYNC, 0), (RankPhase.DP_SYNC, 1), (RankPhase.TIE, 0), (STRUCK[1], 0)])
def test_a_receive_buffer_is_hit_once_in_its_step_on_its_rank(struck_rank: int, at: tuple[RankPhase, int]) -> None:
    for rank, held in enumerate(synced(FaultName.BIT_IN_RECEIVE_BUFFER, struck_rank, at)):
        owned = [bucket[3 * rank : 3 * rank + 3] for bucket in held]
        wrong = [int((part != 3.0 + 2 * index).sum()) for index, part in enumerate(owned)]
        is_hit = rank == struck_rank and at in ((RankPhase.DP_SYNC, 0), (RankPhase.FORWARD_BACKWARD, 0))
        assert wrong == ([1, 0] if is_hit else [0, 0])


def test_what_each_fault_of_the_sync_leaves_behind() -> None:
    where = (RankPhase.DP_SYNC, 0)

    def left(fault: FaultName) -> tuple[list[float], list[float]]:
        (zero,), (one,) = synced(fault, 1, where, buckets=1)
        return zero[:3].tolist(), one.tolist()

    assert left(FaultName.STALE_VIEW) == ([3, 3, 3], [2] * 6)
    assert left(FaultName.WRONG_SHARD_OWNER) == ([3, 3, 3], [3, 3, 3, 2, 2, 2])
    assert left(FaultName.TAIL_TRUNCATED) == ([3, 3, 3], [2, 2, 2, 3, 3, 2])
    assert left(FaultName.DIVIDED_BY_GROUP_SIZE_TWICE)[0] == [2, 2, 2]


Issued = list[tuple[str, int, int]]


class Recorder:
    """What one rank issues: which collective, of which element, and how many."""

    hosted = (0,)

    def __init__(self) -> None:
        self.issued: Issued = []

    def reduce_scatter(self, members: Members, buckets: Mapping[int, torch.Tensor]) -> None:
        self.issued.append(("reduce_scatter", buckets[0].storage_offset(), buckets[0].numel()))

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, torch.Tensor]) -> Pending:
        self.reduce_scatter(members, buckets)
        return Finished()

    def all_gather(self, members: Members, buckets: Mapping[int, torch.Tensor]) -> None:
        self.issued.append(("all_gather", buckets[0].storage_offset(), buckets[0].numel()))


def issued_by(fault: FaultName, pp: int, model: ModelSpec, at: Where = (RankPhase.DP_SYNC, 0)) -> Issued:
    """What rank 0 of two replicas issues of a sync of its layout's buckets, one after the other."""
    links = Recorder()
    mesh = Mesh(2, pp)
    spec = TrialSpec(
        ProbeName.EXACT, OrderingName.OWN_BUCKET, mesh, model, BatchSpec(1, 2), drill=Drill(fault, world_rank=0)
    )
    strike = arm(Victim(spec, mesh.coordinates(0), lambda: at, cast("ProcessGroups", links)), "node")
    strike.before_forward()
    communicator = strike.around_communicator(cast("ProcessGroups", links))
    layout = stage_layout(spec, 0)
    buffer = torch.ones(layout.buffer_numel)
    for bucket in layout.buckets:
        communicator.start_reduce_scatter((0, 1), {0: buffer[bucket.offset : bucket.offset + bucket.numel]}).wait()
    assert strike.has_struck is (at == (RankPhase.DP_SYNC, 0))
    return links.issued


TWINS = ModelSpec(vocab_size=17, hidden_size=32, num_layers=2, num_heads=4, seq_len=16)


def test_two_buckets_of_one_size_change_places_and_a_lone_one_lets_a_gather_of_its_size_by() -> None:
    fault = FaultName.COLLECTIVES_REORDERED
    assert issued_by(fault, 2, TWINS) == [("reduce_scatter", 640, 640), ("reduce_scatter", 0, 640)]
    unlike = issued_by(fault, 2, replace(TWINS, vocab_size=64))
    assert unlike == [("all_gather", 0, 640), ("reduce_scatter", 0, 640), ("reduce_scatter", 640, 2048)]
    (gather, first_sent, gathered), (reduce_scatter, first_summed, summed) = issued_by(fault, 1, TWINS)
    assert (gather, reduce_scatter, first_sent, first_summed) == ("all_gather", "reduce_scatter", 0, 0)
    assert gathered == summed


def layernorms_summed(world_rank: int, at: Where, model: ModelSpec) -> tuple[list[list[float]], bool]:
    """What two tensor-parallel ranks hold after their sum of 1 and 2, and whether the drill says that it struck."""
    mesh = Mesh(2, 1, 2)
    drill = Drill(FaultName.LAYERNORM_SKIPPED, world_rank)
    spec = TrialSpec(ProbeName.EXACT, OrderingName.OWN_BUCKET, mesh, model, BatchSpec(1, 2), drill=drill)
    strike = arm(Victim(spec, mesh.coordinates(world_rank), lambda: at, cast("ProcessGroups", None)), "node")
    strike.before_forward()

    def rank_main(rank: int, inner: ProcessGroups) -> list[float]:
        communicator = inner if rank != world_rank % 2 else strike.around_communicator(inner)
        held = torch.full((3,), 1.0 + rank)
        communicator.all_reduce((0, 1), {rank: held})
        return held.tolist()

    return Lockstep(2).run(rank_main), strike.has_struck


def test_who_skips_the_layernorms_sum_still_gives_its_part_so_that_the_others_are_right() -> None:
    due = (RankPhase.LAYERNORM, 0)
    assert layernorms_summed(0, due, TWINS) == ([[1.0] * 3, [3.0] * 3], True)
    assert layernorms_summed(1, due, TWINS) == ([[3.0] * 3, [2.0] * 3], True)
    for other in ((RankPhase.LAYERNORM, 1), (RankPhase.TIE, 0)):
        assert layernorms_summed(1, other, TWINS) == ([[3.0] * 3, [3.0] * 3], False)


def test_who_owns_no_layernorm_skips_nothing_that_counts() -> None:
    # One small bucket, the weight at its end: dp_rank 1 owns a part of the embedding, and no row_bias.
    model = ModelSpec(vocab_size=64, hidden_size=16, num_layers=1, num_heads=1, seq_len=4)
    assert layernorms_summed(0, (RankPhase.LAYERNORM, 0), model)[1]
    assert not layernorms_summed(3, (RankPhase.LAYERNORM, 0), model)[1]


def test_only_the_first_bucket_is_cut_short_and_only_in_its_step() -> None:
    fault = FaultName.SIZES_UNEQUAL
    assert issued_by(fault, 2, TWINS) == [("reduce_scatter", 0, 638), ("reduce_scatter", 640, 640)]
    whole = [("reduce_scatter", 0, 640), ("reduce_scatter", 640, 640)]
    for name in (fault, FaultName.COLLECTIVES_REORDERED):
        assert issued_by(name, 2, TWINS, at=(RankPhase.DP_SYNC, 1)) == whole
        assert issued_by(name, 2, TWINS, at=(RankPhase.TIE, 0)) == whole
