"""From every rank's reports to a verdict: may a large training run start here?

Pure rules over statistics, shared by the service and `torchrun -m workers`. A crash never gets here: that is an error,
not a verdict. What was not looked at is never green: a rule that cannot be applied makes the verdict inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from workers.attribution import Guilt, find_guilt, narrow, node_of
from workers.checks.primitives import summarise_collectives, untested_ranks, wrong_collectives
from workers.checks.settings import observe_settings
from workers.checks.stragglers import observe_stragglers
from workers.contract import (
    DivergenceRow,
    Dtype,
    Judgement,
    JudgeName,
    Normalization,
    OrderingName,
    ProbeName,
    Reason,
    Role,
    Schedule,
    StackFault,
    StepReport,
    TrialSpec,
    TrialSummary,
    Verdict,
)
from workers.evidence import (
    Evidence,
    collect,
    deviations,
    disagreements,
    elements_due,
    nonfinite,
    norm_breaches,
    norm_disagreements,
    parted_weights,
    sift,
    stack_faults,
    summarise,
    unaudited_steps,
    uncovered_steps,
    unjudged_norms,
    unjudged_parameters,
    unreplayed,
    untied_steps,
    unweighed_steps,
)
from workers.exactness import code_digits, replicas_at_once
from workers.findings import sentence
from workers.intervals import count
from workers.prediction import trial_exposed

VERDICT_RULES_VERSION = 5
"""Rises with every change of what makes a verdict; stored with each validation."""
MAX_STORIES = 2
"""Stories of one shard that a reason tells; the row has them all."""


def judge(
    trials: Sequence[TrialSpec],
    reports: Iterable[StepReport],
    nodes: Mapping[int, str] | None = None,
    is_virtual: bool = False,
) -> Judgement:
    """The verdict on these trials, given what the ranks reported, in any order, and on which node each rank was.

    `trials` are those of the plan, in its order: reports name them by index. A failure outranks every doubt, and
    without a failure any doubt makes the verdict inconclusive. Of virtual ranks less is due, and a pass says so.
    """
    sifted = sift(trials, reports)
    gathered = collect(trials, sifted.accepted, is_virtual)
    doubts = [Reason("report_mismatch", f"{sentence} It was not counted.") for sentence in sifted.rejected]
    accepted = tuple(sifted.accepted.values())
    failures = list(wrong_collectives(accepted))
    if untested := untested_ranks(accepted):
        doubts.append(Reason("collectives_not_tested", f"World ranks {untested} did not self-test their collectives."))
    summaries: list[TrialSummary] = []
    guilts = narrow({index: find_guilt(evidence) for index, evidence in enumerate(gathered)})
    for index, evidence in enumerate(gathered):
        failed, doubted = list(_failures(evidence, guilts[index], nodes or {})), list(_doubts(evidence))
        failures += failed
        doubts += doubted
        summaries.append(summarise(evidence, ok=not failed and not doubted))
    doubts += _unproven(gathered)
    observations = (*observe_stragglers(accepted), *observe_settings(accepted))
    verdict, reasons = _conclude(failures, doubts, gathered)
    return Judgement(verdict, reasons, tuple(summaries), observations, summarise_collectives(accepted))


def failing(trials: Sequence[TrialSpec], reports: Iterable[StepReport]) -> tuple[Evidence, ...]:
    """The probes and orderings that make the verdict of these reports `fail`."""
    gathered = collect(trials, sift(trials, reports).accepted)
    return tuple(evidence for evidence in gathered if any(_findings(evidence)))


def _conclude(
    failures: list[Reason], doubts: list[Reason], gathered: tuple[Evidence, ...]
) -> tuple[Verdict, tuple[Reason, ...]]:
    if failures:
        return Verdict.FAIL, (*failures, *doubts)
    if doubts:
        return Verdict.INCONCLUSIVE, tuple(doubts)
    return Verdict.PASS, (_clean(gathered),)


def _failures(evidence: Evidence, guilt: Guilt | None, nodes: Mapping[int, str]) -> Iterator[Reason]:
    """What no healthy cluster shows, each finding with who is at fault as far as the evidence goes."""
    for code, judge_name, message in _findings(evidence):
        reason = Reason(code, f"{evidence.title}: {message}", judge_name)
        yield reason if guilt is None else _accuse(reason, guilt, node_of(guilt, nodes))


def _accuse(reason: Reason, guilt: Guilt, node: str | None) -> Reason:
    first = guilt.first
    return replace(
        reason,
        message=f"{reason.message} {_accusation(guilt, node)}",
        world_rank=guilt.world_rank,
        node=node,
        phase=guilt.phase,
        parameter=first.parameter if first else None,
        element=first.element if first else None,
    )


def _accusation(guilt: Guilt, node: str | None) -> str:
    """The place of a fault as a sentence."""
    ranks = ", ".join(map(str, guilt.suspects[:4])) + (" ..." if len(guilt.suspects) > 4 else "")
    who = "world_rank" if guilt.world_rank is not None else "one of world_ranks"
    where = f" on {node}" if node else ""
    what = f", in {guilt.first.parameter} from element {guilt.first.element} on" if guilt.first else ""
    return f"First wrong in {guilt.phase.value}{what}; at fault: {who} {ranks}{where}."


_Finding = tuple[str, JudgeName, str]
"""Code, who found it, and a sentence without its subject."""


def _findings(evidence: Evidence) -> Iterator[_Finding]:
    """What is wrong whatever the ordering; and for a subject, any divergence at all."""
    broken = list(nonfinite(evidence))
    if broken:
        report, what = broken[0]
        yield "non_finite", JudgeName.FINITE, f"{what} {_at(report)} is not finite ({len(broken)} such findings)."
    apart = list(disagreements(evidence))
    if apart:
        one, other = apart[0]
        message = f"the weights of world_rank {one.world_rank} and its replica {_at(other)} are not the same bits"
        yield "replicas_disagree", JudgeName.REPLICAS, f"{message} ({len(apart)} such pairs)."
    unlike = list(norm_disagreements(evidence))
    if unlike:
        one, other = unlike[0]
        message = f"world_rank {one.world_rank} and the rank {_at(other)} do not have the same global gradient norm"
        yield "grad_norm_disagrees", JudgeName.REPLICAS, f"{message} ({len(unlike)} such pairs)."
    yield from _parameter_findings(evidence)
    if evidence.role is Role.SUBJECT:
        yield from _subject_findings(evidence)
        yield from _norm_findings(evidence)
    yield from _stack_findings(evidence)


def _found_by(evidence: Evidence, of_gpt: JudgeName) -> JudgeName:
    """Whose finding it is: the exact probe has one judge of values, gpt has several."""
    return JudgeName.EXACT if evidence.spec.probe is ProbeName.EXACT else of_gpt


def _stack_findings(evidence: Evidence) -> Iterator[_Finding]:
    """What else a foreign stack got wrong: one reason for each kind, with the parameters that it hit."""
    found = list(stack_faults(evidence))
    for fault in StackFault:
        of_kind = [(report, finding) for report, finding in found if finding.fault is fault]
        if of_kind:
            of_gradients = _found_by(evidence, JudgeName.SYNC)
            judge_name = JudgeName.REPLICAS if fault is StackFault.WEIGHTS_DIFFER else of_gradients
            report, first = of_kind[0]
            others = sorted({finding.parameter for _, finding in of_kind} - {first.parameter})
            also = f"; also {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}" if others else ""
            message = f"{first.parameter} {first.detail}, {_at(report)}{also} ({len(of_kind)} such findings)."
            yield f"stack_{fault.value}", judge_name, message


def _parameter_findings(evidence: Evidence) -> Iterator[_Finding]:
    """What no ordering gets wrong: a rank's own gradients, and what the replicas of one stage add up."""
    deviating = sorted({world_rank for _, world_rank in deviations(evidence)})
    if deviating:
        message = f"before any collective, the gradients of world_ranks {deviating} are not those of a single process."
        yield "local_gradient_wrong", _found_by(evidence, JudgeName.REFERENCE), message
    wrong = [(report, row) for report in evidence.reports for row in report.parameters if row.unexpected_elements]
    if wrong:
        report, row = wrong[0]
        total = sum(row.unexpected_elements for _, row in wrong)
        name = row.first_unexpected.parameter if row.first_unexpected else "a parameter"
        message = f"{total} elements are not what the replicas' gradients add up to, first {name} {_at(report)}"
        yield "parameter_diverged", _found_by(evidence, JudgeName.SYNC), f"{message}, by up to {row.max_abs_error:.3e}."
    far = sum(row.reference_exceeded_elements for report in evidence.reports for row in report.parameters)
    if far and evidence.spec.probe is not ProbeName.EXACT:
        message = f"{far} elements of parameters are further from the single-process run than rounding allows."
        yield "parameter_reference_exceeded", JudgeName.REFERENCE, message


