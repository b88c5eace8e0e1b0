"""Coefficients come back within the stated uncertainty, and where they could not be, nothing comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.multiplicity import MAX_CONTRIBUTORS, MAX_UNCERTAINTY, fit, snap


@settings(max_examples=60, deadline=None)
@given(
    coefficients=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 4 / 3, 2.0, 3.0]), min_size=1, max_size=12),
    spread=st.floats(0, 3),
    seed=st.integers(0, 2**16),
)
def test_no_coefficient_is_further_off_than_it_says(coefficients: list[float], spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, 80, dtype=torch.float64, generator=generator)
    # From independent terms to almost equal ones.
    own = torch.randn(len(coefficients), 80, dtype=torch.float64, generator=generator)
    terms = common + 10 ** (-2 * spread) * own
    truth = torch.tensor(coefficients, dtype=torch.float64)
    bound = terms.abs().sum(0) * len(coefficients) * 2.0**-24
    noise = (2 * torch.rand(80, dtype=torch.float64, generator=generator) - 1) * max(1.0, max(coefficients)) * bound
    found = fit(truth @ terms + noise, terms, bound)
    if found is not None:
        assert found.uncertainty <= MAX_UNCERTAINTY
        assert (found.coefficients_C - truth).abs().max() <= found.uncertainty
    else:
        assert spread > 1


def test_float32_sums_are_told_to_a_millionth() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(6, 500, generator=generator)
    value = terms[0] + terms[1] + terms[2] * 0.5 + terms[4] + terms[5] + terms[5]
    doubled = terms.double()
    found = fit(value.double(), doubled, doubled.abs().sum(0) * 6 * 2.0**-24)
    assert found is not None
    assert found.coefficients_C.tolist() == [1, 1, 0.5, 0, 1, 2]
    assert found.uncertainty < 1e-5


def test_a_shard_too_short_or_too_much_alike_tells_nothing() -> None:
    short = torch.randn(5, 4, dtype=torch.float64)
    assert fit(short.sum(0), short, torch.zeros(4, dtype=torch.float64)) is None
    alike = torch.ones(2, 90, dtype=torch.float64)
    assert fit(alike.sum(0), alike, torch.full((90,), 1e-7, dtype=torch.float64)) is None
    many = torch.randn(MAX_CONTRIBUTORS + 1, 400, dtype=torch.float64)
    assert fit(many.sum(0), many, torch.zeros(400, dtype=torch.float64)) is None


def test_a_contributor_without_terms_is_not_judged() -> None:
    terms = torch.randn(3, 100, dtype=torch.float64)
    terms[1] = 0
    found = fit(terms.sum(0) - terms[2], terms, torch.full((100,), 1e-9, dtype=torch.float64))
    assert found is not None
    assert found.known_C.tolist() == [True, False, True]
    assert found.coefficients_C.tolist() == [1, 1, 0]


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.0])
def test_snap(value: float) -> None:
    near = torch.tensor([value + 1e-4, value + 1e-2], dtype=torch.float64)
    assert snap(near, 1e-3).tolist() == [value, value + 1e-2]
