"""The verdict rules, one case each: a healthy set of reports, and the least change that must turn it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isnan, nan
from typing import Any

import pytest
from healthy import BUGGY, EXACT, FIXED, GPT, OWN_BUCKET, Change, changed, healthy, planned

from workers.contract import (
    BatchSpec,
    CollectiveFault,
    CollectiveOp,
    CollectiveRow,
    Contributor,
    Deviation,
    DeviationKind,
    Dtype,
    End,
    ForeignOrdering,
    Judgement,
    JudgeName,
    Mesh,
    ModelSpec,
    OrderingName,
    Primitive,
    ProbeName,
    ReplicaRow,
    Role,
    StackFault,
    StackFinding,
    StackOrigin,
    StepReport,
    TrialSpec,
    TrialSummary,
    Verdict,
)
from workers.verdict import judge

REPLICAS = JudgeName.REPLICAS
UNALIGNED, ALL_REDUCE = OrderingName.OWN_BUCKET_UNALIGNED, OrderingName.ALL_REDUCE


def with_row(**values: Any) -> Change:
    return lambda report: replace(report, divergence=(replace(report.divergence[0], **values),))


def with_tied(**values: Any) -> Change:
    def change(report: StepReport) -> StepReport:
        assert report.tied is not None
        return replace(report, tied=replace(report.tied, **values))

    return change


def at(ordering: OrderingName, probe: ProbeName = GPT, end: End = End.WTE) -> Callable[[StepReport], bool]:
    """The reports of owners of a part of this end in these trials."""
    return lambda report: (
        report.ordering is ordering
        and report.probe is probe
        and any(row.end is end and row.owned_elements for row in report.divergence)
    )


def codes(judgement: Judgement) -> list[str]:
    return [reason.code for reason in judgement.reasons]


def summary_of(judgement: Judgement, probe: ProbeName, ordering: OrderingName) -> TrialSummary:
    (found,) = [t for t in judgement.trials if (t.probe, t.ordering) == (probe, ordering)]
    return found


def assert_turns(change: Change, where: Callable[[StepReport], bool], verdict: Verdict, code: str) -> Judgement:
    """The default experiment passes; with one report changed it gets this verdict for this one reason."""
    specs = planned()
    judgement = judge(specs, changed(healthy(specs), where, change))
    assert (judgement.verdict, codes(judgement)) == (verdict, [code])
    assert len([trial for trial in judgement.trials if not trial.ok]) == 1
    return judgement


# --- pass ---------------------------------------------------------------------------------------------------------


MESHES = [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (8, 2), (4, 4)]


@pytest.mark.parametrize("shape", MESHES)
def test_pass(shape: tuple[int, int]) -> None:
    specs = planned(Mesh(*shape))
    judgement = judge(specs, healthy(specs))
    assert (judgement.verdict, codes(judgement)) == (Verdict.PASS, ["clean"])
    assert all(trial.ok for trial in judgement.trials)
    assert f"dp={shape[0]} x pp={shape[1]}" in judgement.reasons[0].message


def test_counts_are_summed_over_ends_steps_and_repeats() -> None:
    specs = planned(steps=2, repeats=3, probes=(GPT,))
    judgement = judge(specs, healthy(specs))
    buggy, fixed, own_bucket = judgement.trials
    assert (buggy.role, fixed.role, own_bucket.role) == (Role.CONTROL, Role.SUBJECT, Role.SUBJECT)
    assert buggy.misowned_elements == 2 * 2048
    assert buggy.predicted_diverged_elements == buggy.diverged_elements == 2 * 2048 * 2 * 3
    assert (fixed.misowned_elements, fixed.predicted_diverged_elements, fixed.diverged_elements) == (0, 0, 0)
    assert all(trial.compared_elements == 2 * 2048 * 2 * 3 for trial in judgement.trials)
    assert (buggy.max_abs_error, fixed.reference_max_abs) == (0.05, 7.5e-9)


def test_the_order_of_reports_does_not_matter_nor_does_an_identical_copy() -> None:
    specs = planned()
    reports = healthy(specs)
    with_nan = changed(reports, at(BUGGY), with_row(ratio_to_expected=nan))
    copies = [*reversed(with_nan), *(replace(report) for report in with_nan)]
    assert judge(specs, copies).verdict is Verdict.PASS
    assert judge(specs, iter(copies)).trials == judge(specs, with_nan).trials


def test_all_orderings_pass_together() -> None:
    specs = planned(orderings=tuple(OrderingName))
    judgement = judge(specs, healthy(specs))
    assert judgement.verdict is Verdict.PASS
    assert summary_of(judgement, GPT, ALL_REDUCE).compared_elements == 2 * 2 * 2 * 2048
    assert summary_of(judgement, GPT, UNALIGNED).predicted_diverged_elements == 2 * 2 * 128


def test_an_inapplicable_control_beside_an_applicable_one_does_no_harm() -> None:
    """own_bucket_unaligned starts at a multiple of 128 with these sizes, so that nothing of it is misowned."""
    model = ModelSpec(vocab_size=64, hidden_size=128, num_layers=2, num_heads=4, seq_len=16)
    specs = planned(orderings=(BUGGY, UNALIGNED, OWN_BUCKET), probes=(GPT,), model=model)
    judgement = judge(specs, healthy(specs))
    assert summary_of(judgement, GPT, UNALIGNED).predicted_diverged_elements == 0
    assert judgement.verdict is Verdict.PASS


def test_misowned_elements_that_measure_right_are_no_mismatch() -> None:
    """A gpt element must measure wrong only where its missing terms exceed twice the bound."""
    specs = planned()
    reports = changed(healthy(specs), at(BUGGY), with_row(predicted_elements=900, diverged_elements=950))
    assert judge(specs, reports).verdict is Verdict.PASS


# --- fail ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [End.WTE, End.LM_HEAD])
@pytest.mark.parametrize("ordering", [FIXED, OWN_BUCKET])
def test_one_diverged_element_of_a_subject(ordering: OrderingName, end: End) -> None:
    change = with_row(diverged_elements=1, unexpected_elements=1, first_diverged=7, last_diverged=7, max_abs_error=1e-3)
    judgement = assert_turns(change, at(ordering, end=end), Verdict.FAIL, "subject_diverged")
    message = judgement.reasons[0].message
    assert f"gpt/{ordering.value}: 1 elements are wrong" in message
    assert f"elements of {end.value}, between elements 7 and 7" in message


def test_a_divergence_names_whose_share_is_missing() -> None:
    dropped = Deviation(DeviationKind.DROPPED, (Contributor(End.LM_HEAD, 0, 2),), 1, 0.0, 0.0, 7, 1)
    others = (replace(dropped, kind=DeviationKind.CORRUPT, contributors=()),) * 2
    change = with_row(diverged_elements=1, unexpected_elements=1, deviations=(dropped, *others))
    message = assert_turns(change, at(OWN_BUCKET), Verdict.FAIL, "subject_diverged").reasons[0].message
    assert "world_rank 2's lm_head share is missing from 1 elements of wte on world_rank 0" in message
    assert "; 1 more stories there. First wrong in tie; at fault: world_rank 0." in message


def test_a_local_gradient_far_from_its_replay_names_its_rank() -> None:
    local = Deviation(DeviationKind.LOCAL, (Contributor(End.LM_HEAD, 1, 3),), 1, None, 0.0, 7, 5)
    change = with_row(reference_exceeded_elements=5, deviations=(local,))
    specs = planned()
    judgement = judge(specs, changed(healthy(specs), at(FIXED), change))
    assert (judgement.verdict, codes(judgement)) == (Verdict.FAIL, ["local_gradient_wrong", "reference_exceeded"])
    assert "world_rank 3's lm_head share was wrong before any synchronisation" in judgement.reasons[1].message
    assert {reason.world_rank for reason in judgement.reasons} == {3}


def test_a_pass_says_where_the_rank_code_had_no_room() -> None:
    assert "rank code" not in judge(planned(), healthy(planned())).reasons[0].message
    model, batch = ModelSpec(8, 32, 4, 4, 16), BatchSpec(1, 2**16)
    specs = planned(model=model, batch=batch)
    judgement = judge(specs, healthy(specs))
    assert judgement.verdict is Verdict.PASS
    assert "exact ran without the rank code" in judgement.reasons[0].message


def test_an_unexpected_value_of_a_subject_is_a_divergence() -> None:
    assert_turns(with_row(unexpected_elements=1), at(OWN_BUCKET, EXACT), Verdict.FAIL, "subject_diverged")


def test_the_ends_of_a_subject_differ() -> None:
    change = with_tied(unequal_elements=3, exceeded_elements=2, max_abs_difference=1e-3)
    judgement = assert_turns(change, at(OWN_BUCKET), Verdict.FAIL, "ends_differ")
    trial = summary_of(judgement, GPT, OWN_BUCKET)
    assert (trial.tied_unequal_elements, trial.tied_exceeded_elements, trial.tied_max_abs) == (3, 2, 1e-3)


@pytest.mark.parametrize("probe", ProbeName)
@pytest.mark.parametrize("ordering", [FIXED, OWN_BUCKET, ALL_REDUCE])
def test_weights_that_differ_after_the_same_gradients(ordering: OrderingName, probe: ProbeName) -> None:
    specs = planned(orderings=(BUGGY, ordering))
    change = with_tied(weights_max_abs_difference=1e-12)
    judgement = judge(specs, changed(healthy(specs), at(ordering, probe), change))
    assert (judgement.verdict, codes(judgement)) == (Verdict.FAIL, ["weights_differ"])
    assert "differ by up to 1.000e-12, most on world_rank" in judgement.reasons[0].message
    assert (judgement.reasons[0].judge, summary_of(judgement, probe, ordering).weights_max_abs) == (REPLICAS, 1e-12)


@pytest.mark.parametrize(("ordering", "differ"), [(FIXED, False), (OWN_BUCKET, True)])
def test_weights_may_part_after_gradients_that_rounding_parted_unless_both_ends_add_alike(
    ordering: OrderingName, differ: bool
) -> None:
    """Adam divides by the gradient's size: from then on only bits that had to agree are judged."""
    specs = planned()
    reports = changed(healthy(specs), at(ordering), with_tied(unequal_elements=1, max_abs_difference=1e-9))
    later = lambda report: at(ordering)(report) and report.step == 1  # noqa: E731
    reports = changed(reports, later, with_tied(weights_max_abs_difference=2e-3))
    assert ("weights_differ" in codes(judge(specs, reports))) is differ
    before = changed(healthy(specs), later, with_tied(unequal_elements=1, max_abs_difference=1e-9))
    before = changed(before, at(ordering), with_tied(weights_max_abs_difference=2e-3))
    assert codes(judge(specs, before)) == ["weights_differ"]