def _subject_findings(evidence: Evidence) -> Iterator[_Finding]:
    hit = [(report, row) for report, row in evidence.rows() if row.diverged_elements or row.unexpected_elements]
    if hit:
        report, row = max(hit, key=lambda pair: pair[1].diverged_elements)
        where = f"most {_at(report)}: {row.diverged_elements} of {row.owned_elements} elements of {row.end.value}"
        span = f"between elements {row.first_diverged} and {row.last_diverged}, by up to {row.max_abs_error:.3e}"
        total = max(evidence.total("diverged_elements"), evidence.total("unexpected_elements"))
        message = f"{total} elements are wrong, {where}, {span}{_told(report, row)}"
        yield "subject_diverged", _found_by(evidence, JudgeName.SYNC), f"{message}."
    exceeded = sum(tied.exceeded_elements for tied in evidence.ties())
    if exceeded:
        message = f"{exceeded} elements differ between the two ends by more than rounding allows"
        yield "ends_differ", JudgeName.REPLICAS, f"{message}."
    parted = list(parted_weights(evidence))
    if parted:
        report, tied = max(parted, key=lambda pair: pair[1].weights_max_abs_difference)
        message = f"after the optimizer the two ends' weights differ by up to {tied.weights_max_abs_difference:.3e}"
        message += f", most {_at(report)}, and must be the same bits"
        yield "weights_differ", JudgeName.REPLICAS, f"{message} ({len(parted)} such findings)."
    far = evidence.total("reference_exceeded_elements")
    if far:
        report, row = max(evidence.rows(), key=lambda pair: pair[1].reference_exceeded_elements)
        message = f"{far} elements are further from the single-process run than rounding allows{_told(report, row)}"
        yield "reference_exceeded", _found_by(evidence, JudgeName.REFERENCE), f"{message}."


