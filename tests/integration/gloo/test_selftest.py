"""The whole fault catalogue on real ranks: each fault is caught, by its judges, and named, whoever is guilty."""

from __future__ import annotations

import pytest

from workers.contract import Mesh
from workers.faults import FAULTS, FaultName, Outcome
from workers.selftest import Finding, run_selftest

QUIET = [name for name, fault in FAULTS.items() if fault.outcome is not Outcome.ERROR]


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