def test_the_weights_of_a_control_may_part() -> None:
    specs = planned()
    reports = changed(healthy(specs), at(BUGGY), with_tied(weights_max_abs_difference=2e-3))
    assert judge(specs, reports).verdict is Verdict.PASS


def test_ends_that_differ_within_rounding_are_no_failure() -> None:
    specs = planned()
    change = with_tied(unequal_elements=3, exceeded_elements=0, max_abs_difference=1e-9)
    assert judge(specs, changed(healthy(specs), at(FIXED), change)).verdict is Verdict.PASS


def test_a_subject_far_from_the_single_process_run() -> None:
    change = with_row(reference_exceeded_elements=5, reference_max_abs_error=0.3)
    judgement = assert_turns(change, at(FIXED), Verdict.FAIL, "reference_exceeded")
    assert summary_of(judgement, GPT, FIXED).reference_max_abs == 0.3


def test_a_control_far_from_the_single_process_run_is_what_it_is_for() -> None:
    specs = planned()
    reports = changed(healthy(specs), at(BUGGY), with_row(reference_exceeded_elements=5, reference_max_abs_error=0.3))
    reports = changed(reports, at(BUGGY), with_tied(unequal_elements=9, exceeded_elements=9, max_abs_difference=0.05))
    assert judge(specs, reports).verdict is Verdict.PASS


