"""Trials of every probe and ordering, and what their measured rows must say: shared by tests on CPU and on GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workers.contract import (
    Device,
    DivergenceRow,
    Dtype,
    Mesh,
    Normalization,
    OrderingName,
    Phase,
    ProbeName,
    Role,
    StepReport,
    TrialSpec,
)
from workers.errors import LayoutAssertionError
from workers.evidence import astray_ranks
from workers.experiment import ExperimentSpec, resolve, trials
from workers.intervals import count
from workers.orderings import ORDERINGS, ordering_of
from workers.parameters import tied_elements
from workers.prediction import layernorm_elements, layernorm_exposed, ordering_layouts, trial_early, trial_exposed


def every_trial(mesh: Mesh, steps: int, device: Device = Device.CPU, **changes: object) -> tuple[TrialSpec, ...]:
    by_tokens = changes.get("normalization") is Normalization.NUM_TOKENS and not changes.get("overlap")
    layernorms = {name for name, ordering in ORDERINGS.items() if ordering.mistakes_layernorms}
    out_of_place = (set() if by_tokens else {OrderingName.MEAN_OF_MEANS}) | (layernorms if mesh.tp == 1 else set())
    spec = ExperimentSpec(
        mesh=mesh,
        probes=tuple(ProbeName),
        orderings=tuple(name for name in OrderingName if name not in out_of_place),
        steps=steps,
        **changes,  # type: ignore[arg-type]
    )
    return trials(resolve(spec), device)


def runs(spec: TrialSpec) -> bool:
    """Some versions stop at some sizes with an assertion of their own; such a trial is refused before a gang forms."""
    try:
        ordering_layouts(spec)
    except LayoutAssertionError:
        return False
    return True


def rows(reports: Sequence[Sequence[StepReport]], trial_index: int) -> Iterator[tuple[StepReport, DivergenceRow]]:
    for rank_reports in reports:
        for report in rank_reports:
            if report.trial_index == trial_index:
                for row in report.divergence:
                    yield report, row


def assert_as_predicted(spec: TrialSpec, reports: Sequence[Sequence[StepReport]], index: int, steps: int) -> None:
    mesh, found = spec.mesh, list(rows(reports, index))
    num_ends = 2 if mesh.pp > 1 else 1
    num_copies = 1 if ordering_of(spec).distributed_optimizer else mesh.dp
    num_layernorms = layernorm_elements(spec)
    ordering = ordering_of(spec)
    num_elements = mesh.tp * tied_elements(spec.model, mesh.tp) * num_ends + num_layernorms
    assert sum(row.owned_elements for _, row in found) == num_elements * steps * num_copies
    assert sum(row.missed_elements + row.unexpected_elements for _, row in found) == 0
    assert sum(row.reference_exceeded_elements for _, row in found) == 0
    diverged = sum(row.diverged_elements for _, row in found)
    exposed = (count(trial_exposed(spec)) * num_ends * mesh.tp + layernorm_exposed(spec)) * steps
    predicted = sum(row.predicted_elements for _, row in found)
    if spec.probe is ProbeName.GPT and spec.grad_reduce_dtype is Dtype.BFLOAT16:
        # Errors near the bound need not show.
        assert 0 <= diverged - predicted <= exposed // 10
    else:
        assert diverged == predicted
    assert diverged <= exposed
    if ordering.role is Role.SUBJECT:
        assert diverged == 0
    elif spec.probe is ProbeName.EXACT and _misses_terms_only(spec):
        # Terms cannot cancel and every element is touched, so the wrong set is the misowned set.
        assert diverged == exposed
    assert_every_parameter_right(spec, reports, index, steps)


def _misses_terms_only(spec: TrialSpec) -> bool:
    by_microbatches = spec.normalization is Normalization.MICROBATCHES
    every_id = spec.batch.num_microbatches * spec.batch.micro_batch_size * spec.model.seq_len >= spec.model.vocab_size
    return every_id and by_microbatches and not spec.average_in_collective and not trial_early(spec)


def assert_every_parameter_right(
    spec: TrialSpec, reports: Sequence[Sequence[StepReport]], index: int, steps: int
) -> None:
    """No ordering gets a parameter other than the tied weight wrong, nor the tied weight before the ends are added."""
    mesh = spec.mesh
    ordering = ordering_of(spec)
    found = [report for ranks in reports for report in ranks if report.trial_index == index]
    assert not any(astray_ranks(row) for report in found for row in report.divergence)
    for pp_rank in range(mesh.pp):
        of_stage = [row for report in found if report.pp_rank == pp_rank for row in report.parameters]
        phases = {row.phase: row.total_elements for row in of_stage}
        holds_an_end = mesh.pp > 1 and pp_rank in (0, mesh.pp - 1)
        assert (Phase.SCATTERED in phases) == (mesh.tp > 1 or (holds_an_end and ordering.ties_after_sync))
        for phase, total in phases.items():
            owned = sum(row.owned_elements for row in of_stage if row.phase is phase)
            assert owned == total * mesh.tp * steps * (1 if ordering.distributed_optimizer else mesh.dp) > 0
    for report in found:
        for row in report.parameters:
            wrong = (row.unexpected_elements, row.nonfinite_elements, row.reference_exceeded_elements)
            assert wrong == (0, 0, 0), (spec, report.world_rank, row)
            assert (row.first_unexpected, row.deviating_ranks) == (None, ())
            replayed = row.phase is Phase.FINAL and (spec.probe is ProbeName.EXACT or report.step == 0)
            assert (row.reference_max_abs_error is not None) == (replayed and row.owned_elements > 0)