def _norm_findings(evidence: Evidence) -> Iterator[_Finding]:
    breaches = list(norm_breaches(evidence))
    if breaches:
        report, norm = breaches[0]
        message = f"the global gradient norm {_at(report)} is {norm.value!r} and should be {norm.reference!r}"
        allowed = f"within {norm.allowed_error or 0.0:.3e}, which is all that rounding explains"
        yield "grad_norm_wrong", JudgeName.NORM, f"{message}, {allowed} ({len(breaches)} such findings)."


def _doubts(evidence: Evidence) -> Iterator[Reason]:
    """Why this evidence is not complete, or a control is not what was predicted."""
    if evidence.missing:
        yield Reason("missing_reports", f"{evidence.title}: {_missing(evidence)}.")
        return
    yield from _coverage_doubts(evidence)
    yield from _norm_doubts(evidence)
    steps = sum(spec.steps for spec in evidence.specs.values())
    predicted, allowed = evidence.total("predicted_elements"), evidence.misowned_elements * steps
    if predicted > allowed:
        message = f"the ranks predict {predicted} wrong elements, but the layouts allow {allowed}"
        yield Reason("prediction_mismatch", f"{evidence.title}: {message}; the instrument contradicts itself.")
    elif evidence.role is Role.SUBJECT and evidence.total("missed_elements"):
        message = "elements were missed where none was predicted wrong"
        yield Reason("prediction_mismatch", f"{evidence.title}: {message}; the instrument contradicts itself.")
    if evidence.role is Role.CONTROL:
        yield from _control_doubts(evidence)
    else:
        yield from _power_doubts(evidence)