@pytest.mark.parametrize("ordering", [BUGGY, OWN_BUCKET])
@pytest.mark.parametrize(
    "replica",
    [ReplicaRow("initial 0", "another"), ReplicaRow("another", "stage 0 step 0")],
    ids=["after the step", "initial"],
)
def test_replicas_disagree_in_any_trial(ordering: OrderingName, replica: ReplicaRow) -> None:
    judgement = assert_turns(
        lambda report: replace(report, replica=replica), at(ordering), Verdict.FAIL, "replicas_disagree"
    )
    assert not summary_of(judgement, GPT, ordering).replicas_agree


def test_stages_need_not_agree_with_each_other() -> None:
    specs = planned(Mesh(dp=1, pp=3))
    assert "replicas_disagree" not in codes(judge(specs, healthy(specs)))


NONFINITE: list[tuple[str, Change]] = [
    ("elements", with_row(nonfinite_elements=1)),
    ("sum", with_row(sum=nan)),
    ("l2", with_row(l2=inf)),
    ("max_abs_error", with_row(max_abs_error=nan)),
    ("reference_max_abs_error", with_row(reference_max_abs_error=nan)),
    ("tied", with_tied(max_abs_difference=nan)),
    ("weights", with_tied(weights_max_abs_difference=inf)),
    ("loss", lambda report: replace(report, loss=nan)),
]


