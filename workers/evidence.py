"""What the ranks reported, sorted by probe and ordering and added up: the material of a verdict.

Pure. It drops and names reports that cannot belong to the validation, and says which are missing; it does not judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan

from workers.contract import (
    REFERENCE_STACK,
    DeviationKind,
    DivergenceRow,
    End,
    Fingerprint,
    NormRow,
    OrderingName,
    Phase,
    ProbeName,
    Role,
    StackFinding,
    StackRow,
    StepReport,
    TiedRow,
    TrialOrdering,
    TrialSpec,
    TrialSummary,
)
from workers.intervals import count
from workers.orderings import ordering_of
from workers.parameters import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    is_sequence_parallel,
    stage_parameters,
    tied_elements,
)
from workers.prediction import layernorm_elements, layernorm_exposed, trial_exposed

Place = tuple[int, int, int]
"""(trial_index, step, world_rank): where each report belongs, once."""


@dataclass(frozen=True, slots=True)
class Sifted:
    """Reports by place, and a sentence about each one that fits nowhere."""

    accepted: Mapping[Place, StepReport]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All repeats of one probe under one ordering, with every report that came."""

    specs: Mapping[int, TrialSpec]
    """By trial index; they differ by repeat and seed only."""
    reports: tuple[StepReport, ...]
    missing: tuple[tuple[int, int, int], ...]
    """(repeat, step, world_rank)"""
    is_virtual: bool = False
    """All ranks' gradients come from one process, and nothing was updated."""

    @property
    def spec(self) -> TrialSpec:
        """The first repeat."""
        return next(iter(self.specs.values()))

    @property
    def title(self) -> str:
        """How reasons name it."""
        spec = self.spec
        named = "" if spec.stack == REFERENCE_STACK else f" {spec.stack}"
        return f"{spec.probe.value}/{spec.ordering.value}{named}"

    @property
    def role(self) -> Role:
        """Control or subject."""
        return ordering_of(self.spec).role

    @property
    def num_reports_due(self) -> int:
        """Reports that a complete run yields."""
        return sum(spec.steps * spec.mesh.world_size for spec in self.specs.values())

    @property
    def num_elements(self) -> int:
        """Elements of the tied weight, over all tp ranks."""
        tp = self.spec.mesh.tp
        return tp * tied_elements(self.spec.model, tp)

    @property
    def misowned_elements(self) -> int:
        """Elements that the layouts predict wrong in one step, both ends and all tp ranks together."""
        return 2 * self.spec.mesh.tp * count(trial_exposed(self.spec)) + layernorm_exposed(self.spec)

    def rows(self) -> Iterator[tuple[StepReport, DivergenceRow]]:
        """Every divergence row with the report that it came in."""
        return ((report, row) for report in self.reports for row in report.divergence)

    def ties(self) -> Iterator[TiedRow]:
        """Every comparison of the two ends."""
        return (report.tied for report in self.reports if report.tied is not None)

    def total(self, counter: str) -> int:
        """One of DivergenceRow's counts over all ranks, ends, steps and repeats."""
        return sum(int(getattr(row, counter)) for _, row in self.rows())


def sift(trials: Sequence[TrialSpec], reports: Iterable[StepReport]) -> Sifted:
    """Put each report in its place. One that came twice with the same contents counts once."""
    accepted: dict[Place, StepReport] = {}
    rejected: list[str] = []
    for report in reports:
        place = (report.trial_index, report.step, report.world_rank)
        problem = _misfit(trials, report)
        # By text, since a NaN makes equal reports unequal.
        if problem is None and place in accepted and repr(accepted[place]) != repr(report):
            problem = "came twice with different contents"
        if problem is None:
            accepted.setdefault(place, report)
        else:
            rejected.append(f"The report of trial {place[0]}, step {place[1]}, world_rank {place[2]} {problem}.")
    return Sifted(accepted, tuple(rejected))