def _power_doubts(evidence: Evidence) -> Iterator[Reason]:
    """A judge whose bound is wider than every share would call a sum right that lacks one."""
    blind = [(report, row) for report, row in evidence.rows() if row.min_detectable_share >= 1]
    if blind:
        report, row = max(blind, key=lambda pair: pair[1].min_detectable_share)
        spec = evidence.spec
        message = f"rounding in {spec.grad_reduce_dtype.value} may be {row.min_detectable_share:.3g} times the largest"
        message += f" share of {row.end.value} {_at(report)}, so that a lost one would not be seen"
        yield Reason("judge_blind", f"{evidence.title}: {message}; reduce in float32, or take a smaller dp.")


def _coverage_doubts(evidence: Evidence) -> Iterator[Reason]:
    uncovered = list(uncovered_steps(evidence))
    unjudged = list(unjudged_parameters(evidence))
    if unjudged:
        index, step, pp_rank, phase = unjudged[0]
        where = f"stage {pp_rank}, repeat {evidence.specs[index].repeat}, step {step}, {phase.value}"
        message = f"not all parameters of {where} were compared"
        yield Reason("parameters_not_compared", f"{evidence.title}: {message} ({len(unjudged)} such gaps).")
    if evidence.total("owned_elements") == 0:
        yield Reason("nothing_compared", f"{evidence.title}: not one gradient element was compared.")
    elif uncovered:
        index, step, end = uncovered[0]
        where = f"{end.value}, repeat {evidence.specs[index].repeat}, step {step}"
        message = f"not all {elements_due(evidence.spec)[end]} elements of {where} were compared"
        yield Reason("partly_compared", f"{evidence.title}: {message} ({len(uncovered)} such gaps).")
    untied = list(untied_steps(evidence)) if evidence.role is Role.SUBJECT else []
    if untied:
        message = f"the two ends were not compared with each other in full in {len(untied)} steps"
        yield Reason("ends_not_compared", f"{evidence.title}: {message}.")
    unweighed = list(unweighed_steps(evidence)) if evidence.role is Role.SUBJECT and not untied else []
    if unweighed:
        message = f"the two ends' weights were not compared with each other in full in {len(unweighed)} steps"
        yield Reason("weights_not_compared", f"{evidence.title}: {message}.")
    alone = list(unreplayed(evidence))
    if alone:
        report, what = alone[0]
        message = f"no single-process run was there to hold {what} {_at(report)} against ({len(alone)} such gaps)"
        yield Reason("reference_not_run", f"{evidence.title}: {message}.")
    unaudited = list(unaudited_steps(evidence))
    if unaudited:
        index, step, pp_rank = unaudited[0]
        where = f"pp_rank {pp_rank}, repeat {evidence.specs[index].repeat}, step {step}"
        message = f"not every parameter of {where} was judged ({len(unaudited)} such gaps)"
        yield Reason("stack_not_judged", f"{evidence.title}: {message}.")
    origins = sorted({str(report.stack.origin) for report in evidence.reports if report.stack is not None})
    if len(origins) > 1:
        yield Reason("stack_differs", f"{evidence.title}: the ranks do not run the same code: {'; '.join(origins)}.")