@pytest.mark.parametrize("ordering", [BUGGY, FIXED])
@pytest.mark.parametrize(("_", "change"), NONFINITE, ids=[name for name, _ in NONFINITE])
def test_nan_anywhere_fails_in_any_trial(_: str, change: Change, ordering: OrderingName) -> None:
    judgement = assert_turns(change, at(ordering), Verdict.FAIL, "non_finite")
    assert f"gpt/{ordering.value}" in judgement.reasons[0].message


def test_a_nan_is_not_lost_in_a_maximum() -> None:
    specs = planned()
    reports = changed(healthy(specs), at(FIXED), with_row(max_abs_error=nan))
    assert isnan(summary_of(judge(specs, reports), GPT, FIXED).max_abs_error)


def test_fail_beats_inconclusive_and_keeps_both_reasons() -> None:
    specs = planned()
    reports = changed(healthy(specs), at(FIXED), with_row(diverged_elements=1))
    judgement = judge(specs, [r for r in reports if (r.ordering, r.world_rank) != (BUGGY, 3)])
    assert judgement.verdict is Verdict.FAIL
    assert codes(judgement) == ["subject_diverged", "missing_reports", "missing_reports"]


# --- inconclusive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "why"),
    [(Mesh(1, 2), "dp=1"), (Mesh(1, 4), "dp=1"), (Mesh(2, 1), "pp=1"), (Mesh(8, 1), "pp=1"), (Mesh(1, 1), "dp=1")],
)
def test_without_dp_or_pp_no_control_can_be_exercised(mesh: Mesh, why: str) -> None:
    specs = planned(mesh)
    judgement = judge(specs, healthy(specs))
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["control_not_applicable"] * 2)
    assert why in judgement.reasons[0].message
    assert all(trial.ok for trial in judgement.trials)


def test_a_stage_that_is_only_the_embedding() -> None:
    """Both ends are then one weight alone, sharded alike."""
    model = ModelSpec(vocab_size=64, hidden_size=32, num_layers=0, num_heads=4, seq_len=16)
    specs = tuple(
        TrialSpec(EXACT, ordering, Mesh(2, 2), model, BatchSpec(1, 4)) for ordering in (BUGGY, FIXED, OWN_BUCKET)
    )
    judgement = judge(specs, healthy(specs))
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["control_not_applicable"])
    assert "shard the tied weight alike" in judgement.reasons[0].message


def test_an_empty_predicted_set() -> None:
    """Elements are misowned, but what they lack is too small for any of them to have to measure wrong."""
    specs = planned()
    unpredicted = with_row(predicted_elements=0, diverged_elements=0)
    reports = [unpredicted(r) if r.ordering is BUGGY and r.probe is GPT and r.divergence else r for r in healthy(specs)]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["control_not_applicable"])
    assert "too small to be told from rounding" in judgement.reasons[0].message
    assert summary_of(judgement, GPT, BUGGY).misowned_elements == 4096


def test_each_probe_needs_its_own_control() -> None:
    """The exact probe's control was seen; that says nothing about gpt's."""
    specs = planned(Mesh(1, 2), probes=(GPT,)) + planned(Mesh(2, 2), probes=(EXACT,))
    judgement = judge(specs, healthy(specs))
    assert codes(judgement) == ["control_not_applicable"]
    assert "gpt/buggy" in judgement.reasons[0].message


def test_no_control_was_asked_for() -> None:
    specs = planned(orderings=(FIXED, OWN_BUCKET))
    judgement = judge(specs, healthy(specs))
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["no_control"] * 2)


def test_no_subject_was_asked_for() -> None:
    specs = planned(orderings=(BUGGY,), probes=(GPT,))
    judgement = judge(specs, healthy(specs))
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["no_subject"])


def test_no_trial_at_all() -> None:
    judgement = judge((), ())
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["nothing_ran"])


@pytest.mark.parametrize("ordering", [FIXED, BUGGY])
def test_zero_elements_compared(ordering: OrderingName) -> None:
    specs = planned(probes=(GPT,))
    blank = [replace(r, divergence=(), tied=None) if r.ordering is ordering else r for r in healthy(specs)]
    judgement = judge(specs, blank)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert codes(judgement)[0] == "nothing_compared"
    assert summary_of(judgement, GPT, ordering).compared_elements == 0
    assert not summary_of(judgement, GPT, ordering).ok


def test_an_element_that_nobody_compared() -> None:
    judgement = assert_turns(with_row(owned_elements=1), at(FIXED), Verdict.INCONCLUSIVE, "partly_compared")
    assert "not all 2048 elements of wte" in judgement.reasons[0].message


