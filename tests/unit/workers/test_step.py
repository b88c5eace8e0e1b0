"""The small pure parts of a step: sums over a tensor, and who owns what."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from workers import step
from workers.checks.finiteness import count_nonfinite
from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.intervals import Interval, count, union
from workers.orderings import ORDERINGS, RANK_PHASES, SyncPhase
from workers.step import expect, moments


def test_every_sync_phase_has_a_place() -> None:
    assert set(RANK_PHASES) == set(SyncPhase)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_elements_are_counted(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(1000, dtype=dtype)
    assert count_nonfinite(values) == 0
    values[[3, 999]] = bad
    assert count_nonfinite(values) == 2


def test_opposite_infinities_do_not_cancel_and_a_large_sum_is_no_fault() -> None:
    assert count_nonfinite(torch.tensor([math.inf, -math.inf, 0.0])) == 2
    assert count_nonfinite(torch.full((10,), 3e38)) == 0
    assert count_nonfinite(torch.zeros(0)) == 0


def test_moments_are_added_in_float64() -> None:
    values = torch.full((step.BLOCK_ELEMENTS * 2 + 3,), 0.1)
    total, l2 = moments(values)
    exact = Fraction(float(values[0]))
    assert total == pytest.approx(float(exact * len(values)), rel=1e-13)
    assert l2 == pytest.approx(math.sqrt(exact * exact * len(values)), rel=1e-13)
    assert moments(torch.zeros(0)) == (0.0, 0.0)
    assert all(map(math.isnan, moments(torch.tensor([1.0, math.nan]))))


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(2, 1), Mesh(1, 2), Mesh(3, 2), Mesh(2, 3)], ids=str)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_owners_cover_the_weight_once_per_end(ordering: OrderingName, mesh: Mesh) -> None:
    spec = TrialSpec(ProbeName.GPT, ordering, mesh, ModelSpec(11, 12, 4, 3, 4), BatchSpec(1, 4))
    expectation = expect(spec, ORDERINGS[ordering])
    whole = (Interval(0, 11 * 12),)
    for end in range(len(expectation.owned) // mesh.dp):
        owned = expectation.owned[end * mesh.dp : (end + 1) * mesh.dp]
        covered = ()
        for intervals in owned:
            covered = union(covered, intervals)
        assert covered == whole
        copies = 1 if expectation.sharded else mesh.dp
        assert sum(map(count, owned)) == count(whole) * copies
