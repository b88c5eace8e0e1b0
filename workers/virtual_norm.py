"""The global gradient norm of a mesh that lives in one process, by the rules of `workers.grad_norm`.

Its reference is the norm of the sum of all replicas' own gradients, which that process computed one by one: nothing is
replayed a second time. Must not synchronise anything.

Shape legend: D = dp ranks; C = contributors to the tied weight, in the order of `workers.mesh.ends_members`; P = its
elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workers.contract import NormRow, ProbeName, TrialSpec
from workers.grad_buffer import GradBuffer, select
from workers.grad_norm import NormReference, sum_of_squares, uncounted_parameters
from workers.grad_sync import scale_of
from workers.mesh import pp_members
from workers.parameters import tied_parameter_name


def sum_replicas(spec: TrialSpec, stages: Sequence[Mapping[str, Tensor]], tied_CP: Tensor) -> NormReference:
    """What the norm should be, from local gradients: float32 [D, numel] by stage and name, and the tied ends as signed.

    The floor is zero: these are the very gradients that are synchronised.
    """
    num_stages, dp = spec.mesh.num_stages, spec.mesh.dp
    rest = [
        gradient_DN
        for stage, gradients in enumerate(stages)
        for name, gradient_DN in gradients.items()
        if name != tied_parameter_name(num_stages, stage)
    ]
    ends_D = _norms(tied_CP).view(-1, dp).sum(dim=0)
    rest_D = torch.stack([_norms(gradient_DN) for gradient_DN in rest]).norm(dim=0) if rest else torch.zeros(dp)
    summed = [tensor.sum(dim=0, dtype=torch.float64) for tensor in (tied_CP, *rest)]
    return NormReference(
        value=math.sqrt(math.fsum(float(sum_of_squares(total_N)) for total_N in summed)),
        contributions=float(torch.hypot(ends_D, rest_D.double()).sum()),
        floor=0.0,
        num_elements=sum(total_N.numel() for total_N in summed),
        exact=spec.probe is ProbeName.EXACT,
    )


def measure_norms(
    spec: TrialSpec, buffers: Mapping[int, Sequence[GradBuffer]], sharded: bool, reference: NormReference
) -> list[NormRow]:
    """Every rank's norm of its synchronised gradients, by world rank; the first stage's beside what it should be."""
    mesh = spec.mesh
    squares = [_owned_squares(spec, world_rank, buffers[world_rank], sharded) for world_rank in range(mesh.world_size)]
    world = math.fsum(squares)
    rows = []
    for world_rank in range(mesh.world_size):
        at = mesh.coordinates(world_rank)
        total = world if sharded else math.fsum(squares[member] for member in pp_members(mesh, at.dp_rank))
        row = reference.row(math.sqrt(total), mesh, scale_of(spec))
        rows.append(row if at.pp_rank == 0 else NormRow(row.value, None, None))
    return rows


def _owned_squares(spec: TrialSpec, world_rank: int, chunks: Sequence[GradBuffer], sharded: bool) -> float:
    dp_rank = spec.mesh.coordinates(world_rank).dp_rank
    squares = []
    for buffer in chunks:
        names = {placed.name for placed in buffer.layout.params} - uncounted_parameters(spec.mesh)
        for name in sorted(names):
            grad_N = buffer.grad(name)
            owned_n = select(grad_N, buffer.layout.owned_intervals(name, dp_rank)) if sharded else grad_N
            squares.append(float(sum_of_squares(owned_n)))
    return math.fsum(squares)


def _norms(values_DN: Tensor) -> Tensor:
    """By row, float64."""
    norms_D: Tensor = torch.linalg.vector_norm(values_DN, dim=1, dtype=torch.float64)
    return norms_D
