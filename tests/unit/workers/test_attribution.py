"""Who is named for what: the least change of healthy reports that points to a rank, and what points to nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from healthy import EXACT, FIXED, GPT, OWN_BUCKET, healthy, planned

from workers.attribution import Guilt, find_guilt, narrow, node_of, odd_ones_out
from workers.contract import (
    Contributor,
    Deviation,
    DeviationKind,
    End,
    Mesh,
    NonfiniteRow,
    OrderingName,
    ParameterElement,
    Phase,
    ProbeName,
    RankPhase,
    StepReport,
    Verdict,
)
from workers.evidence import collect, sift
from workers.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS
from workers.verdict import judge

BIAS = ParameterElement("decoder.layers.0.bias", 3)
PROJECTION = ParameterElement("decoder.layers.0.a.weight", 7)


def reports_of(ordering: OrderingName, mesh: Mesh = Mesh(), probe: ProbeName = EXACT) -> list[StepReport]:  # noqa: B008
    return healthy(planned(mesh, (ordering,), (probe,), steps=1))


def guilt_in(reports: Sequence[StepReport], ordering: OrderingName, mesh: Mesh = Mesh()) -> Guilt | None:  # noqa: B008
    specs = planned(mesh, (ordering,), (reports[0].probe,), steps=1)
    (evidence,) = collect(specs, sift(specs, reports).accepted)
    return find_guilt(evidence)


def on(reports: Sequence[StepReport], world_rank: int, **values: Any) -> list[StepReport]:
    return [replace(report, **values) if report.world_rank == world_rank else report for report in reports]


def with_parameters(report: StepReport, phase: Phase, **values: Any) -> StepReport:
    rows = tuple(replace(row, **values) if row.phase is phase else row for row in report.parameters)
    return replace(report, parameters=rows)


def spoil(reports: Sequence[StepReport], world_rank: int, **values: Any) -> list[StepReport]:
    wrong = {"unexpected_elements": 1, "first_unexpected": BIAS, "last_unexpected": BIAS} | values
    return [with_parameters(each, Phase.FINAL, **wrong) if each.world_rank == world_rank else each for each in reports]


def owners(reports: Sequence[StepReport], *world_ranks: int) -> list[StepReport]:
    """The reports with these ranks as owners of some of every parameter."""
    return [
        replace(each, parameters=tuple(replace(row, owned_elements=9) for row in each.parameters))
        if each.world_rank in world_ranks
        else each
        for each in reports
    ]


def blaming(kind: DeviationKind, end: End, dp_rank: int, world_rank: int) -> tuple[Deviation, ...]:
    return (Deviation(kind, (Contributor(end, dp_rank, world_rank),), 1, 0.0, 0.0, 0, 5),)


def spoil_end(report: StepReport, deviations: tuple[Deviation, ...] = ()) -> StepReport:
    (row,) = report.divergence
    wrong = replace(row, diverged_elements=2, first_diverged=4, last_diverged=6, deviations=deviations)
    return replace(report, divergence=(wrong,))


def test_nothing_wrong_points_to_nobody() -> None:
    for ordering in OrderingName:
        for probe in ProbeName:
            assert guilt_in(reports_of(ordering, probe=probe), ordering) is None


def test_the_first_phase_with_a_nan_decides_though_later_everybody_has_it() -> None:
    late = (NonfiniteRow(RankPhase.TIE, 5, PROJECTION, PROJECTION),)
    early = (NonfiniteRow(RankPhase.DP_SYNC, 1, BIAS, BIAS), *late)
    reports = reports_of(OWN_BUCKET)
    for world_rank in range(4):
        reports = on(reports, world_rank, nonfinite=early if world_rank == 2 else late)
    assert guilt_in(reports, OWN_BUCKET) == Guilt((2,), RankPhase.DP_SYNC, BIAS)


def test_phases_come_in_the_ordering_s_own_order() -> None:
    reports = on(reports_of(FIXED), 1, nonfinite=(NonfiniteRow(RankPhase.TIE, 1, BIAS, BIAS),))
    reports = on(reports, 0, nonfinite=(NonfiniteRow(RankPhase.DP_SYNC, 1, BIAS, BIAS),))
    assert guilt_in(reports, FIXED) == Guilt((1,), RankPhase.TIE, BIAS)


@pytest.mark.parametrize("world_rank", [0, 1, 2])
def test_three_replicas_outvote_one_whichever_it_is(world_rank: int) -> None:
    mesh = Mesh(3, 1)
    reports = reports_of(OWN_BUCKET, mesh)
    healthy_row = reports[0].replica
    for digest, phase in (("weights_digest", RankPhase.OPTIMIZER), ("initial_weights_digest", RankPhase.BUILDING)):
        odd = on(reports, world_rank, replica=replace(healthy_row, **{digest: "other"}))
        assert guilt_in(odd, OWN_BUCKET, mesh) == Guilt((world_rank,), phase, None)


def test_two_replicas_that_differ_are_both_suspects_until_something_tells_them_apart() -> None:
    reports = reports_of(OWN_BUCKET)
    odd = on(reports, 1, replica=replace(reports[1].replica, weights_digest="other"))
    assert guilt_in(odd, OWN_BUCKET) == Guilt((0, 1), RankPhase.OPTIMIZER, None)


@pytest.mark.parametrize("world_rank", [0, 1])
@pytest.mark.parametrize("damaged", ["kept_digest", "received_digest"])
def test_of_two_replicas_the_one_that_no_longer_has_what_was_sent_is_named(world_rank: int, damaged: str) -> None:
    reports = reports_of(OWN_BUCKET)
    for rank in (0, 1):
        row = replace(
            reports[rank].replica, sent_digest=f"of {rank}", kept_digest=f"of {rank}", received_digest=f"of {1 - rank}"
        )
        if rank == world_rank:
            row = replace(row, weights_digest="other", **{damaged: "something else"})
        reports = on(reports, rank, replica=row)
    assert guilt_in(reports, OWN_BUCKET) == Guilt((world_rank,), RankPhase.OPTIMIZER, None)


@pytest.mark.parametrize("world_rank", [0, 1])
def test_of_two_replicas_the_replay_names_the_one_with_other_initial_weights(world_rank: int) -> None:
    reports = reports_of(OWN_BUCKET)
    reports = on(reports, 0, replica=replace(reports[0].replica, initial_weights_digest="other"))
    reports = [with_parameters(each, Phase.FINAL, deviating_ranks=(world_rank, 2)) for each in reports]
    assert guilt_in(reports, OWN_BUCKET) == Guilt((world_rank,), RankPhase.BUILDING, None)


def test_a_local_gradient_outranks_what_it_does_to_every_sum() -> None:
    reports = reports_of(OWN_BUCKET)
    reports = [with_parameters(each, Phase.FINAL, unexpected_elements=5) for each in reports]
    seen = {"deviating_ranks": (3,), "first_deviating": BIAS, "last_deviating": BIAS}
    reports = [with_parameters(each, Phase.FINAL, **seen) if each.world_rank == 2 else each for each in reports]
    assert guilt_in(reports, OWN_BUCKET) == Guilt((3,), RankPhase.FORWARD_BACKWARD, BIAS)


def test_a_tied_gradient_that_was_wrong_by_itself_names_its_rank() -> None:
    reports = [
        spoil_end(each, blaming(DeviationKind.LOCAL, End.LM_HEAD, 1, 3)) if each.divergence else each
        for each in reports_of(OWN_BUCKET)
    ]
    guilt = guilt_in(reports, OWN_BUCKET)
    assert guilt is not None
    assert (guilt.world_rank, guilt.phase) == (3, RankPhase.FORWARD_BACKWARD)


def test_one_owner_s_wrong_sums_beside_another_s_right_ones_name_the_owner() -> None:
    dropped = blaming(DeviationKind.DROPPED, End.WTE, 1, 1)
    reports = spoil(owners(reports_of(OWN_BUCKET), 0, 1), 0, deviations=dropped)
    assert guilt_in(reports, OWN_BUCKET) == Guilt((0,), RankPhase.DP_SYNC, BIAS)


def test_where_one_rank_owns_everything_the_one_whose_share_is_missing_is_as_suspect() -> None:
    mesh = Mesh(2, 3)
    dropped = blaming(DeviationKind.DROPPED, End.WTE, 1, 3)
    reports = spoil(reports_of(FIXED, mesh), 2, deviations=dropped)
    assert guilt_in(reports, FIXED, mesh) == Guilt((2, 3), RankPhase.DP_SYNC, BIAS)


def test_a_share_that_is_wrong_at_every_owner_names_who_gave_it() -> None:
    scaled = blaming(DeviationKind.SCALE, End.WTE, 1, 1)
    reports = owners(reports_of(OWN_BUCKET), 0, 1)
    for owner, element in ((0, BIAS), (1, PROJECTION)):
        reports = spoil(reports, owner, first_unexpected=element, last_unexpected=element, deviations=scaled)
    assert guilt_in(reports, OWN_BUCKET) == Guilt((1,), RankPhase.DP_SYNC, None)


def test_owners_that_are_wrong_for_different_reasons_are_all_suspects() -> None:
    reports = owners(reports_of(OWN_BUCKET), 0, 1)
    for owner, blamed in ((0, 1), (1, 0)):
        deviations = blaming(DeviationKind.DROPPED, End.WTE, blamed, blamed)
        reports = spoil(reports, owner, deviations=deviations)
    assert guilt_in(reports, OWN_BUCKET) == Guilt((0, 1), RankPhase.DP_SYNC, BIAS)


def test_an_end_that_is_wrong_after_sums_that_were_right_was_tied_wrongly_by_its_owner() -> None:
    reports = [spoil_end(each) if each.world_rank == 3 else each for each in reports_of(OWN_BUCKET)]
    assert guilt_in(reports, OWN_BUCKET) == Guilt((3,), RankPhase.TIE, ParameterElement(OUTPUT_LAYER, 4))


def test_both_ends_are_copies_of_one_parameter() -> None:
    reports = [spoil_end(each) if each.divergence else each for each in reports_of(OWN_BUCKET)]
    guilt = guilt_in(reports, OWN_BUCKET)
    assert guilt is not None
    assert (guilt.suspects, guilt.first) == ((0, 1, 2, 3), ParameterElement(WORD_EMBEDDINGS, 4))


@pytest.mark.parametrize("owner", [0, 1])
def test_an_early_tie_that_left_one_pipeline_s_ends_apart_names_the_end_that_is_wrong(owner: int) -> None:
    reports = [replace(each, replica=replace(each.replica, tied_digest="t")) for each in reports_of(FIXED)]
    reports = on(reports, 2, replica=replace(reports[2].replica, tied_digest="another"))
    # Whoever owns the elements that pipeline 0 spoiled.
    reports = [spoil_end(each) if each.world_rank == owner else each for each in reports]
    assert guilt_in(reports, FIXED) == Guilt((0,), RankPhase.TIE, ParameterElement(WORD_EMBEDDINGS, 4))


def test_after_an_early_tie_that_was_right_the_sums_were_wrong() -> None:
    scaled = blaming(DeviationKind.SCALE, End.LM_HEAD, 1, 3)
    reports = [replace(each, replica=replace(each.replica, tied_digest="t")) for each in reports_of(FIXED)]
    reports = [spoil_end(each, scaled) if each.world_rank in (0, 1) else each for each in reports]
    assert guilt_in(reports, FIXED) == Guilt((1,), RankPhase.DP_SYNC, ParameterElement(WORD_EMBEDDINGS, 4))


TP = Mesh(2, 1, 2)
ROW_BIAS = ParameterElement("decoder.layers.1.row_bias", 2)


def spoil_layernorms(report: StepReport, **values: Any) -> StepReport:
    """As if what its tensor-parallel ranks sum were wrong on this rank, from the 19th element on: layer 1's third."""
    row = replace(report.divergence[0], end=End.LAYERNORM, first_diverged=18, **values)
    return replace(report, divergence=(report.divergence[0], row))


