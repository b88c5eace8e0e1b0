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


def dp_members(mesh: Mesh, pp_rank: int, tp_rank: int = 0) -> Members:
    """The data-parallel replicas of one stage's part of the model, by dp_rank."""
    return tuple(mesh.world_rank(dp_rank, pp_rank, tp_rank) for dp_rank in range(mesh.dp))


def pp_members(mesh: Mesh, dp_rank: int, tp_rank: int = 0) -> Members:
    """The stages of one pipeline, by pp_rank."""
    return tuple(mesh.world_rank(dp_rank, pp_rank, tp_rank) for pp_rank in range(mesh.pp))


def tp_members(mesh: Mesh, dp_rank: int, pp_rank: int) -> Members:
    """The tensor-parallel ranks of one stage of one replica, by tp_rank."""
    return tuple(mesh.world_rank(dp_rank, pp_rank, tp_rank) for tp_rank in range(mesh.tp))


def stage_members(mesh: Mesh, pp_rank: int) -> Members:
    """Every rank of one pipeline rank, by dp_rank and then tp_rank: all that add to a parameter replicated over tp."""
    return tuple(world_rank for dp_rank in range(mesh.dp) for world_rank in tp_members(mesh, dp_rank, pp_rank))


def model_members(mesh: Mesh, dp_rank: int) -> Members:
    """Every rank of one replica, by pp_rank and then tp_rank: together they hold the whole model."""
    return tuple(world_rank for pp_rank in range(mesh.pp) for world_rank in tp_members(mesh, dp_rank, pp_rank))


def tie_members(mesh: Mesh, dp_rank: int, tp_rank: int = 0) -> Members:
    """The two holders of one tp shard of the tied weight in one pipeline; a single rank where pp is 1."""
    ends = {mesh.world_rank(dp_rank, 0, tp_rank), mesh.world_rank(dp_rank, mesh.pp - 1, tp_rank)}
    return tuple(sorted(ends))


def ends_members(mesh: Mesh, tp_rank: int = 0) -> Members:
    """Every holder of one tp shard of the tied weight: the first stage by dp_rank, then (pp > 1) the last likewise."""
    last = dp_members(mesh, mesh.pp - 1, tp_rank) if mesh.pp > 1 else ()
    return dp_members(mesh, 0, tp_rank) + last


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
    dp_ranks, pp_ranks, tp_ranks = range(mesh.dp), range(mesh.pp), range(mesh.tp)
    groups = [dp_members(mesh, pp_rank, tp_rank) for pp_rank in pp_ranks for tp_rank in tp_ranks]
    groups += [pp_members(mesh, dp_rank, tp_rank) for dp_rank in dp_ranks for tp_rank in tp_ranks]
    groups += [tie_members(mesh, dp_rank, tp_rank) for dp_rank in dp_ranks for tp_rank in tp_ranks]
    groups += [ends_members(mesh, tp_rank) for tp_rank in tp_ranks]
    groups += [model_members(mesh, dp_rank) for dp_rank in dp_ranks]
    groups.append(world_members(mesh))
    if mesh.tp > 1:
        groups += [tp_members(mesh, dp_rank, pp_rank) for pp_rank in pp_ranks for dp_rank in dp_ranks]
        groups += [stage_members(mesh, pp_rank) for pp_rank in pp_ranks]
    return iter(dict.fromkeys(groups))


class MeshGroups:
    """The process groups of one mesh over the default group. Building one is collective over all of its ranks."""

    def __init__(self, mesh: Mesh, world_rank: int, timeout_s: float) -> None:
        self._mesh = mesh
        self._groups: dict[Members, dist.ProcessGroup] = {}
        for members in all_members(mesh):
            # Also groups of one rank: the pipeline needs a real group even where it has a single stage.
            group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s))
            if world_rank in members:
                self._groups[members] = group

    def __getitem__(self, members: Members) -> dist.ProcessGroup:
        """The group of these members; KeyError where this rank is not one of them."""
        return self._groups[members]

    def are_replicas(self, members: Members) -> bool:
        """Whether all members hold the same stages."""
        return len({self._mesh.coordinates(world_rank).pp_rank for world_rank in members}) == 1

    def close(self) -> None:
        """Free the groups (local; every member does it for itself)."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
