"""What a self-test holds against an error, and that what it injects is there to be injected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.contract import Mesh, RankFailure, RankPhase
from workers.faults import FAULTS, FaultName
from workers.local_gang import Outcome
from workers.prediction import stage_layout
from workers.selftest import Exercise, conclude, expected_attribution, place_nodes

MESH = Mesh(2, 2)
NODES = place_nodes(MESH)
EXERCISE = Exercise(FAULTS[FaultName.SIZES_UNEQUAL], 1)
NAMED = "world_rank 1 is about to enter another collective than its group: shape differs"
CAUSE = RankFailure(1, NODES[1], RankPhase.DP_SYNC, 0, 0, "collective_mismatch", NAMED, collateral=False)
VICTIM = replace(CAUSE, world_rank=0, code="collective_failed", collateral=True)


def mismatches_of(*failures: RankFailure) -> str:
    said = Outcome(failures, absent=(2, 3))
    expected = expected_attribution(EXERCISE, NODES)
    return "; ".join(conclude(EXERCISE, expected, said, EXERCISE.trials(MESH), NODES).mismatches)


def test_an_error_must_be_the_right_one_and_say_who_and_what() -> None:
    assert mismatches_of(VICTIM, CAUSE) == ""
    assert "the error is rank_raised" in mismatches_of(replace(CAUSE, code="rank_raised"))
    assert "shape differs" in mismatches_of(replace(CAUSE, message=NAMED.replace("shape", "order")))
    unsure = NAMED.replace("world_rank 1", "one of the world ranks [0, 1]")
    assert "world_rank 1 is about" in mismatches_of(replace(CAUSE, message=unsure))
    assert "world_rank is 0" in mismatches_of(replace(VICTIM, collateral=False))


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(3, 2), Mesh(4, 4)])
def test_both_ends_have_two_buckets_of_one_size_to_swap(mesh: Mesh) -> None:
    for spec in Exercise(FAULTS[FaultName.COLLECTIVES_REORDERED], 0).trials(mesh):
        for stage in (0, mesh.pp - 1):
            first, second = (bucket.numel for bucket in stage_layout(spec, stage).buckets)
            assert first == second