@pytest.mark.parametrize("world_rank", range(4))
def test_a_layernorm_that_is_wrong_after_sums_that_were_right_names_its_rank(world_rank: int) -> None:
    wrong = {"diverged_elements": 2, "unexpected_elements": 2, "last_diverged": 40}
    for ordering in (OWN_BUCKET, FIXED, OrderingName.BUGGY, OrderingName.LAYERNORM_AVERAGED):
        reports = reports_of(ordering, TP)
        reports[world_rank] = spoil_layernorms(reports[world_rank], **wrong)
        assert guilt_in(reports, ordering, TP) == Guilt((world_rank,), RankPhase.LAYERNORM, ROW_BIAS)


def test_a_layernorm_that_is_wrong_as_the_ordering_makes_it_points_to_nobody() -> None:
    ordering = OrderingName.LAYERNORM_SKIPPED
    reports = [spoil_layernorms(each, diverged_elements=16) for each in reports_of(ordering, TP)]
    assert guilt_in(reports, ordering, TP) is None


def test_a_layernorm_gradient_that_was_wrong_by_itself_is_named() -> None:
    deviations = (Deviation(DeviationKind.LOCAL, (Contributor(End.LAYERNORM, 1, 3),), 1, None, 0.0, 18, 1),)
    reports = [spoil_layernorms(each, deviations=deviations) for each in reports_of(OWN_BUCKET, TP)]
    assert guilt_in(reports, OWN_BUCKET, TP) == Guilt((3,), RankPhase.FORWARD_BACKWARD, ROW_BIAS)