def test_an_end_that_nobody_compared() -> None:
    specs = planned()
    reports = [replace(r, divergence=()) if at(FIXED, EXACT, End.LM_HEAD)(r) else r for r in healthy(specs)]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["partly_compared"])


def test_the_ends_weights_were_not_compared() -> None:
    change = with_tied(weights_num_elements=0)
    assert_turns(change, at(OWN_BUCKET), Verdict.INCONCLUSIVE, "weights_not_compared")
    assert_turns(with_tied(weights_num_elements=1), at(FIXED, EXACT), Verdict.INCONCLUSIVE, "weights_not_compared")


@pytest.mark.parametrize(
    ("probe", "step", "due"), [(GPT, 0, True), (GPT, 1, False), (EXACT, 0, True), (EXACT, 1, True)]
)
@pytest.mark.parametrize("ordering", [BUGGY, OWN_BUCKET])
@pytest.mark.parametrize("what", ["tied", "inner"])
def test_a_single_process_run_that_was_due_and_is_missing(
    what: str, ordering: OrderingName, probe: ProbeName, step: int, due: bool
) -> None:
    inner = lambda report: replace(  # noqa: E731
        report, parameters=tuple(replace(row, reference_max_abs_error=None) for row in report.parameters)
    )
    change = with_row(reference_max_abs_error=None) if what == "tied" else inner
    specs = planned()
    owns = at(ordering, probe) if what == "tied" else lambda r: (r.ordering, r.probe) == (ordering, probe)
    reports = [change(report) if owns(report) and report.step == step else report for report in healthy(specs)]
    judgement = judge(specs, reports)
    expected = (Verdict.INCONCLUSIVE, ["reference_not_run"]) if due else (Verdict.PASS, ["clean"])
    assert (judgement.verdict, codes(judgement)) == expected


def test_who_owns_nothing_needs_no_single_process_run() -> None:
    specs = planned()
    idle = lambda report: (  # noqa: E731
        replace(report, divergence=tuple(replace(row, reference_max_abs_error=None) for row in report.divergence))
        if not any(row.owned_elements for row in report.divergence)
        else report
    )
    reports = healthy(specs)
    assert [idle(report) for report in reports] != reports
    assert judge(specs, map(idle, reports)).verdict is Verdict.PASS


def test_a_pass_says_what_no_single_process_run_covered() -> None:
    text = "held against a single process"
    assert f"of gpt's 2 steps the first alone was {text}" in judge(planned(), healthy(planned())).reasons[0].message
    for specs in (planned(steps=1), planned(probes=(EXACT,))):
        assert text not in judge(specs, healthy(specs)).reasons[0].message


def test_on_virtual_ranks_nothing_is_due_that_they_cannot_do_and_a_pass_says_so() -> None:
    specs = planned(steps=1)
    reports = [
        replace(
            report,
            tied=report.tied and replace(report.tied, weights_num_elements=0),
            parameters=tuple(replace(row, reference_max_abs_error=None) for row in report.parameters),
        )
        for report in healthy(specs)
    ]
    judgement = judge(specs, reports, is_virtual=True)
    assert judgement.verdict is Verdict.PASS
    assert "no weight was updated" in judgement.reasons[0].message
    assert set(codes(judge(specs, reports))) == {"weights_not_compared", "reference_not_run"}
    alone = changed(reports, at(FIXED), with_row(reference_max_abs_error=None))
    assert codes(judge(specs, alone, is_virtual=True)) == ["reference_not_run"]


def test_the_ends_were_not_compared_with_each_other() -> None:
    assert_turns(lambda r: replace(r, tied=None), at(OWN_BUCKET), Verdict.INCONCLUSIVE, "ends_not_compared")


@pytest.mark.parametrize("world_rank", range(4))
@pytest.mark.parametrize("ordering", [BUGGY, FIXED])
def test_a_missing_rank(world_rank: int, ordering: OrderingName) -> None:
    specs = planned(probes=(GPT,))
    reports = [r for r in healthy(specs) if (r.ordering, r.world_rank) != (ordering, world_rank)]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["missing_reports"])
    assert "2 of 8 reports never came" in judgement.reasons[0].message
    trial = summary_of(judgement, GPT, ordering)
    assert trial.missing_reports == ((0, 0, world_rank), (0, 1, world_rank))
    assert not trial.ok


def test_a_rank_between_the_ends_must_report_too() -> None:
    specs = planned(Mesh(2, 3))
    judgement = judge(specs, [r for r in healthy(specs) if r.world_rank != 2])
    assert (judgement.verdict, set(codes(judgement))) == (Verdict.INCONCLUSIVE, {"missing_reports"})


