"""Judging, on virtual ranks, every parameter of every stage as the live step does (`workers.checks.parameters`).

No replays: what is judged is the sync. Must not synchronise anything.

Shape legend: N = elements of the judged parameters, flat, one after another; D = dp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.checks.parameters import Sync, final_sync, parameters_row, scattered_sync, stage_expectation
from workers.contract import ParametersRow, Phase, TrialSpec
from workers.divergence import judge_pieces
from workers.exchange import Piece, cut_pieces
from workers.grad_buffer import GradBuffer, select
from workers.intervals import Interval, Intervals, lay_end_to_end
from workers.mesh import Members, dp_members
from workers.orderings import ordering_of
from workers.parameters import chunk_prefixes, tied_parameter_name

RankBuffers = Mapping[int, Sequence[GradBuffer]]


@dataclass(frozen=True, slots=True)
class _Judged:
    """One parameter of a pipeline rank."""

    label: str
    chunk: int
    name: str
    numel: int


def judge_parameters(
    spec: TrialSpec, buffers: RankBuffers, local: Sequence[Mapping[str, Tensor]], scattered: Mapping[int, Tensor]
) -> Iterator[tuple[int, ParametersRow]]:
    """(world_rank, row) of every rank. `local` is every replica's own gradient [D, numel] by stage and parameter.

    `scattered` is each holder's tied gradient as the data-parallel sync left it; empty where that is not judged.
    """
    for pp_rank in range(spec.mesh.pp):
        members = dp_members(spec.mesh, pp_rank)
        stages = spec.mesh.stages(pp_rank)
        judged = list(_parameters(spec, stages, local))
        inner = [each for each in judged if each.name != tied_parameter_name(spec.mesh.num_stages, stages[each.chunk])]
        if inner:
            local_DN = torch.cat([local[stages[each.chunk]][each.name] for each in inner], dim=1)
            held = {rank: torch.cat([buffers[rank][each.chunk].grad(each.name) for each in inner]) for rank in members}
            sync = final_sync(spec, local_DN.shape[1])
            yield from _judge(spec, Phase.FINAL, sync, inner, members, buffers, local_DN, held)
        tied = [each for each in judged if each not in inner]
        if tied and members[0] in scattered:
            sync = scattered_sync(spec, pp_rank, tied[0].numel)
            local_DN = local[stages[tied[0].chunk]][tied[0].name]
            yield from _judge(spec, Phase.SCATTERED, sync, tied, members, buffers, local_DN, scattered)


def _parameters(spec: TrialSpec, stages: Sequence[int], local: Sequence[Mapping[str, Tensor]]) -> Iterator[_Judged]:
    for chunk, (stage, prefix) in enumerate(zip(stages, chunk_prefixes(len(stages)), strict=True)):
        for name, gradient_DP in local[stage].items():
            yield _Judged(prefix + name, chunk, name, gradient_DP.shape[1])


def _judge(
    spec: TrialSpec,
    phase: Phase,
    sync: Sync,
    judged: Sequence[_Judged],
    members: Members,
    buffers: RankBuffers,
    local_DN: Tensor,
    held: Mapping[int, Tensor],
) -> Iterator[tuple[int, ParametersRow]]:
    owned = tuple(_owned(spec, judged, buffers[members[0]], dp_rank) for dp_rank in range(len(members)))
    expectation = stage_expectation(spec.probe, members, sync, owned)
    sizes = [(each.label, each.numel) for each in judged]
    for dp_rank, world_rank in enumerate(members):
        pieces = (_piece(wanted, local_DN, held[world_rank]) for wanted in cut_pieces(owned[dp_rank], len(members)))
        yield (
            world_rank,
            parameters_row(phase, sizes, judge_pieces(expectation, world_rank, pieces, held[world_rank], None)),
        )


def _owned(spec: TrialSpec, judged: Sequence[_Judged], chunks: Sequence[GradBuffer], dp_rank: int) -> Intervals:
    if not ordering_of(spec).distributed_optimizer:
        return (Interval(0, sum(each.numel for each in judged)),)
    return lay_end_to_end(
        (each.numel, chunks[each.chunk].layout.owned_intervals(each.name, dp_rank)) for each in judged
    )


def _piece(wanted: Intervals, local_DN: Tensor, held_N: Tensor) -> Piece:
    synced_n = select(held_N, wanted)
    return Piece(
        intervals=wanted,
        synced_n=synced_n,
        local_Cn=torch.cat([local_DN[:, part.start : part.stop] for part in wanted], dim=1),
        replay_Cn=None,
        floor_C=None,
        other_end_n=None,
        weight_n=synced_n[:0],
        other_weight_n=None,
        late_Cn=None,
    )
