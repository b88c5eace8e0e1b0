"""What the self-test calls the groups that it tests."""

from __future__ import annotations

import pytest

from workers.checks.collectives import group_names
from workers.contract import Mesh
from workers.mesh import all_members, dp_members, stage_members, tp_members


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(2, 3), Mesh(3, 1), Mesh(2, 2, 2), Mesh(2, 1, 2), Mesh(1, 2, 4)])
def test_every_group_of_every_rank_has_a_name(mesh: Mesh) -> None:
    for world_rank in range(mesh.world_size):
        names = group_names(mesh, mesh.coordinates(world_rank))
        assert {members for members in all_members(mesh) if world_rank in members} <= set(names)


def test_names_say_what_a_group_is_for_on_every_tensor_rank() -> None:
    mesh = Mesh(2, 2, 2)
    for world_rank in range(mesh.world_size):
        at = mesh.coordinates(world_rank)
        names = group_names(mesh, at)
        assert names[dp_members(mesh, at.pp_rank, at.tp_rank)] == "dp"
        assert names[tp_members(mesh, at.dp_rank, at.pp_rank)] == "tp"
        assert names[stage_members(mesh, at.pp_rank)] == "stage"