def test_a_repeat_that_never_ran() -> None:
    specs = planned(repeats=2, probes=(GPT,))
    judgement = judge(specs, [r for r in healthy(specs) if r.repeat == 0])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert all(len(trial.missing_reports) == 8 for trial in judgement.trials)


def test_no_report_at_all() -> None:
    judgement = judge(planned(), ())
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert set(codes(judgement)) == {"missing_reports"}


def test_a_control_that_was_not_seen() -> None:
    specs = planned()
    blind = with_row(diverged_elements=0, missed_elements=1024, max_abs_error=0.0)
    reports = [blind(r) if r.ordering is BUGGY and r.probe is GPT and r.divergence else r for r in healthy(specs)]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["control_not_seen"])
    assert "none of the 8192 elements" in judgement.reasons[0].message


@pytest.mark.parametrize("end", [End.WTE, End.LM_HEAD])
@pytest.mark.parametrize(
    "values",
    [{"missed_elements": 1}, {"unexpected_elements": 1}, {"missed_elements": 1, "unexpected_elements": 1}],
)
def test_a_control_seen_elsewhere_than_predicted(values: dict[str, int], end: End) -> None:
    """At one end, in one step, by one element: counts that cancel between ends or steps must not hide it."""
    for probe in ProbeName:
        assert_turns(with_row(**values), at(BUGGY, probe, end), Verdict.INCONCLUSIVE, "control_mismatch")


def test_an_inapplicable_control_that_diverges() -> None:
    specs = planned(Mesh(1, 2), probes=(GPT,))
    change = with_row(diverged_elements=1, unexpected_elements=1)
    judgement = judge(specs, changed(healthy(specs), at(BUGGY), change))
    assert (judgement.verdict, codes(judgement)) == (
        Verdict.INCONCLUSIVE,
        ["control_mismatch", "control_not_applicable"],
    )


def test_ranks_that_predict_more_than_the_layouts_allow() -> None:
    change = with_row(predicted_elements=2049, diverged_elements=2049)
    assert_turns(change, at(BUGGY), Verdict.INCONCLUSIVE, "prediction_mismatch")
    # A subject's reports may not excuse a divergence by predicting it.
    judgement = assert_turns(
        with_row(predicted_elements=1), at(OWN_BUCKET), Verdict.INCONCLUSIVE, "prediction_mismatch"
    )
    assert "but the layouts allow 0" in judgement.reasons[0].message


MISFITS: list[tuple[str, dict[str, Any]]] = [
    ("is of none of the 6 trials", {"trial_index": 6}),
    ("is of none of the 6 trials", {"trial_index": -1}),
    ("another trial", {"ordering": ALL_REDUCE}),
    ("another trial", {"repeat": 1}),
    ("is outside", {"step": 2}),
    ("is outside", {"world_rank": 4}),
    ("claims dp_rank 1", {"dp_rank": 1}),
    ("twice with different contents", {"loss": 1.0}),
]


@pytest.mark.parametrize(("text", "values"), MISFITS)
def test_a_report_that_fits_nowhere_is_not_counted_and_not_ignored(text: str, values: dict[str, Any]) -> None:
    specs = planned()
    reports = healthy(specs)
    judgement = judge(specs, [*reports, replace(reports[0], **values)])
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["report_mismatch"])
    assert text in judgement.reasons[0].message
    assert judgement.trials == judge(specs, reports).trials


# --- whatever happens ---------------------------------------------------------------------------------------------


DAMAGE: list[tuple[str, Change]] = [
    *((name, with_row(**{name: 1})) for name in ("diverged_elements", "unexpected_elements", "nonfinite_elements")),
    *(
        (name, with_row(**{name: 1}))
        for name in ("missed_elements", "predicted_elements", "reference_exceeded_elements")
    ),
    ("owned_elements", with_row(owned_elements=0)),
    ("rows", lambda report: replace(report, divergence=())),
    ("replica", lambda report: replace(report, replica=ReplicaRow("x", "y"))),
    ("loss", lambda report: replace(report, loss=inf)),
]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("world_rank", range(4))
@pytest.mark.parametrize(("_", "change"), DAMAGE, ids=[name for name, _ in DAMAGE])
def test_no_damage_to_a_subject_is_ever_green(_: str, change: Change, world_rank: int, step: int) -> None:
    specs = planned(orderings=(BUGGY, OWN_BUCKET), probes=(GPT,))
    place = (OWN_BUCKET, step, world_rank)
    reports = changed(healthy(specs), lambda r: (r.ordering, r.step, r.world_rank) == place, change)
    judgement = judge(specs, reports)
    assert judgement.verdict is not Verdict.PASS
    assert not summary_of(judgement, GPT, OWN_BUCKET).ok
    assert summary_of(judgement, GPT, BUGGY).ok


