"""Who is called slow: a rank that works longer than its peers, never one that waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.checks.stragglers import LEAST_DELAY_S, observe_stragglers
from workers.contract import Mesh, OrderingName, ProbeName, ReplicaRow, StepReport


def reports(own_s: dict[int, float], mesh: Mesh, steps: int = 1, phase: str = "forward_backward") -> list[StepReport]:
    return [report(mesh, world_rank, step, {phase: s}) for step in range(steps) for world_rank, s in own_s.items()]


def report(mesh: Mesh, world_rank: int, step: int, compute_seconds: dict[str, float]) -> StepReport:
    at = mesh.coordinates(world_rank)
    return StepReport(
        trial_index=0,
        probe=ProbeName.GPT,
        ordering=OrderingName.FIXED,
        repeat=0,
        step=step,
        world_rank=world_rank,
        dp_rank=at.dp_rank,
        pp_rank=at.pp_rank,
        tp_rank=0,
        divergence=(),
        trace=(),
        tied=None,
        replica=ReplicaRow("", ""),
        loss=None,
        # Everybody's step took as long as the slowest rank's.
        seconds={"forward_backward": 9.0},
        compute_seconds=compute_seconds,
    )


def named(found: list[StepReport]) -> list[int | None]:
    return [observation.world_rank for observation in observe_stragglers(found)]


@pytest.mark.parametrize("slow", range(6))
def test_the_slow_rank_is_named_and_its_victims_are_not(slow: int) -> None:
    own_s = dict.fromkeys(range(6), 0.05) | {slow: 0.35}
    assert named(reports(own_s, Mesh(3, 2))) == [slow]


def test_of_two_replicas_the_slower_is_named() -> None:
    assert named(reports({0: 0.35, 1: 0.05}, Mesh(2, 1))) == [0]


def test_stages_are_not_compared_with_each_other() -> None:
    """The stage with the embedding may well take ten times as long as another."""
    assert named(reports({0: 1.0, 1: 1.0, 2: 0.1, 3: 0.1}, Mesh(2, 2))) == []


def test_alone_a_rank_has_no_peers() -> None:
    assert named(reports({0: 9.0, 1: 0.1}, Mesh(1, 2))) == []


@pytest.mark.parametrize(
    ("own_s", "expected"),
    [
        (0.05 + LEAST_DELAY_S * 0.99, []),  # under the floor, though three times as long
        (0.05 + LEAST_DELAY_S * 1.01, [1]),
    ],
)
def test_a_short_delay_is_noise(own_s: float, expected: list[int]) -> None:
    assert named(reports({0: 0.05, 1: own_s}, Mesh(2, 1))) == expected


def test_a_long_step_may_vary_by_a_lot() -> None:
    assert named(reports({0: 10.0, 1: 19.9}, Mesh(2, 1))) == []
    assert named(reports({0: 10.0, 1: 20.1}, Mesh(2, 1))) == [1]


def test_one_observation_a_rank_and_phase_with_its_worst_step() -> None:
    mesh = Mesh(3, 1)
    found = [*reports({0: 0.05, 1: 0.35, 2: 0.05}, mesh, steps=3), *reports({0: 0, 1: 0, 2: 0.9}, mesh, 1, "dp_sync")]
    found += reports({0: 0.05, 1: 0.75, 2: 0.05}, mesh, 5)[-3:]
    first, second = observe_stragglers(found)
    assert (first.world_rank, second.world_rank, first.code) == (2, 1, "straggler")
    assert "phase dp_sync in 1 of 4 steps" in first.message
    assert "in 4 of 4 steps: at worst, in trial 0, step 4, it worked for 750 ms" in second.message
    assert "its stage for 50 ms (median)" in second.message


def test_who_reports_no_times_is_not_judged() -> None:
    assert named([replace(one, compute_seconds={}) for one in reports({0: 1, 1: 9}, Mesh(2, 1))]) == []
