"""Who is at fault, in which phase and in which parameter: what the reports of one probe and ordering point to.

Pure. A fault spreads: a wrong gradient goes through the sync to its owners and through the tie to the other end, so the
earliest trace of it decides. Where several ranks look alike none is named; a wrong name costs more than none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from workers.contract import (
    Deviation,
    DeviationKind,
    DivergenceRow,
    End,
    Mesh,
    ParameterElement,
    RankPhase,
    ReplicaRow,
    Role,
    StepReport,
    TrialSpec,
)
from workers.evidence import Evidence, astray_ranks
from workers.orderings import RANK_PHASES, ordering_of
from workers.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS, is_tied, layernorm_element

Key = TypeVar("Key")


_Span = tuple[ParameterElement | None, ParameterElement | None]


@dataclass(frozen=True, slots=True)
class Guilt:
    """The earliest trace of a fault: the ranks that it points to, and where in their step it is."""

    suspects: tuple[int, ...]
    """World ranks, rising; a single one is the rank at fault."""
    phase: RankPhase
    first: ParameterElement | None
    """The first wrong element where all of them lie in one parameter; of layernorms, which are summed together over tp,
    the first in any case."""

    @property
    def world_rank(self) -> int | None:
        """The rank at fault; None where it could be another."""
        return self.suspects[0] if len(self.suspects) == 1 else None


def find_guilt(evidence: Evidence) -> Guilt | None:
    """The earliest trace of any fault in these trials; None where there is no fault, or nothing to tell by."""
    moments: dict[tuple[int, int], list[StepReport]] = defaultdict(list)
    for report in evidence.reports:
        moments[report.trial_index, report.step].append(report)
    for moment in sorted(moments):
        reports = moments[moment]
        for trace in _TRACES:
            if (guilt := trace(evidence, reports)) is not None:
                return guilt
        if (guilt := _damaged_weights(reports) or _wrong_norm(evidence, reports)) is not None:
            return guilt
    return None


def narrow(guilts: Mapping[Key, Guilt | None]) -> dict[Key, Guilt | None]:
    """The same findings of one experiment with their suspects cut down to those whom all of them suspect.

    One rank at fault is in every set of suspects; where no rank is, there are several faults, and nothing is cut.
    """
    sets = [set(guilt.suspects) for guilt in guilts.values() if guilt is not None]
    common = _sorted(set.intersection(*sets)) if sets else ()
    return {key: replace(guilt, suspects=common) if guilt and common else guilt for key, guilt in guilts.items()}


def node_of(guilt: Guilt, nodes: Mapping[int, str]) -> str | None:
    """The node of all suspects, where they share one and it is not simply the node of every rank of several."""
    on = {nodes.get(world_rank) for world_rank in guilt.suspects}
    if len(on) != 1:
        return None
    return on.pop() if guilt.world_rank is not None or len(set(nodes.values())) > 1 else None


def odd_ones_out(values: Mapping[int, str]) -> tuple[int, ...]:
    """The keys whose value is not the majority's; all of them where none is a majority, none where all agree."""
    ((common, most),) = Counter(values.values()).most_common(1)
    if most == len(values):
        return ()
    if most * 2 <= len(values):
        return tuple(sorted(values))
    return tuple(sorted(key for key, value in values.items() if value != common))