def collect(
    trials: Sequence[TrialSpec], accepted: Mapping[Place, StepReport], is_virtual: bool = False
) -> tuple[Evidence, ...]:
    """The evidence of each probe and ordering, in the trials' order."""
    groups: dict[tuple[ProbeName, TrialOrdering], dict[int, TrialSpec]] = defaultdict(dict)
    for index, spec in enumerate(trials):
        groups[spec.probe, spec.ordering][index] = spec
    return tuple(
        Evidence(
            specs=specs,
            reports=tuple(accepted[place] for place in _places(specs) if place in accepted),
            missing=tuple((specs[i].repeat, step, w) for i, step, w in _places(specs) if (i, step, w) not in accepted),
            is_virtual=is_virtual,
        )
        for specs in groups.values()
    )


def summarise(evidence: Evidence, ok: bool) -> TrialSummary:
    """The evidence as one row of a validation's `trials`."""
    references = [row.reference_max_abs_error for _, row in evidence.rows() if row.reference_max_abs_error is not None]
    return TrialSummary(
        probe=evidence.spec.probe,
        ordering=evidence.spec.ordering,
        role=evidence.role,
        misowned_elements=evidence.misowned_elements,
        predicted_diverged_elements=evidence.total("predicted_elements"),
        diverged_elements=evidence.total("diverged_elements"),
        missed_elements=evidence.total("missed_elements"),
        unexpected_elements=evidence.total("unexpected_elements"),
        compared_elements=evidence.total("owned_elements"),
        nonfinite_elements=evidence.total("nonfinite_elements"),
        reference_exceeded_elements=evidence.total("reference_exceeded_elements"),
        tied_unequal_elements=sum(tied.unequal_elements for tied in evidence.ties()),
        tied_exceeded_elements=sum(tied.exceeded_elements for tied in evidence.ties()),
        tied_max_abs=largest(tied.max_abs_difference for tied in evidence.ties()),
        reference_max_abs=largest(references) if references else None,
        max_abs_error=largest(row.max_abs_error for _, row in evidence.rows()),
        weights_max_abs=largest(tied.weights_max_abs_difference for tied in evidence.ties()),
        replicas_agree=not any(disagreements(evidence)),
        grad_norm=next((norm.value for _, norm in reversed(list(norms(evidence)))), None),
        grad_norm_max_error=largest(errors) if (errors := _norm_errors(evidence)) else None,
        missing_reports=evidence.missing,
        ok=ok,
    )


def disagreements(evidence: Evidence) -> Iterator[tuple[StepReport, StepReport]]:
    """Pairs of dp replicas of one stage whose weights, initial or after a step, are not the same bits, and of tp ranks
    whose copies of a weight are not, unless the ordering lets them drift apart.
    """
    first: dict[tuple[int, int, int, int], StepReport] = {}
    copies: dict[tuple[int, int, int], StepReport] = {}
    for report in evidence.reports:
        other = first.setdefault((report.trial_index, report.step, report.pp_rank, report.tp_rank), report)
        copy = copies.setdefault((report.trial_index, report.step, report.pp_rank), report)
        if not _same_weights(other, report):
            yield other, report
        elif copy.replica.copies_digest != report.replica.copies_digest and not _copies_drift(evidence):
            yield copy, report


def _copies_drift(evidence: Evidence) -> bool:
    return evidence.spec.ordering is OrderingName.LAYERNORM_SKIPPED


def _same_weights(one: StepReport, other: StepReport) -> bool:
    return (one.replica.initial_weights_digest, one.replica.weights_digest) == (
        other.replica.initial_weights_digest,
        other.replica.weights_digest,
    )


def astray_ranks(row: DivergenceRow) -> set[int]:
    """World ranks whose own gradient of the tied weight was off, as far as the row lists them."""
    return {
        contributor.world_rank
        for deviation in row.deviations
        if deviation.kind is DeviationKind.LOCAL
        for contributor in deviation.contributors
    }


def deviations(evidence: Evidence) -> Iterator[tuple[StepReport, int]]:
    """World ranks whose own gradients were off before any collective, each with the report that says so."""
    for report in evidence.reports:
        yield from ((report, world_rank) for row in report.divergence for world_rank in astray_ranks(row))
        yield from ((report, world_rank) for row in report.parameters for world_rank in row.deviating_ranks)


