"""What every rank reports when nothing is wrong, and the least change of it: for rules that judge reports."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from workers.contract import (
    REFERENCE_STACK,
    Coordinates,
    Device,
    DivergenceRow,
    End,
    Mesh,
    NormRow,
    OrderingName,
    ParametersRow,
    Phase,
    ProbeName,
    ReplicaRow,
    Role,
    StackOrigin,
    StackRow,
    StepReport,
    TiedRow,
    TrialSpec,
)
from workers.experiment import ExperimentSpec, trials
from workers.intervals import count, intersect
from workers.orderings import ordering_of
from workers.parameters import stage_parameters, tied_parameter_name
from workers.prediction import ordering_layouts, trial_misowned

BUGGY, FIXED, OWN_BUCKET = OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET
EXACT, GPT = ProbeName.EXACT, ProbeName.GPT


def planned(
    mesh: Mesh = Mesh(),  # noqa: B008
    orderings: tuple[OrderingName, ...] = (BUGGY, FIXED, OWN_BUCKET),
    probes: tuple[ProbeName, ...] = (EXACT, GPT),
    **others: Any,
) -> tuple[TrialSpec, ...]:
    return trials(ExperimentSpec(mesh=mesh, orderings=orderings, probes=probes, **others), Device.CPU)


def healthy(specs: tuple[TrialSpec, ...]) -> list[StepReport]:
    """What every rank reports when each trial does to the element what its layouts predict."""
    return [
        healthy_report(index, spec, step, world_rank)
        for index, spec in enumerate(specs)
        for step in range(spec.steps)
        for world_rank in range(spec.mesh.world_size)
    ]


def healthy_report(index: int, spec: TrialSpec, step: int, world_rank: int) -> StepReport:
    at = spec.mesh.coordinates(world_rank)
    name = tied_parameter_name(spec.mesh.pp, at.pp_rank)
    end = None if name is None else End.WTE if at.pp_rank == 0 else End.LM_HEAD
    row = None if end is None else healthy_row(spec, end, at.dp_rank)
    tied = TiedRow(row.owned_elements, 0, 0.0, 0, 0.0, row.owned_elements) if row and end is End.WTE else None
    return StepReport(
        trial_index=index,
        probe=spec.probe,
        ordering=spec.ordering,
        repeat=spec.repeat,
        step=step,
        world_rank=world_rank,
        dp_rank=at.dp_rank,
        pp_rank=at.pp_rank,
        tp_rank=at.tp_rank,
        divergence=(row,) if row else (),
        trace=(),
        tied=tied if spec.mesh.pp > 1 else None,
        replica=ReplicaRow(f"initial {at.pp_rank}", f"stage {at.pp_rank} step {step}"),
        loss=4.2 if at.pp_rank == spec.mesh.pp - 1 else None,
        seconds={},
        grad_norm=healthy_norm(spec, step, at.pp_rank) if spec.stack == REFERENCE_STACK else None,
        parameters=healthy_parameters(spec, at) if spec.stack == REFERENCE_STACK else (),
        stack=None if spec.stack == REFERENCE_STACK else healthy_stack(spec, end),
    )


def healthy_stack(spec: TrialSpec, end: End | None) -> StackRow:
    """All replicas own all of 5,000 elements, of which the tied weight's are judged apart."""
    tied = spec.model.vocab_size * spec.model.hidden_size if end else 0
    updated = 5000 if spec.probe is EXACT else 0
    return StackRow(StackOrigin("acme", "acme_stack:build", "acme-stack", "1.2"), 5000, 5000 - tied, updated, ())


def healthy_norm(spec: TrialSpec, step: int, pp_rank: int) -> NormRow:
    known = pp_rank == 0 and (spec.probe is EXACT or step == 0)
    right = ordering_of(spec).role is Role.SUBJECT
    return NormRow(2.5 if right else 2.25, 2.5 if known else None, 1e-9 if known else None)


def healthy_row(spec: TrialSpec, end: End, dp_rank: int) -> DivergenceRow:
    ordering = ordering_of(spec)
    layout = ordering_layouts(spec)[end is End.LM_HEAD]
    name = tied_parameter_name(spec.mesh.pp, 0 if end is End.WTE else spec.mesh.pp - 1)
    owned = layout.owned_intervals(name or "", dp_rank)
    wrong = count(intersect(owned, trial_misowned(spec)))
    whole = spec.model.vocab_size * spec.model.hidden_size
    return DivergenceRow(
        end=end,
        owned_elements=count(owned) if ordering.distributed_optimizer else whole,
        diverged_elements=wrong,
        predicted_elements=wrong,
        missed_elements=0,
        unexpected_elements=0,
        nonfinite_elements=0,
        first_diverged=0 if wrong else None,
        last_diverged=wrong - 1 if wrong else None,
        max_abs_error=0.05 if wrong else 0.0,
        relative_l2_error=0.1 if wrong else 0.0,
        max_error_over_bound=inf if wrong else 0.0,
        ratio_to_expected=0.7 if wrong else 1.0,
        reference_max_abs_error=0.0 if spec.probe is EXACT else 7.5e-9,
        reference_exceeded_elements=0,
        min_detectable_share=0.0,
        sum=1.0,
        l2=1.0,
        digest="d",
    )


Change = Callable[[StepReport], StepReport]


def changed(reports: list[StepReport], where: Callable[[StepReport], bool], change: Change) -> list[StepReport]:
    """The same reports with the first one that `where` picks changed."""
    index = next(i for i, report in enumerate(reports) if where(report))
    return [*reports[:index], change(reports[index]), *reports[index + 1 :]]


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
    rows = [healthy_parameters_row(Phase.FINAL, inner, at.dp_rank)] if inner else []
    if mesh.pp > 1 and tied and ordering_of(spec).ties_after_sync:
        rows.append(healthy_parameters_row(Phase.SCATTERED, tied, at.dp_rank))
    return tuple(rows)


def healthy_parameters_row(phase: Phase, num_elements: int, dp_rank: int) -> ParametersRow:
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
