"""Every kind of wrong sum, made by a fault in the sync, tells its story: kind, contributors, factor, elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judged_mesh import JudgedMesh

from workers import exchange
from workers.contract import Deviation, DeviationKind, Mesh, OrderingName, ProbeName
from workers.deviation import MAX_NAMED

EXACT, GPT = ProbeName.EXACT, ProbeName.GPT
OWN_BUCKET, FIXED, BUGGY, ALL_REDUCE = (
    OrderingName.OWN_BUCKET,
    OrderingName.FIXED,
    OrderingName.BUGGY,
    OrderingName.ALL_REDUCE,
)
PROBES = [EXACT, GPT]


def stories(world: JudgedMesh) -> dict[int, tuple[Deviation, ...]]:
    judged = world.judge()
    return {rank: j.divergence.deviations for rank, j in judged.items() if j.divergence.deviations}


def named(deviation: Deviation) -> list[int]:
    return [contributor.world_rank for contributor in deviation.contributors]


def test_a_right_sum_has_no_story() -> None:
    for probe in PROBES:
        for ordering in (OWN_BUCKET, FIXED, ALL_REDUCE):
            assert stories(JudgedMesh(ordering, Mesh(3, 2), probe)) == {}


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("dp", [2, 3, 5])
def test_the_buggy_ordering_lacks_the_other_replicas_share_of_the_other_end(dp: int, probe: ProbeName) -> None:
    world = JudgedMesh(BUGGY, Mesh(dp, 2), probe)
    told = stories(world)
    assert told
    for rank, (deviation,) in told.items():
        at = world.mesh.coordinates(rank)
        lacking = [r for r in world.holders if r // dp != at.pp_rank and r % dp != at.dp_rank]
        wrong = world.misowned() & set(world.owned(rank))
        assert (deviation.kind, deviation.factor) == (DeviationKind.DROPPED, 0.0)
        assert named(deviation) == lacking[:MAX_NAMED]
        assert deviation.num_contributors == len(lacking)
        assert (deviation.first_element, deviation.num_elements) == (min(wrong), len(wrong))


@pytest.mark.parametrize(("times", "kind"), [(0.0, DeviationKind.DROPPED), (2.0, DeviationKind.DOUBLED)])
@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("probe", PROBES)
def test_any_contributor_s_lost_or_doubled_share_is_named(
    probe: ProbeName, size: int, times: float, kind: DeviationKind
) -> None:
    for guilty in range(6):
        world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), probe)
        # Owned by one dp rank at both ends.
        elements = world.owned(1)[7 : 7 + size]
        world.held(guilty)[elements] *= times
        told = stories(world)
        assert set(told) == {1, 4}
        for (deviation,) in told.values():
            assert (deviation.kind, named(deviation), deviation.factor) == (kind, [guilty], times)
            assert (deviation.first_element, deviation.num_elements) == (elements[0], size)


@pytest.mark.parametrize("probe", PROBES)
def test_half_a_share_is_a_scale_of_that_contributor(probe: ProbeName) -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(2, 2), probe)
    world.held(3).mul_(0.5)
    told = stories(world)
    assert set(told) == {0, 1, 2, 3}
    for (deviation,) in told.values():
        assert (deviation.kind, named(deviation), deviation.factor) == (DeviationKind.SCALE, [3], 0.5)


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.0, 1 / 3, 6.0])
@pytest.mark.parametrize("probe", PROBES)
def test_a_wrong_divisor_is_a_scale_of_the_sum(probe: ProbeName, factor: float) -> None:
    world = JudgedMesh(FIXED, Mesh(3, 2), probe)
    for rank in world.holders:
        world.held(rank).mul_(factor)
    told = stories(world)
    assert set(told) == {rank for rank in world.holders if world.owned(rank)}
    for rank, (deviation,) in told.items():
        assert (deviation.kind, deviation.contributors) == (DeviationKind.SCALE, ())
        assert deviation.factor == factor
        assert deviation.num_elements == len(world.owned(rank))


@pytest.mark.parametrize("ordering", [OWN_BUCKET, FIXED])
def test_another_owner_s_sum_is_named(ordering: OrderingName) -> None:
    world = JudgedMesh(ordering, Mesh(3, 2), EXACT)
    world.synchronise()
    whole = torch.empty_like(world.local[0])
    for rank in world.holders[:3]:
        whole[world.owned(rank)] = world.synced[rank][world.owned(rank)]
    one, other = world.owned(1), world.owned(2)
    size = min(len(one), len(other))
    world.synced[1][one[:size]] = whole[other[:size]]
    (deviation,) = stories(world)[1]
    assert (deviation.kind, named(deviation)) == (DeviationKind.WRONG_OWNER, [2])
    assert deviation.num_elements == sum(whole[one[:size]] != whole[other[:size]])


@pytest.mark.parametrize("probe", PROBES)
def test_a_skipped_scatter_leaves_ones_own_gradient(probe: ProbeName) -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), probe)
    world.synchronise()
    world.synced[4].copy_(world.local[4] * world.expectation.prescale.factor)
    (deviation,) = stories(world)[4]
    assert (deviation.kind, named(deviation)) == (DeviationKind.DROPPED, [0, 1, 2, 3, 5])
    assert deviation.num_elements == len(world.owned(4))


@pytest.mark.parametrize("bit", [9, 16, 22, 25, 30])
@pytest.mark.parametrize("probe", PROBES)
def test_a_flipped_bit_accuses_nobody(probe: ProbeName, bit: int) -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), probe)
    world.synchronise()
    element = world.owned(2)[33]
    world.synced[2][element] = (world.synced[2][element].view(torch.int32) ^ (1 << bit)).view(torch.float32)
    (deviation,) = stories(world)[2]
    assert (deviation.kind, deviation.contributors) == (DeviationKind.CORRUPT, ())
    assert (deviation.first_element, deviation.num_elements) == (element, 1)


@pytest.mark.parametrize("probe", PROBES)
def test_a_gradient_that_was_wrong_before_the_sync_is_told_apart(probe: ProbeName) -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), probe, floor=1e-6 if probe is GPT else 0.0)
    elements = world.owned(0)[5:9]
    for values in (world.held(4), world.local[4]):
        values[elements] += 256
    told = stories(world)
    assert set(told) == {0, 3}
    for (deviation,) in told.values():
        assert (deviation.kind, named(deviation)) == (DeviationKind.LOCAL, [4])
        assert (deviation.first_element, deviation.num_elements) == (elements[0], 4)


def test_two_faults_in_one_shard_are_two_stories() -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), EXACT)
    owned = world.owned(1)
    world.held(0)[owned[10:40]] *= 0
    world.held(5)[owned[100:150]] *= 2
    told = {(d.kind, *named(d), d.first_element, d.num_elements) for d in stories(world)[1]}
    assert told == {
        (DeviationKind.DROPPED, 0, owned[10], 30),
        (DeviationKind.DOUBLED, 5, owned[100], 50),
    }


@pytest.mark.parametrize("probe", PROBES)
def test_small_pieces_tell_the_same_story(probe: ProbeName, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(elements: int) -> dict[int, tuple[Deviation, ...]]:
        monkeypatch.setattr(exchange, "PIECE_ELEMENTS", elements)
        return stories(JudgedMesh(BUGGY, Mesh(3, 2), probe))

    assert one(97) == one(1 << 18)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("probe", PROBES)
def test_a_value_that_is_not_finite_is_corrupt(probe: ProbeName, bad: float) -> None:
    world = JudgedMesh(ALL_REDUCE, Mesh(2, 2), probe)
    world.synchronise()
    world.synced[3][17] = bad
    (deviation,) = stories(world)[3]
    assert (deviation.kind, deviation.first_element, deviation.num_elements) == (DeviationKind.CORRUPT, 17, 1)


@pytest.mark.parametrize("guilty", range(6))
def test_without_room_for_a_code_a_share_is_named_by_its_size(guilty: int) -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), EXACT)
    for rank in world.holders:
        for values in (world.held(rank), world.local[rank], world.replayed[rank]):
            values.div_(256).floor_()
    world.expectation = replace(world.expectation, code=None)
    world.held(guilty)[world.owned(1)[:60]] = 0
    (deviation,) = stories(world)[1]
    assert (deviation.kind, named(deviation), deviation.num_elements) == (DeviationKind.DROPPED, [guilty], 60)


def test_without_a_code_equal_shares_accuse_nobody() -> None:
    world = JudgedMesh(OWN_BUCKET, Mesh(3, 2), EXACT)
    for rank in world.holders:
        for values in (world.held(rank), world.local[rank], world.replayed[rank]):
            values.fill_(3)
    world.expectation = replace(world.expectation, code=None)
    world.held(2)[world.owned(1)[:60]] = 0
    (deviation,) = stories(world)[1]
    assert deviation.contributors == ()