def _norm_doubts(evidence: Evidence) -> Iterator[Reason]:
    unjudged = list(unjudged_norms(evidence))
    if unjudged:
        index, step = unjudged[0]
        message = f"the global gradient norm of repeat {evidence.specs[index].repeat}, step {step} was not judged"
        yield Reason("grad_norm_not_judged", f"{evidence.title}: {message} ({len(unjudged)} such steps).")


def _control_doubts(evidence: Evidence) -> Iterator[Reason]:
    predicted, missed = evidence.total("predicted_elements"), evidence.total("missed_elements")
    diverged, unexpected = evidence.total("diverged_elements"), evidence.total("unexpected_elements")
    if predicted and not diverged:
        message = f"none of the {predicted} elements predicted wrong was seen wrong; the instrument may be blind"
        yield Reason("control_not_seen", f"{evidence.title}: {message}.")
    elif missed or unexpected:
        report, row = max(evidence.rows(), key=lambda pair: (pair[1].unexpected_elements, pair[1].missed_elements))
        message = f"of {predicted} elements predicted wrong {missed} were not, and {unexpected} others were"
        message += _told(report, row)
        yield Reason("control_mismatch", f"{evidence.title}: {message}; the instrument and its prediction disagree.")


def _unproven(gathered: Sequence[Evidence]) -> Iterator[Reason]:
    """Per probe: a control that could be exercised, and a subject, must both have run."""
    if not gathered:
        yield Reason("nothing_ran", "There was no trial to judge; ask for at least one probe and ordering.")
    for probe in dict.fromkeys(evidence.spec.probe for evidence in gathered):
        of_probe = [evidence for evidence in gathered if evidence.spec.probe is probe]
        yield from _missing_roles(probe, of_probe)


def _missing_roles(probe: ProbeName, of_probe: Sequence[Evidence]) -> Iterator[Reason]:
    controls = [evidence for evidence in of_probe if evidence.role is Role.CONTROL]
    if not controls:
        message = "no control ran, so nothing shows that a wrong gradient would be seen; add buggy to orderings"
        yield Reason("no_control", f"{probe.value}: {message}.")
    # With reports missing it is not known what was predicted; that has its own reason.
    elif not any(evidence.missing or evidence.total("predicted_elements") for evidence in controls):
        whys = "; ".join(f"{evidence.title}: {_why_not_applicable(evidence)}" for evidence in controls)
        yield Reason("control_not_applicable", f"No control could show that a wrong gradient would be seen. {whys}.")
    if len(controls) == len(of_probe):
        message = "no subject ran, so nothing was shown to be right; add own_bucket or fixed to orderings"
        yield Reason("no_subject", f"{probe.value}: {message}.")


def _why_not_applicable(evidence: Evidence) -> str:
    spec = evidence.spec
    if spec.mesh.dp == 1:
        return "with dp=1 the one replica owns every element, so no ordering can get one wrong"
    if spec.ordering is OrderingName.MEAN_OF_MEANS:
        return "every rank holds as many valid tokens as the others, so the mean of their means is the mean of all"
    if spec.mesh.pp == 1:
        return "with pp=1 one stage holds the only copy of the tied weight, so nothing is tied"
    if not count(trial_exposed(spec)):
        return "both ends shard the tied weight alike on this mesh and model, so no element is owned differently"
    return "the terms that its elements lack are zero or too small to be told from rounding"


