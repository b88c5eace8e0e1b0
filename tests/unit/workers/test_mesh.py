"""Who talks to whom on every small mesh: groups partition the ranks, and all ranks build them in one order."""

from __future__ import annotations

import pytest

from workers.contract import End, Mesh
from workers.mesh import all_members, dp_members, end_of, ends_members, pp_members, tie_members

MESHES = [Mesh(dp, pp) for dp in (1, 2, 3, 4) for pp in (1, 2, 3, 4)]


def test_the_mesh_of_the_design() -> None:
    mesh = Mesh(2, 3)
    assert [dp_members(mesh, pp_rank) for pp_rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [pp_members(mesh, dp_rank) for dp_rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [tie_members(mesh, dp_rank) for dp_rank in range(2)] == [(0, 4), (1, 5)]
    assert ends_members(mesh) == (0, 1, 4, 5)
    assert [end_of(mesh, pp_rank) for pp_rank in range(3)] == [End.WTE, None, End.LM_HEAD]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_dp_and_pp_groups_partition_the_ranks(mesh: Mesh) -> None:
    everyone = list(range(mesh.world_size))
    assert sorted(rank for pp_rank in range(mesh.pp) for rank in dp_members(mesh, pp_rank)) == everyone
    assert sorted(rank for dp_rank in range(mesh.dp) for rank in pp_members(mesh, dp_rank)) == everyone
    for rank in everyone:
        at = mesh.coordinates(rank)
        assert dp_members(mesh, at.pp_rank)[at.dp_rank] == rank
        assert pp_members(mesh, at.dp_rank)[at.pp_rank] == rank


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_holders_of_the_tied_weight(mesh: Mesh) -> None:
    holders = [rank for rank in range(mesh.world_size) if end_of(mesh, mesh.coordinates(rank).pp_rank)]
    assert list(ends_members(mesh)) == holders
    assert all(len(tie_members(mesh, dp_rank)) == (1 if mesh.pp == 1 else 2) for dp_rank in range(mesh.dp))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_group_is_built_once(mesh: Mesh) -> None:
    groups = list(all_members(mesh))
    assert len(set(groups)) == len(groups)
    for dp_rank in range(mesh.dp):
        assert {pp_members(mesh, dp_rank), tie_members(mesh, dp_rank), ends_members(mesh)} <= set(groups)
    for pp_rank in range(mesh.pp):
        assert dp_members(mesh, pp_rank) in groups


def test_ranks_outside_a_mesh_have_no_coordinates() -> None:
    with pytest.raises(IndexError, match="world_rank 4"):
        Mesh(2, 2).coordinates(4)
