"""What a self-test holds against an error, and that what it injects is there to be injected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.contract import Mesh, RankFailure, RankPhase
from workers.faults import FAULTS, FaultName
from workers.local_gang import Outcome
from workers.prediction import stage_layout
from workers.selftest import (
    TENSOR_MESH,
    Exercise,
    conclude,
    exercises_elsewhere,
    expected_attribution,
    place_nodes,
)

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


def test_faults_of_tensor_ranks_have_a_mesh_of_their_own_where_the_chosen_one_has_none() -> None:
    faults = [FaultName.STALE_VIEW, FaultName.LAYERNORM_SKIPPED]
    moved = exercises_elsewhere(MESH, faults, range(4))
    assert [(each.title, each.world_rank) for each in moved] == [("layernorm_skipped on 2x1x2", i) for i in range(4)]
    assert [each.world_rank for each in exercises_elsewhere(Mesh(3, 2), faults, [5, 2])] == [2]
    assert [each.world_rank for each in exercises_elsewhere(Mesh(3, 2), faults, [5])] == [0, 1, 2, 3]
    assert exercises_elsewhere(TENSOR_MESH, faults, range(4)) == []
    assert exercises_elsewhere(MESH, [FaultName.STALE_VIEW], range(4)) == []


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(3, 2), Mesh(4, 4), Mesh(2, 2, 2)])
def test_both_ends_have_two_buckets_of_one_size_to_swap(mesh: Mesh) -> None:
    for spec in Exercise(FAULTS[FaultName.COLLECTIVES_REORDERED], 0).trials(mesh):
        for stage in (0, mesh.pp - 1):
            first, second = (bucket.numel for bucket in stage_layout(spec, stage).buckets)
            assert first == second