def test_a_judge_whose_bound_hides_every_share_is_a_doubt_for_subjects_only() -> None:
    specs = planned(grad_reduce_dtype=Dtype.BFLOAT16)
    assert judge(specs, healthy(specs)).reasons[0].message.startswith("On dp=2 x pp=2, summed over dp in bfloat16: ")
    for share, verdict in ((0.99, Verdict.PASS), (1.0, Verdict.INCONCLUSIVE), (inf, Verdict.INCONCLUSIVE)):
        for name, expected in ((OWN_BUCKET, verdict), (BUGGY, Verdict.PASS)):
            reports = [
                replace(r, divergence=tuple(replace(row, min_detectable_share=share) for row in r.divergence))
                if (r.ordering, r.probe) == (name, GPT)
                else r
                for r in healthy(specs)
            ]
            judgement = judge(specs, reports)
            assert judgement.verdict is expected, (share, name)
            assert expected is Verdict.PASS or [reason.code for reason in judgement.reasons] == ["judge_blind"]


def test_a_green_verdict_counts_what_was_wrong_beyond_the_predicted_apart() -> None:
    specs = planned(probes=(GPT,))
    reports = healthy(specs)
    assert "wrong in exactly the" in judge(specs, reports).reasons[0].message
    index = next(i for i, r in enumerate(reports) if r.ordering is BUGGY and r.divergence)
    row = reports[index].divergence[0]
    more = replace(row, predicted_elements=row.predicted_elements - 1, diverged_elements=row.diverged_elements)
    reports[index] = replace(reports[index], divergence=(more,))
    message = judge(specs, reports).reasons[0].message
    assert "predicted, and in 1 more whose errors rounding could have hidden" in message


def with_norm(report: StepReport, **changes: Any) -> StepReport:
    assert report.grad_norm is not None
    return replace(report, grad_norm=replace(report.grad_norm, **changes))


@pytest.mark.parametrize("ordering", [BUGGY, OWN_BUCKET])
def test_ranks_with_another_norm_fail_whatever_the_ordering(ordering: OrderingName) -> None:
    specs = planned()
    tampered = changed(
        healthy(specs),
        lambda report: report.ordering is ordering and report.world_rank == 3,
        lambda report: with_norm(report, value=2.5000000000000004),
    )
    judgement = judge(specs, tampered)
    assert (judgement.verdict, codes(judgement)) == (Verdict.FAIL, ["grad_norm_disagrees"])
    assert "the rank on world_rank 3 in repeat 0, step 0" in judgement.reasons[0].message


@pytest.mark.parametrize("value", [2.5 + 2e-9, 2.5 - 2e-9, inf])
def test_a_subjects_norm_outside_its_bound_fails(value: float) -> None:
    specs = planned()
    shared = [
        with_norm(report, value=value) if (report.ordering, report.probe, report.step) == (FIXED, GPT, 0) else report
        for report in healthy(specs)
    ]
    judgement = judge(specs, shared)
    assert judgement.verdict is Verdict.FAIL
    assert codes(judgement)[-1] == "grad_norm_wrong"
    trial = next(t for t in judgement.trials if (t.probe, t.ordering) == (GPT, FIXED))
    assert (trial.ok, trial.grad_norm) == (False, 2.5)
    assert trial.grad_norm_max_error == abs(value - 2.5)


def test_a_norm_within_its_bound_is_right() -> None:
    specs = planned()
    shared = [with_norm(report, value=2.5 + 5e-10) if report.ordering is FIXED else report for report in healthy(specs)]
    assert judge(specs, shared).verdict is Verdict.PASS


def test_a_norm_that_is_nan_everywhere_is_not_finite() -> None:
    specs = planned()
    judgement = judge(specs, [with_norm(report, value=nan) for report in healthy(specs)])
    assert judgement.verdict is Verdict.FAIL
    assert {"non_finite", "grad_norm_wrong"} == set(codes(judgement))


@pytest.mark.parametrize("lost", ["norm", "reference"])
def test_a_norm_that_nobody_judged_is_no_pass(lost: str) -> None:
    specs = planned()

    def lose(report: StepReport) -> StepReport:
        if lost == "norm":
            return replace(report, grad_norm=None)
        return with_norm(report, reference=None, allowed_error=None)

    reports = [lose(report) if (report.probe, report.step) == (EXACT, 1) else report for report in healthy(specs)]
    judgement = judge(specs, reports)
    assert (judgement.verdict, set(codes(judgement))) == (Verdict.INCONCLUSIVE, {"grad_norm_not_judged"})


