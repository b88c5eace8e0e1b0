"""The whole fault catalogue on real ranks: each fault is caught, by its judges, and named, whoever is guilty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.contract import Mesh
from workers.faults import FAULTS, FaultName, Outcome
from workers.local_gang import LocalGang
from workers.selftest import TENSOR_MESH, Exercise, Finding, place_nodes, run_exercises, run_selftest

QUIET = [name for name, fault in FAULTS.items() if fault.outcome is not Outcome.ERROR and not fault.in_tensor_group]


def assert_as_expected(findings: list[Finding]) -> None:
    assert findings
    assert [(each.title, each.world_rank, each.mismatches) for each in findings if not each.ok] == []


@pytest.mark.parametrize("world_rank", range(4))
def test_every_fault_on_every_rank(world_rank: int) -> None:
    findings = run_selftest(Mesh(2, 2), QUIET, [world_rank])
    assert_as_expected(findings)
    skipped = {each.title for each in findings if not each.is_exercised}
    assert skipped == (set() if world_rank >= 2 else {FaultName.NORM_COUNTS_TIED_TWICE.value})


@pytest.mark.parametrize("fault", [FaultName.RAISE_IN, FaultName.KILL_IN])
def test_a_rank_that_breaks_is_named_and_the_next_exercise_has_a_new_gang(fault: FaultName) -> None:
    assert_as_expected(run_selftest(Mesh(2, 1), [fault, FaultName.STALE_VIEW], [1]))


@pytest.mark.parametrize("fault", [FaultName.COLLECTIVES_REORDERED, FaultName.SIZES_UNEQUAL])
@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(2, 1), Mesh(3, 1)], ids=["2x2", "2x1", "3x1"])
def test_a_rank_that_does_not_fit_is_named_with_order_or_shape_before_anybody_mixes_values(
    fault: FaultName, mesh: Mesh
) -> None:
    """On 2x2 two buckets of one size change places; with pp=1 there is one, and a gather of its size comes first."""
    assert_as_expected(run_selftest(mesh, [fault], range(mesh.world_size)))


@pytest.mark.parametrize("world_rank", [0, 4])
def test_of_three_replicas_the_odd_one_is_named_also_where_it_is_the_first(world_rank: int) -> None:
    faults = [FaultName.BIT_IN_WEIGHT, FaultName.OTHER_INITIAL_WEIGHTS, FaultName.TAIL_TRUNCATED]
    assert_as_expected(run_selftest(Mesh(3, 2), faults, [world_rank]))


def test_whoever_skips_the_layernorms_sum_is_named_with_a_layernorm() -> None:
    findings = run_selftest(Mesh(2, 2), [FaultName.LAYERNORM_SKIPPED], range(4))
    assert_as_expected(findings)
    assert [each.is_exercised and each.title for each in findings] == ["layernorm_skipped on 2x1x2"] * 4


@pytest.mark.parametrize(
    ("mesh", "world_rank", "faults"),
    [
        (TENSOR_MESH, 3, [FaultName.TAIL_TRUNCATED, FaultName.OTHER_INITIAL_WEIGHTS]),
        (Mesh(1, 2, 2), 3, [FaultName.TIE_SKIPPED, FaultName.NORM_COUNTS_TIED_TWICE, FaultName.MICROBATCH_LOST]),
    ],
    ids=["2x1x2", "1x2x2"],
)
def test_other_faults_of_one_tensor_rank_are_named_as_ever(
    mesh: Mesh, world_rank: int, faults: list[FaultName]
) -> None:
    findings = run_selftest(mesh, faults, [world_rank])
    assert_as_expected(findings)
    assert all(finding.is_exercised for finding in findings)


def test_under_overlap_gradients_are_spoilt_before_their_bucket_is_sent_and_the_same_each_time() -> None:
    faults = [FaultName.NAN_BEFORE_DP_SYNC, FaultName.PARAMETER_NOT_SYNCHRONISED, FaultName.BIT_IN_GRADIENT]
    chosen = [Exercise(FAULTS[fault], 1, overlap=True) for fault in faults]
    mesh = Mesh(2, 2)
    assert_as_expected(run_exercises(mesh, chosen))
    with LocalGang(place_nodes(mesh)) as gang:
        first, again = (gang.run(chosen[-1].trials(mesh)).reports for _ in range(2))
    assert any(report.drill_struck for report in first)
    # By text, since a NaN is not equal to itself.
    untimed = [
        repr([replace(each, seconds={}, compute_seconds={}, collectives=()) for each in reports])
        for reports in (first, again)
    ]
    assert untimed[0] == untimed[1]
