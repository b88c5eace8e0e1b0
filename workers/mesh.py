"""Which ranks talk to each other, and the process groups through which they do.

The member functions are pure; only `MeshGroups` touches torch.distributed. Nothing here knows about gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from workers.contract import End, Mesh

Members = tuple[int, ...]
"""World ranks of one group, in group order."""


def dp_members(mesh: Mesh, pp_rank: int) -> Members:
    """The data-parallel replicas of one stage, by dp_rank."""
    return tuple(mesh.world_rank(dp_rank, pp_rank) for dp_rank in range(mesh.dp))


def pp_members(mesh: Mesh, dp_rank: int) -> Members:
    """The stages of one pipeline, by pp_rank."""
    return tuple(mesh.world_rank(dp_rank, pp_rank) for pp_rank in range(mesh.pp))


def tie_members(mesh: Mesh, dp_rank: int) -> Members:
    """The two holders of the tied weight in one pipeline; a single rank where pp is 1."""
    ends = {mesh.world_rank(dp_rank, 0), mesh.world_rank(dp_rank, mesh.pp - 1)}
    return tuple(sorted(ends))


def ends_members(mesh: Mesh) -> Members:
    """Every holder of the tied weight: the first stage by dp_rank, then (where pp > 1) the last stage by dp_rank."""
    last = dp_members(mesh, mesh.pp - 1) if mesh.pp > 1 else ()
    return dp_members(mesh, 0) + last


def world_members(mesh: Mesh) -> Members:
    """Every rank of the mesh."""
    return tuple(range(mesh.world_size))


def end_of(mesh: Mesh, pp_rank: int) -> End | None:
    """Which copy of the tied weight a stage holds; with pp=1 the one shared weight counts as `wte`."""
    if pp_rank == 0:
        return End.WTE
    return End.LM_HEAD if pp_rank == mesh.pp - 1 else None


def all_members(mesh: Mesh) -> Iterator[Members]:
    """Every group a step uses, each once, in an order that is the same on all ranks."""
    groups = [dp_members(mesh, pp_rank) for pp_rank in range(mesh.pp)]
    groups += [pp_members(mesh, dp_rank) for dp_rank in range(mesh.dp)]
    groups += [tie_members(mesh, dp_rank) for dp_rank in range(mesh.dp)]
    groups += [ends_members(mesh), world_members(mesh)]
    return iter(dict.fromkeys(groups))


class MeshGroups:
    """The process groups of one mesh over the default group. Building one is collective over all of its ranks."""

    def __init__(self, mesh: Mesh, world_rank: int, timeout_s: float) -> None:
        self._groups: dict[Members, dist.ProcessGroup] = {}
        for members in all_members(mesh):
            # Also groups of one rank: the pipeline needs a real group even where it has a single stage.
            group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s))
            if world_rank in members:
                self._groups[members] = group

    def __getitem__(self, members: Members) -> dist.ProcessGroup:
        """The group of these members; KeyError where this rank is not one of them."""
        return self._groups[members]

    def close(self) -> None:
        """Free the groups (local; every member does it for itself)."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
