"""Rows of a rank's parameters in which nothing is wrong, for reports that tests make up."""

from __future__ import annotations

from workers.contract import Coordinates, ParametersRow, Phase, TrialSpec
from workers.orderings import ordering_of
from workers.parameters import stage_parameters, tied_parameter_name


def healthy_parameters(spec: TrialSpec, at: Coordinates) -> tuple[ParametersRow, ...]:
    """As a rank reports them; dp_rank 0 owns every element of its stage."""
    mesh = spec.mesh
    tied_names = {stage: tied_parameter_name(mesh.num_stages, stage) for stage in mesh.stages(at.pp_rank)}
    sizes = [
        (shape.numel, shape.name == tied_names[stage])
        for stage in mesh.stages(at.pp_rank)
        for shape in stage_parameters(spec.probe, spec.model, mesh, stage)
    ]
    inner = sum(numel for numel, is_tied in sizes if not is_tied)
    tied = sum(numel for numel, is_tied in sizes if is_tied)
    rows = [healthy_row(Phase.FINAL, inner, at.dp_rank)] if inner else []
    if mesh.pp > 1 and tied and ordering_of(spec).ties_after_sync:
        rows.append(healthy_row(Phase.SCATTERED, tied, at.dp_rank))
    return tuple(rows)


def healthy_row(phase: Phase, num_elements: int, dp_rank: int) -> ParametersRow:
    return ParametersRow(
        phase=phase,
        total_elements=num_elements,
        owned_elements=num_elements if dp_rank == 0 else 0,
        unexpected_elements=0,
        nonfinite_elements=0,
        first_unexpected=None,
        last_unexpected=None,
        max_abs_error=0.0,
        max_error_over_bound=0.0,
        min_detectable_share=0.0,
        reference_max_abs_error=0.0 if phase is Phase.FINAL else None,
        reference_exceeded_elements=0,
        deviations=(),
        deviating_ranks=(),
        first_deviating=None,
        last_deviating=None,
    )