def norms(evidence: Evidence) -> Iterator[tuple[StepReport, NormRow]]:
    """Every report of the global gradient norm."""
    return ((report, report.grad_norm) for report in evidence.reports if report.grad_norm is not None)


def norm_disagreements(evidence: Evidence) -> Iterator[tuple[StepReport, StepReport]]:
    """Pairs of ranks that have another global gradient norm after the same step."""
    first: dict[tuple[int, int], tuple[StepReport, NormRow]] = {}
    for report, norm in norms(evidence):
        other, shared = first.setdefault((report.trial_index, report.step), (report, norm))
        # By text, since a NaN on all ranks is agreement; that it is not finite has its own reason.
        if repr(shared.value) != repr(norm.value):
            yield other, report


def norm_breaches(evidence: Evidence) -> Iterator[tuple[StepReport, NormRow]]:
    """Norms further from the reference's than rounding allows."""
    for report, norm in norms(evidence):
        if norm.reference is not None and not abs(norm.value - norm.reference) <= (norm.allowed_error or 0.0):
            yield report, norm


def unjudged_norms(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """(trial_index, step) in which a rank has no norm, or none was compared where a reference is known.

    The reference of gpt is known in the first step only: later weights depend on the run under test. Of a foreign stack
    no norm is taken.
    """
    if evidence.spec.stack != REFERENCE_STACK:
        return
    compared = {(report.trial_index, report.step) for report, norm in norms(evidence) if norm.reference is not None}
    silent = {(report.trial_index, report.step) for report in evidence.reports if report.grad_norm is None}
    for index, step in _steps(evidence.specs):
        if (index, step) in silent or (evidence.spec.is_replayable(step) and (index, step) not in compared):
            yield index, step


def unreplayed(evidence: Evidence) -> Iterator[tuple[StepReport, str]]:
    """Ranks that own elements which should have been held against a single-process run and were not, and of what.

    The tied weight between its two phases has none to be held against. On virtual ranks local gradients of other
    parameters are a single process's own.
    """
    for report in evidence.reports:
        if not evidence.spec.is_replayable(report.step):
            continue
        for row in report.divergence:
            if row.owned_elements and row.reference_max_abs_error is None:
                yield report, row.end.value
        for inner in () if evidence.is_virtual else report.parameters:
            if inner.phase is Phase.FINAL and inner.owned_elements and inner.reference_max_abs_error is None:
                yield report, "the other parameters"


def nonfinite(evidence: Evidence) -> Iterator[tuple[StepReport, str]]:
    """Where something is not finite that must be, and what it is."""
    for report, row in evidence.rows():
        if row.nonfinite_elements:
            yield report, f"{row.nonfinite_elements} gradient elements of {row.end.value}"
        elif not all(map(isfinite, (row.sum, row.l2, row.max_abs_error, row.reference_max_abs_error or 0.0))):
            yield report, f"a statistic of {row.end.value}'s gradient"
    for report in evidence.reports:
        if report.nonfinite_elements:
            yield report, f"a gradient or a weight of any parameter ({report.nonfinite_elements} elements)"
        if report.loss is not None and not isfinite(report.loss):
            yield report, "the loss"
        tied = report.tied
        if tied and not (isfinite(tied.max_abs_difference) and isfinite(tied.weights_max_abs_difference)):
            yield report, "the difference between the two ends"
        if report.grad_norm and not isfinite(report.grad_norm.value):
            yield report, "the global gradient norm"


def uncovered_steps(evidence: Evidence) -> Iterator[tuple[int, int, End]]:
    """(trial_index, step, end) in which fewer elements were compared than there are."""
    compared: dict[tuple[int, int, End], int] = defaultdict(int)
    for report, row in evidence.rows():
        compared[report.trial_index, report.step, row.end] += row.owned_elements
    for index, step in _steps(evidence.specs):
        due = elements_due(evidence.spec).items()
        yield from ((index, step, end) for end, num in due if compared[index, step, end] < num)


def elements_due(spec: TrialSpec) -> dict[End, int]:
    """Elements that a complete step compares of each end, and of layernorms where tensor-parallel ranks sum them."""
    mesh = spec.mesh
    tied = mesh.tp * tied_elements(spec.model, mesh.tp)
    ends = dict.fromkeys((End.WTE, End.LM_HEAD) if mesh.pp > 1 else (End.WTE,), tied)
    return ends | ({End.LAYERNORM: layernorm_elements(spec)} if mesh.tp > 1 else {})


def unjudged_parameters(evidence: Evidence) -> Iterator[tuple[int, int, int, Phase]]:
    """(trial_index, step, pp_rank, phase) in which not every element of a stage's parameters was compared.

    A foreign stack's have an audit of their own (`unaudited_steps`).
    """
    if evidence.spec.stack != REFERENCE_STACK:
        return
    compared: dict[tuple[int, int, int, Phase], int] = defaultdict(int)
    for report in evidence.reports:
        for row in report.parameters:
            compared[report.trial_index, report.step, report.pp_rank, row.phase] += row.owned_elements
    due = dict(_parameters_due(evidence.spec))
    for index, step in _steps(evidence.specs):
        for (pp_rank, phase), num_elements in due.items():
            if compared[index, step, pp_rank, phase] < num_elements:
                yield index, step, pp_rank, phase


def _parameters_due(spec: TrialSpec) -> Iterator[tuple[tuple[int, Phase], int]]:
    """How many elements each judge of a stage's parameters must have compared in a step."""
    mesh, tied = spec.mesh, spec.mesh.tp * tied_elements(spec.model, spec.mesh.tp)
    for pp_rank in range(mesh.pp):
        shapes = [
            shape for stage in mesh.stages(pp_rank) for shape in stage_parameters(spec.probe, spec.model, mesh, stage)
        ]
        # What tensor-parallel ranks sum has in the end a judge of its own.
        inner = [
            shape.numel
            for shape in shapes
            if shape.name not in (WORD_EMBEDDINGS, OUTPUT_LAYER)
            and not (mesh.tp > 1 and is_sequence_parallel(shape.name))
        ]
        yield (pp_rank, Phase.FINAL), mesh.tp * sum(inner)
        summed = [shape.numel for shape in shapes if mesh.tp > 1 and is_sequence_parallel(shape.name)]
        scattered = mesh.tp * sum(summed)
        if mesh.pp > 1 and pp_rank in (0, mesh.pp - 1) and ordering_of(spec).ties_after_sync:
            scattered += tied
        yield (pp_rank, Phase.SCATTERED), scattered


def untied_steps(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """(trial_index, step) in which the two ends were not compared in full; none where there is one end only."""
    compared: dict[tuple[int, int], int] = defaultdict(int)
    for report in evidence.reports:
        compared[report.trial_index, report.step] += report.tied.num_elements if report.tied else 0
    if evidence.spec.mesh.pp > 1:
        yield from (at for at in _steps(evidence.specs) if compared[at] < evidence.num_elements)


def parted_weights(evidence: Evidence) -> Iterator[tuple[StepReport, TiedRow]]:
    """Where the two ends hold other weights after the optimizer although they must hold the same bits.

    Where both ends add in one order (`Ordering.bit_tied`) that is always. Elsewhere Adam forbids a bound: it divides a
    gradient by its own size, so that where rounding decides a sign two right weights part by twice the learning rate.
    There ends are judged only as long as their gradients have been the same bits in this and all steps before. The
    optimizer works element by element, whatever else is in a shard. A foreign stack's need not.
    """
    if evidence.spec.stack != REFERENCE_STACK:
        return
    parted = {index: _first_unequal_step(evidence, index) for index in evidence.specs}
    for report in evidence.reports:
        due = ordering_of(evidence.spec).bit_tied or report.step < parted[report.trial_index]
        # What is not finite has its own reason.
        if due and report.tied is not None and 0 < report.tied.weights_max_abs_difference < inf:
            yield report, report.tied


def _first_unequal_step(evidence: Evidence, trial_index: int) -> int:
    """In which the ends' gradients were not the same bits; the number of steps where they always were."""
    of_trial = (report for report in evidence.reports if report.trial_index == trial_index and report.tied is not None)
    unequal = (report.step for report in of_trial if report.tied and report.tied.unequal_elements)
    return min(unequal, default=evidence.specs[trial_index].steps)


def unweighed_steps(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """(trial_index, step) in which the two ends' weights were not compared in full; none where nothing is updated."""
    compared: dict[tuple[int, int], int] = defaultdict(int)
    for report in evidence.reports:
        compared[report.trial_index, report.step] += report.tied.weights_num_elements if report.tied else 0
    if evidence.spec.mesh.pp > 1 and not evidence.is_virtual:
        yield from (at for at in _steps(evidence.specs) if compared[at] < evidence.num_elements)


def stack_faults(evidence: Evidence) -> Iterator[tuple[StepReport, StackFinding]]:
    """Everything that was found wrong with a foreign stack beyond the tied weight's gradient."""
    for report in evidence.reports:
        if report.stack is not None:
            yield from ((report, finding) for finding in report.stack.findings)


def unaudited_steps(evidence: Evidence) -> Iterator[tuple[int, int, int]]:
    """(trial_index, step, pp_rank) of a foreign stack in which not every parameter of the stages was judged."""
    if evidence.spec.stack == REFERENCE_STACK:
        return
    rows: dict[tuple[int, int, int], list[StackRow]] = defaultdict(list)
    for report in evidence.reports:
        if report.stack is not None:
            rows[report.trial_index, report.step, report.pp_rank].append(report.stack)
    mesh, exact = evidence.spec.mesh, evidence.spec.probe is ProbeName.EXACT
    for index, step in _steps(evidence.specs):
        for pp_rank in range(mesh.pp):
            of_stage = rows[index, step, pp_rank]
            due = max((row.num_elements for row in of_stage), default=0)
            apart = evidence.num_elements if pp_rank in (0, mesh.pp - 1) else 0
            compared = sum(row.gradient_elements for row in of_stage) >= due - apart
            updated = not exact or sum(row.update_elements for row in of_stage) >= due
            if not (due and compared and updated):
                yield index, step, pp_rank


def sign_fingerprints(fingerprints: Iterable[Fingerprint], reports: Iterable[StepReport]) -> tuple[Fingerprint, ...]:
    """Fingerprints with the foreign stack that each rank reports to have loaded: it learns of it after it joined."""
    origins = {report.world_rank: report.stack.origin for report in reports if report.stack is not None}
    return tuple(replace(one, stack=origins.get(one.world_rank)) for one in fingerprints)


def largest(values: Iterable[float]) -> float:
    """The maximum of values >= 0, in which a NaN is never lost; 0.0 of nothing."""
    found = 0.0
    for value in values:
        if isnan(value):
            return value
        found = max(found, value)
    return found


def _norm_errors(evidence: Evidence) -> list[float]:
    return [abs(norm.value - norm.reference) for _, norm in norms(evidence) if norm.reference is not None]


def _misfit(trials: Sequence[TrialSpec], report: StepReport) -> str | None:
    """Why a report cannot belong to these trials."""
    if not 0 <= report.trial_index < len(trials):
        return f"is of none of the {len(trials)} trials"
    spec = trials[report.trial_index]
    if (report.probe, report.ordering, report.repeat) != (spec.probe, spec.ordering, spec.repeat):
        return f"speaks of {report.probe.value}/{report.ordering.value}, repeat {report.repeat}: another trial"
    if not (0 <= report.step < spec.steps and 0 <= report.world_rank < spec.mesh.world_size):
        return f"is outside the trial's {spec.steps} steps of {spec.mesh.world_size} ranks"
    at = spec.mesh.coordinates(report.world_rank)
    if (report.dp_rank, report.pp_rank, report.tp_rank) != (at.dp_rank, at.pp_rank, at.tp_rank):
        return (
            f"claims dp_rank {report.dp_rank}, pp_rank {report.pp_rank}; the mesh has it at {at.dp_rank}, {at.pp_rank}"
        )
    return None


def _steps(specs: Mapping[int, TrialSpec]) -> Iterator[tuple[int, int]]:
    return ((index, step) for index, spec in specs.items() for step in range(spec.steps))


def _places(specs: Mapping[int, TrialSpec]) -> Iterator[Place]:
    for index, step in _steps(specs):
        yield from ((index, step, world_rank) for world_rank in range(specs[index].mesh.world_size))
