"""How many digits fit: never past 2^24, always the most, and none where there is no room."""

from __future__ import annotations

import pytest

from workers.contract import TINY, BatchSpec, Device, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.exactness import CODE_DIGITS, EXACT_LIMIT, code_digits, coded_bound, exact_bound, tied_bound
from workers.experiment import ExperimentSpec, trials


def default_trial(mesh: Mesh) -> TrialSpec:
    return trials(ExperimentSpec(mesh=mesh, probes=(ProbeName.EXACT,)), Device.CPU)[0]


@pytest.mark.parametrize(
    ("mesh", "digits"),
    [(Mesh(1, 1), 4), (Mesh(2, 2), 4), (Mesh(128, 8), 4), (Mesh(512, 2), 4), (Mesh(512, 8), 2), (Mesh(16, 64), 2)],
    ids=str,
)
def test_digits_by_mesh(mesh: Mesh, digits: int) -> None:
    spec = default_trial(mesh)
    assert code_digits(spec) == digits
    largest = tied_bound(spec.model, spec.batch, mesh.dp)
    assert coded_bound(largest, digits) <= EXACT_LIMIT
    if digits < max(CODE_DIGITS):
        assert coded_bound(largest, 2 * digits) > EXACT_LIMIT


def test_every_default_mesh_within_the_product_s_ranks_is_signed() -> None:
    for dp in range(1, 1025):
        for pp in range(1, 1024 // dp + 1, 7):
            assert code_digits(default_trial(Mesh(dp, pp))) > 0


def test_a_request_that_fills_the_exact_range_is_not_signed() -> None:
    batch = BatchSpec(1, 4096)
    spec = TrialSpec(ProbeName.EXACT, OrderingName.FIXED, Mesh(64, 2), TINY, batch)
    assert exact_bound(TINY, batch, 64) > EXACT_LIMIT / 4
    wide = TrialSpec(ProbeName.EXACT, OrderingName.FIXED, Mesh(64, 2), ModelSpec(8, 32, 4, 4, 16), batch)
    assert code_digits(wide) == 0
    assert code_digits(spec) in (0, 1, 2)


def test_the_coded_bound_is_reached_by_a_sum_that_everyone_signs() -> None:
    assert coded_bound(1, 4) == 256 + 1 + 4 + 16 + 64
    assert coded_bound(7, 1) == 4 * 7 + 1
    assert coded_bound(7, 0) == 7