def _clean(gathered: Sequence[Evidence]) -> Reason:
    """What a green verdict rests on."""
    spec = gathered[0].spec
    subjects = [evidence for evidence in gathered if evidence.role is Role.SUBJECT]
    controls = [evidence for evidence in gathered if evidence.role is Role.CONTROL]
    compared = sum(evidence.total("owned_elements") for evidence in subjects)
    predicted = sum(evidence.total("predicted_elements") for evidence in controls)
    right = f"{', '.join(evidence.title for evidence in subjects)} right in all {compared} elements compared"
    also = sum(evidence.total("diverged_elements") for evidence in controls) - predicted
    seen = (
        f"{', '.join(evidence.title for evidence in controls)} wrong in {'all' if also else 'exactly'} the {predicted}"
    )
    seen += f" predicted, and in {also} more whose errors rounding could have hidden" if also else " predicted"
    return Reason(
        "clean",
        f"On {_coverage(spec)}: {right}; {seen}{_turns(gathered)}{_unsigned(gathered)}{_unreferenced(gathered)}.",
    )


def _unsigned(gathered: Sequence[Evidence]) -> str:
    """What a request's size took from the exact probe: its answer is as certain, but names are told by size alone."""
    if any(evidence.spec.probe is ProbeName.EXACT and not code_digits(evidence.spec) for evidence in gathered):
        dtype = gathered[0].spec.grad_reduce_dtype.value
        return f"; exact ran without the rank code, for which sums of this size leave no room in {dtype}"
    return ""


def _turns(gathered: Sequence[Evidence]) -> str:
    """Whether only some replicas of the exact probe gave something in each step."""
    for spec in (evidence.spec for evidence in gathered if evidence.spec.probe is ProbeName.EXACT):
        at_once = replicas_at_once(spec.model, spec.batch, spec.mesh.dp, spec.grad_reduce_dtype)
        if at_once < spec.mesh.dp:
            return f"; exact's {spec.mesh.dp} replicas took turns, {at_once} a step"
    return ""


def _unreferenced(gathered: Sequence[Evidence]) -> str:
    """What was held against no single-process run, since there can be none."""
    specs = [evidence.spec for evidence in gathered]
    later = next((spec for spec in specs if not spec.is_replayable(spec.steps - 1)), None)
    told = f"; of gpt's {later.steps} steps the first alone was held against a single process" if later else ""
    if any(evidence.is_virtual for evidence in gathered):
        told += "; on virtual ranks only the tied weight was held against a second run, and no weight was updated"
    return told


def _coverage(spec: TrialSpec) -> str:
    """Mesh and schedule in words; what is as by default is left out."""
    mesh = spec.mesh
    named = f"dp={mesh.dp} x pp={mesh.pp}" + (f" x tp={mesh.tp}" if mesh.tp > 1 else "")
    named += f" x vpp={mesh.vpp}" if mesh.vpp > 1 else ""
    named += f", {spec.schedule.value}" if spec.schedule is not Schedule.ONE_F_ONE_B else ""
    named += ", scatter overlapping backward" if spec.overlap else ""
    named += ", averaged in the collective" if spec.average_in_collective else ""
    if spec.grad_reduce_dtype is not Dtype.FLOAT32:
        named += f", summed over dp in {spec.grad_reduce_dtype.value}"
    return named + (", divided by valid tokens" if spec.normalization is Normalization.NUM_TOKENS else "")


def _told(report: StepReport, row: DivergenceRow) -> str:
    """What the row's wrong elements consist of, as the end of a sentence."""
    told = [sentence(deviation, row.end, report.world_rank) for deviation in row.deviations[:MAX_STORIES]]
    more = f"; {len(row.deviations) - MAX_STORIES} more stories there" if len(row.deviations) > MAX_STORIES else ""
    return "".join(f": {story}" if i == 0 else f"; {story}" for i, story in enumerate(told)) + more


def _missing(evidence: Evidence) -> str:
    shown = ", ".join(f"repeat {r} step {s} world_rank {w}" for r, s, w in evidence.missing[:3])
    more = f" and {len(evidence.missing) - 3} more" if len(evidence.missing) > 3 else ""
    return f"{len(evidence.missing)} of {evidence.num_reports_due} reports never came: {shown}{more}"


def _at(report: StepReport) -> str:
    return f"on world_rank {report.world_rank} in repeat {report.repeat}, step {report.step}"