def _nonfinite(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    order = [RANK_PHASES[phase] for phase in ordering_of(evidence.spec).phases] + [RankPhase.OPTIMIZER]
    rows = [(report.world_rank, row) for report in reports for row in report.nonfinite]
    if not rows:
        return None
    earliest = min((row.phase for _, row in rows), key=order.index)
    seen = [(world_rank, row) for world_rank, row in rows if row.phase is earliest]
    spans = [(row.first, row.last) for _, row in seen]
    return Guilt(_sorted(world_rank for world_rank, _ in seen), earliest, _common_parameter(spans))


def _unlike_from_the_start(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """Initial weights; where replicas are two, the one whose gradients are not those of the true weights."""
    suspects = _odd_replicas(reports, lambda row: row.initial_weights_digest)
    if not suspects:
        return None
    deviating = {world_rank for world_rank, _ in _deviations(evidence, reports)}
    narrowed = tuple(world_rank for world_rank in suspects if world_rank in deviating)
    return Guilt(narrowed or suspects, RankPhase.BUILDING, None)


def _deviating(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """Gradients that were wrong before any collective. A wrong stage misleads the others of its pipeline too."""
    found = list(_deviations(evidence, reports))
    if not found:
        return None
    suspects = _sorted(world_rank for world_rank, _ in found)
    return Guilt(suspects, RankPhase.FORWARD_BACKWARD, _common_parameter([span for _, span in found]))


def _wrong_after_dp_sync(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """What the replicas of a stage add up to is wrong, though what each of them gave is right."""
    mesh = evidence.spec.mesh
    places = [(pp_rank, tp_rank) for pp_rank in range(mesh.pp) for tp_rank in range(mesh.tp)]
    sums = {place: _sums_of_replicas(evidence, reports, *place) for place in places}
    wrong = {place: [each for each in rows if each.is_wrong] for place, rows in sums.items()}
    if not any(wrong.values()):
        return None
    suspects = [rank for place, rows in sums.items() if wrong[place] for rank in _culprits(rows)]
    spans = [each.span for rows in wrong.values() for each in rows]
    return Guilt(_sorted(suspects), RankPhase.DP_SYNC, _common_parameter(spans))


@dataclass(frozen=True, slots=True)
class _Sum:
    """What one owner's elements came to."""

    world_rank: int
    num_owned: int
    is_wrong: bool
    span: _Span
    blamed: frozenset[int]
    """World ranks of the same replicas whose share is wrong in it."""


def _sums_of_replicas(evidence: Evidence, reports: Sequence[StepReport], pp_rank: int, tp_rank: int) -> list[_Sum]:
    """Where no ends are added, or were before, the tied weight's final sums too, unless that addition broke."""
    mesh, found = evidence.spec.mesh, []
    of_replicas = [report for report in reports if (report.pp_rank, report.tp_rank) == (pp_rank, tp_rank)]
    ties_later = mesh.pp > 1 and ordering_of(evidence.spec).ties_after_sync
    is_final = evidence.role is Role.SUBJECT and not ties_later and not _split_pipelines(reports)
    for report in of_replicas:
        for row in report.parameters:
            span = (row.first_unexpected, row.last_unexpected)
            blamed = _blamed(row.deviations, mesh, pp_rank, tp_rank)
            found.append(_Sum(report.world_rank, row.owned_elements, row.unexpected_elements > 0, span, blamed))
        for tied in _tied_rows(report) if is_final else ():
            span = (_tied_element(tied.end, tied.first_diverged), _tied_element(tied.end, tied.last_diverged))
            blamed = _blamed(tied.deviations, mesh, pp_rank, tp_rank)
            found.append(_Sum(report.world_rank, tied.owned_elements, tied.diverged_elements > 0, span, blamed))
    return found


def _tied_rows(report: StepReport) -> Iterator[DivergenceRow]:
    """Those of the two ends, without layernorms'."""
    return (row for row in report.divergence if row.end is not End.LAYERNORM)


def _blamed(deviations: Sequence[Deviation], mesh: Mesh, pp_rank: int, tp_rank: int) -> frozenset[int]:
    """Who of some replicas gave the shares that are wrong; what was added before came through its own pipeline."""
    dp_ranks = {contributor.dp_rank for deviation in deviations for contributor in deviation.contributors}
    return frozenset(mesh.world_rank(dp_rank, pp_rank, tp_rank) for dp_rank in dp_ranks)


def _culprits(sums: Sequence[_Sum]) -> Iterable[int]:
    """Of one stage: the owner whose sums alone are wrong, or the one contributor whose share is wrong in all."""
    wrong = [each for each in sums if each.is_wrong]
    owners = {each.world_rank for each in wrong}
    blamed = wrong[0].blamed if all(each.blamed == wrong[0].blamed for each in wrong) else frozenset()
    if len(owners) == 1:
        # Where nobody else owns anything, who gave its share wrongly and who lost it look alike.
        is_sole_owner = all(each.world_rank in owners for each in sums if each.num_owned)
        return owners | blamed if is_sole_owner and len(blamed) == 1 else owners
    return blamed if len(blamed) == 1 else owners


def _wrong_layernorms(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """What tensor-parallel ranks hold of their sums is wrong, though what the replicas added up before was right."""
    rows = [
        (report, row)
        for report in reports
        for row in report.divergence
        if row.end is End.LAYERNORM and row.unexpected_elements
    ]
    if not rows:
        return None
    report, row = rows[0]
    first = layernorm_element(evidence.spec, report.pp_rank, row.first_diverged)
    return Guilt(_sorted(report.world_rank for report, _ in rows), RankPhase.LAYERNORM, first)


def _wrong_in_the_end(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """The tied weight is wrong, although nothing was before the ends were added."""
    if evidence.role is not Role.SUBJECT:
        return None
    rows = [(report, row) for report in reports for row in _tied_rows(report) if row.diverged_elements]
    if not rows:
        return None
    spans = [(_tied_element(row.end, row.first_diverged), _tied_element(row.end, row.last_diverged)) for _, row in rows]
    suspects = _sorted(report.world_rank for report, _ in rows)
    if not ordering_of(evidence.spec).ties_after_sync:
        # What a pipeline added up wrongly has since gone to whoever owns it at that end.
        mesh, stages = evidence.spec.mesh, {report.pp_rank for report, _ in rows}
        split = [mesh.world_rank(dp_rank, stage, tp) for dp_rank, tp in _split_pipelines(reports) for stage in stages]
        suspects = _sorted(split) or suspects
    return Guilt(suspects, RankPhase.TIE, _common_parameter(spans))


def _split_pipelines(reports: Sequence[StepReport]) -> set[tuple[int, int]]:
    """(dp_rank, tp_rank) of the pipelines whose two ends were added first, and yet do not hold the same bits."""
    held: dict[tuple[int, int], set[str]] = defaultdict(set)
    for report in reports:
        if report.replica.tied_digest is not None:
            held[report.dp_rank, report.tp_rank].add(report.replica.tied_digest)
    return {pipeline for pipeline, digests in held.items() if len(digests) > 1}


def _damaged_weights(reports: Sequence[StepReport]) -> Guilt | None:
    """Weights that differ after the step; where replicas are two, by what each of them sent."""
    suspects = _odd_replicas(reports, lambda row: row.weights_digest)
    if not suspects:
        return None
    damaged = _sorted(world_rank for world_rank in suspects if _is_damaged(world_rank, reports))
    return Guilt(damaged or suspects, RankPhase.OPTIMIZER, None)


def _wrong_norm(evidence: Evidence, reports: Sequence[StepReport]) -> Guilt | None:
    """A norm that is too large by just what one rank holds of the second copy of the tied weight, which counts once."""
    norm = next((report.grad_norm for report in reports if report.grad_norm and report.grad_norm.reference), None)
    if norm is None or norm.reference is None or evidence.role is not Role.SUBJECT:
        return None
    excess, slack = norm.value**2 - norm.reference**2, 2 * norm.value * (norm.allowed_error or 0.0)
    suspects = [
        report.world_rank
        for report in reports
        for row in report.divergence
        if row.end is End.LM_HEAD and row.l2 > 0 and abs(excess - row.l2**2) <= slack + 1e-12 * norm.value**2
    ]
    first = ParameterElement(OUTPUT_LAYER, 0)
    return Guilt(_sorted(suspects), RankPhase.OPTIMIZER, first) if suspects else None


def _is_damaged(world_rank: int, reports: Sequence[StepReport]) -> bool:
    """Whether a rank of two replicas no longer has what it sent, or not what the other sent."""
    (mine,) = [report for report in reports if report.world_rank == world_rank]
    others = [
        report.replica.sent_digest
        for report in reports
        if (report.pp_rank, report.tp_rank) == (mine.pp_rank, mine.tp_rank) and report is not mine
    ]
    row = mine.replica
    if row.sent_digest is None or len(others) != 1:
        return False
    return row.kept_digest != row.sent_digest or row.received_digest != others[0]


def _odd_replicas(reports: Sequence[StepReport], digest: Callable[[ReplicaRow], str]) -> tuple[int, ...]:
    """Ranks that do not hold what most replicas of their stage hold."""
    stages: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    for report in reports:
        stages[report.pp_rank, report.tp_rank][report.world_rank] = digest(report.replica)
    return _sorted(world_rank for held in stages.values() for world_rank in odd_ones_out(held))


def _deviations(evidence: Evidence, reports: Sequence[StepReport]) -> Iterator[tuple[int, _Span]]:
    """Ranks whose own gradients are off, each with between which elements one owner has seen it."""
    for report in reports:
        for row in report.divergence:
            local = [each.first_element for each in row.deviations if each.kind is DeviationKind.LOCAL]
            first = _element(evidence.spec, report, row.end, min(local, default=None))
            yield from ((world_rank, (first, first)) for world_rank in astray_ranks(row))
        for inner in report.parameters:
            yield from (
                (world_rank, (inner.first_deviating, inner.last_deviating)) for world_rank in inner.deviating_ranks
            )


def _element(spec: TrialSpec, report: StepReport, end: End, element: int | None) -> ParameterElement | None:
    if end is End.LAYERNORM:
        return layernorm_element(spec, report.pp_rank, element)
    return _tied_element(end, element)


def _tied_element(end: End, element: int | None) -> ParameterElement | None:
    if element is None:
        return None
    return ParameterElement(WORD_EMBEDDINGS if end is End.WTE else OUTPUT_LAYER, element)


def _common_parameter(spans: Sequence[_Span]) -> ParameterElement | None:
    """The first element of all, where every span lies in one parameter; copies of the tied weight are one."""
    bounds = [bound for span in spans for bound in span]
    known = [bound for bound in bounds if bound is not None]
    names = {bound.parameter for bound in known}
    if len(known) < len(bounds) or not (len(names) == 1 or all(map(is_tied, names))):
        return None
    return min(known, key=lambda bound: bound.element)


_TRACES = (
    _nonfinite,
    _unlike_from_the_start,
    _deviating,
    _wrong_after_dp_sync,
    _wrong_layernorms,
    _wrong_in_the_end,
)
"""From the earliest on."""


def _sorted(world_ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(world_ranks)))