def test_a_slow_rank_is_noticed_and_decides_nothing() -> None:
    specs = planned()
    seconds = {0: 0.05, 1: 0.35, 2: 0.05, 3: 0.05}
    reports = [
        replace(report, compute_seconds={"forward_backward": seconds[report.world_rank]}) for report in healthy(specs)
    ]
    judgement = judge(specs, reports)
    assert judgement.verdict is Verdict.PASS
    assert [(one.code, one.world_rank) for one in judgement.observations] == [("straggler", 1)]


def collective_row(**changes: Any) -> CollectiveRow:
    row = CollectiveRow("dp", (0, 1), Primitive.ALL_REDUCE, CollectiveOp.SUM, (1, 9), 40, 0.5, 0, None)
    return replace(row, **changes)


def test_self_tests_are_added_up_and_a_rank_without_one_is_a_doubt() -> None:
    specs = planned()
    reports = [replace(report, collectives=(collective_row(),)) for report in healthy(specs)]
    judgement = judge(specs, reports)
    assert judgement.verdict is Verdict.PASS
    (summary,) = judgement.collectives
    assert (summary.ok, summary.num_ranks, summary.size_bytes, summary.seconds) == (True, 2, 40, 0.5)
    silent = [replace(report, collectives=()) if report.world_rank == 1 else report for report in reports]
    doubted = judge(specs, silent)
    assert (doubted.verdict, codes(doubted)) == (Verdict.INCONCLUSIVE, ["collectives_not_tested"])


def test_a_wrong_collective_fails_and_names_everything() -> None:
    specs = planned()
    wrong = collective_row(wrong_elements=2, first_wrong=CollectiveFault(9, 8, 770.0, 513.0, 1))
    reports = [
        replace(report, collectives=(wrong if report.world_rank == 1 else collective_row(),))
        for report in healthy(specs)
    ]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.FAIL, ["collective_wrong"])
    message = judgement.reasons[0].message
    for part in ("all_reduce (sum)", "group dp", "[0, 1]", "world ranks [1]", "of 9 elements, element 8 is 513.0"):
        assert part in message
    assert "should be 770.0, as if the share of world_rank 1 were lost" in message
    assert [row.ok for row in judgement.collectives] == [False]


# --- somebody else's stack ----------------------------------------------------------------------------------------


def assert_stack_turns(verdict: Verdict, code: str, probe: ProbeName = EXACT, **values: Any) -> str:
    """The same of an experiment with a foreign stack; returns what the reason says."""
    specs = planned(orderings=(BUGGY,), stack="acme")
    reports = healthy(specs)
    assert judge(specs, reports).verdict is Verdict.PASS

    def change(report: StepReport) -> StepReport:
        assert report.stack is not None
        return replace(report, stack=replace(report.stack, **values))

    def where(report: StepReport) -> bool:
        return (report.ordering, report.probe, report.world_rank) == (ForeignOrdering.STACK, probe, 3)

    judgement = judge(specs, changed(reports, where, change))
    assert (judgement.verdict, codes(judgement)) == (verdict, [code])
    return judgement.reasons[0].message


@pytest.mark.parametrize("fault", StackFault)
def test_a_stacks_fault_fails_with_stack_parameter_and_rank(fault: StackFault) -> None:
    found = StackFinding(fault, "layers.0.weight", 3, "differs from what it should be")
    message = assert_stack_turns(Verdict.FAIL, f"stack_{fault.value}", findings=(found,))
    assert message.startswith("exact/stack acme: layers.0.weight differs from what it should be, on world_rank 3")


@pytest.mark.parametrize("missing", ["gradient_elements", "update_elements"])
def test_a_parameter_that_nobody_judged_is_no_pass(missing: str) -> None:
    specs = planned(orderings=(BUGGY,), stack="acme", probes=(EXACT,))
    reports = [
        replace(report, stack=report.stack and replace(report.stack, **{missing: 1})) for report in healthy(specs)
    ]
    judgement = judge(specs, reports)
    assert (judgement.verdict, codes(judgement)) == (Verdict.INCONCLUSIVE, ["stack_not_judged"])


def test_ranks_with_different_versions_of_a_stack_prove_nothing() -> None:
    other = StackOrigin("acme", "acme_stack:build", "acme-stack", "1.3")
    message = assert_stack_turns(Verdict.INCONCLUSIVE, "stack_differs", GPT, origin=other)
    assert "acme-stack 1.2" in message
    assert "acme-stack 1.3" in message