def test_a_share_that_is_wrong_names_who_gave_it_among_the_replicas_of_its_tensor_rank() -> None:
    scaled = blaming(DeviationKind.SCALE, End.WTE, 1, 3)
    reports = owners(reports_of(OWN_BUCKET, TP), *range(4))
    for owner, element in ((1, BIAS), (3, PROJECTION)):
        reports = spoil(reports, owner, first_unexpected=element, last_unexpected=element, deviations=scaled)
    assert guilt_in(reports, OWN_BUCKET, TP) == Guilt((3,), RankPhase.DP_SYNC, None)


def test_without_a_pipeline_nothing_is_tied_and_a_wrong_tied_weight_was_summed_wrongly() -> None:
    reports = [spoil_end(each) if each.world_rank == 3 else each for each in owners(reports_of(OWN_BUCKET, TP), 1, 3)]
    assert guilt_in(reports, OWN_BUCKET, TP) == Guilt((3,), RankPhase.DP_SYNC, ParameterElement(WORD_EMBEDDINGS, 4))


def test_tensor_ranks_hold_other_parts_and_only_their_own_pipeline_s_ends_must_agree() -> None:
    mesh = Mesh(1, 2, 2)
    reports = [
        replace(each, replica=replace(each.replica, tied_digest=f"of {each.tp_rank}"))
        for each in reports_of(FIXED, mesh)
    ]
    reports = [spoil_end(each) if each.world_rank == 2 else each for each in reports]
    assert guilt_in(reports, FIXED, mesh) == Guilt((2,), RankPhase.DP_SYNC, ParameterElement(OUTPUT_LAYER, 4))
    reports = on(reports, 2, replica=replace(reports[2].replica, tied_digest="another"))
    assert guilt_in(reports, FIXED, mesh) == Guilt((2,), RankPhase.TIE, ParameterElement(OUTPUT_LAYER, 4))


def test_a_control_s_tied_weight_points_to_nobody() -> None:
    ordering = OrderingName.BUGGY
    reports = [spoil_end(each) if each.divergence else each for each in reports_of(ordering)]
    assert guilt_in(reports, ordering) is None


def test_all_trials_together_leave_the_rank_that_each_of_them_suspects() -> None:
    def suspecting(*ranks: int) -> Guilt:
        return Guilt(ranks, RankPhase.DP_SYNC, None)

    assert narrow({"a": suspecting(0, 1), "b": None, "c": suspecting(1)}) == {
        "a": suspecting(1),
        "b": None,
        "c": suspecting(1),
    }
    apart = {"a": suspecting(0), "b": suspecting(1)}
    assert narrow(apart) == apart
    assert narrow({"a": None}) == {"a": None}


def test_a_node_is_named_where_all_suspects_and_not_all_ranks_are_on_it() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert node_of(Guilt((2,), RankPhase.TIE, None), nodes) == "b"
    assert node_of(Guilt((2, 3), RankPhase.TIE, None), nodes) == "b"
    assert node_of(Guilt((1, 2), RankPhase.TIE, None), nodes) is None
    everywhere = dict.fromkeys(range(4), "a")
    assert node_of(Guilt((2, 3), RankPhase.TIE, None), everywhere) is None
    assert node_of(Guilt((2,), RankPhase.TIE, None), everywhere) == "a"


def test_odd_ones_out() -> None:
    assert odd_ones_out({0: "x", 1: "x", 2: "x"}) == ()
    assert odd_ones_out({0: "y", 1: "x", 2: "x"}) == (0,)
    assert odd_ones_out({0: "y", 1: "x"}) == (0, 1)
    assert odd_ones_out({0: "y", 1: "z", 2: "x"}) == (0, 1, 2)


def test_every_reason_of_a_failure_says_who_where_and_when() -> None:
    specs = planned(orderings=(OrderingName.BUGGY, OWN_BUCKET), probes=(GPT,), steps=1)
    reports = [
        with_parameters(each, Phase.FINAL, unexpected_elements=1, first_unexpected=BIAS, last_unexpected=BIAS)
        if each.world_rank == 1
        else each
        for each in owners(healthy(specs), 0, 1)
    ]
    judgement = judge(specs, reports, {0: "a", 1: "b", 2: "a", 3: "b"})
    assert judgement.verdict is Verdict.FAIL
    accusing = [reason for reason in judgement.reasons if reason.judge is not None]
    assert {reason.code for reason in accusing} == {"parameter_diverged"}
    for reason in accusing:
        assert (reason.world_rank, reason.node, reason.phase) == (1, "b", RankPhase.DP_SYNC)
        assert (reason.parameter, reason.element) == (BIAS.parameter, BIAS.element)
        assert "at fault: world_rank 1 on b" in reason.message
