"""Every number of a row, recomputed element by element with fractions and numpy from the same tensors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from judged_mesh import JudgedMesh

from workers import exchange
from workers.contract import End, Mesh, OrderingName, ProbeName
from workers.divergence import UNIT_ROUNDOFF, rounding_bound
from workers.grad_sync import Prescale
from workers.layout import PrescaleKind

FLOOR = 1e-3


def struck_mesh(ordering: OrderingName, monkeypatch: pytest.MonkeyPatch) -> tuple[JudgedMesh, dict[int, list[int]]]:
    """gpt on 3 x 2 ranks, judged in small pieces; two elements of each of three owners are wrong."""
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 97)
    world = JudgedMesh(ordering, Mesh(3, 2), floor=FLOOR)
    world.synchronise()
    struck = {}
    for rank, share in zip(world.holders[:3], (0.01, 0.02, 0.03), strict=True):
        owned = world.owned(rank)
        struck[rank] = [owned[3], owned[-2]] if owned else []
        world.synced[rank][struck[rank]] += share
    return world, struck


@pytest.mark.parametrize("ordering", [OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE])
def test_every_number_of_a_subject_s_row(ordering: OrderingName, monkeypatch: pytest.MonkeyPatch) -> None:
    world, struck = struck_mesh(ordering, monkeypatch)
    astray = 7
    world.replayed[world.holders[4]][astray] += 3 * 2.5 * FLOOR
    terms, replayed = (
        np.stack([gradient[rank].double().numpy() for rank in world.holders]) / 3
        for gradient in (world.local, world.replayed)
    )
    bounds = rounding_bound(torch.tensor(np.abs(terms).sum(axis=0)), 6, world.expectation.prescale).numpy()
    for index, (rank, judgement) in enumerate(world.judge().items()):
        row, at = judgement.divergence, world.owned(rank)
        if not at:
            assert (row.owned_elements, row.diverged_elements, row.sum) == (0, 0, 0)
            continue
        values, truth = world.synced[rank].double().numpy()[at], terms.sum(axis=0)[at]
        error = np.abs(values - truth)
        assert row.end is (End.WTE if index < 3 else End.LM_HEAD)
        assert row.owned_elements == len(at)
        assert (row.predicted_elements, row.missed_elements, row.nonfinite_elements) == (0, 0, 0)
        wrong = [e for e, bad in zip(at, error > bounds[at], strict=True) if bad]
        assert wrong == struck.get(rank, [])
        assert row.diverged_elements == row.unexpected_elements == len(wrong)
        assert (row.first_diverged, row.last_diverged) == ((wrong[0], wrong[-1]) if wrong else (None, None))
        reference_error = np.abs(values - replayed.sum(axis=0)[at])
        expected = {
            "max_abs_error": error.max(),
            "relative_l2_error": np.linalg.norm(error) / np.linalg.norm(truth),
            "max_error_over_bound": (error / bounds[at]).max(),
            "ratio_to_expected": values @ truth / (truth @ truth),
            "reference_max_abs_error": reference_error.max(),
            "min_detectable_share": bounds[at].max() / np.abs(terms)[:, at].max(),
            "sum": values.sum(),
            "l2": np.linalg.norm(values),
        }
        assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, rel=1e-6, abs=0)
        # A third of the floor of six contributors, twice; the one share astray is beyond its own floor.
        exceeded = set(np.array(at)[reference_error > 2 * 6 * FLOOR / 3 + bounds[at]])
        assert row.reference_exceeded_elements == len(exceeded | ({astray} & set(at)))


@pytest.mark.parametrize(
    ("share", "exceeded"), [(0.9, 0), (1.1, 1), (1.9, 1)], ids=["inside", "beyond the sum's", "beyond the sum's by far"]
)
def test_the_reference_s_floors_are_allowed_twice(share: float, exceeded: int) -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(2, 2), floor=FLOOR)
    world.synchronise()
    rank = next(rank for rank in world.holders if world.owned(rank))
    world.synced[rank][world.owned(rank)[0]] += share * 2 * 4 * FLOOR / 2
    assert world.judge()[rank].divergence.reference_exceeded_elements == exceeded


@pytest.mark.parametrize(("share", "exceeded"), [(0.95, 0), (1.05, 1)], ids=["inside", "beyond"])
def test_a_contributor_s_own_floor_is_allowed_twice(share: float, exceeded: int) -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(2, 2), floor=FLOOR)
    element = world.owned(world.holders[0])[0] if world.owned(world.holders[0]) else world.owned(world.holders[1])[0]
    world.replayed[world.holders[2]][element] += share * 2 * FLOOR
    judged = world.judge()
    for rank in world.owners(element):
        assert judged[rank].divergence.reference_exceeded_elements == exceeded


@pytest.mark.parametrize(("share", "exceeded"), [(1.6, 0), (2.4, 1)], ids=["inside", "beyond"])
def test_ends_may_differ_by_twice_the_bound(share: float, exceeded: int) -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(3, 2))
    world.synchronise()
    rank = next(rank for rank in world.holders[:3] if world.owned(rank))
    element = world.owned(rank)[0]
    terms = torch.stack([world.local[holder][element].double() for holder in world.holders]) / 3
    bound = rounding_bound(terms.abs().sum(), 6, world.expectation.prescale)
    other = next(r for r in world.owners(element) if r != rank)
    world.synced[rank][element] = world.synced[other][element] + share * bound
    tied = world.judge()[rank].tied
    assert tied is not None
    assert (tied.num_elements, tied.exceeded_elements) == (len(world.owned(rank)), exceeded)
    assert tied.unequal_elements >= 1
    assert tied.max_abs_difference == pytest.approx(float(share * bound), rel=0.1)


def test_bit_tied_ends_may_not_differ_at_all() -> None:
    world = JudgedMesh(OrderingName.OWN_BUCKET, Mesh(3, 2))
    world.synchronise()
    rank = world.holders[0]
    element = world.owned(rank)[0]
    value = world.synced[rank][element]
    world.synced[rank][element] = torch.nextafter(value, value + 1)
    judged = world.judge()
    tied = [judgement.tied for judgement in judged.values() if judgement.tied is not None]
    assert len(tied) == 3
    assert [(row.unequal_elements, row.exceeded_elements) for row in tied] == [(1, 1), (0, 0), (0, 0)]
    assert [row.max_abs_difference > 0 for row in tied] == [True, False, False]
    assert all(judgement.divergence.diverged_elements == 0 for judgement in judged.values())


@pytest.mark.parametrize("num_terms", [1, 2, 6, 100])
@pytest.mark.parametrize(("divisor", "extra"), [(1, 0), (4, 0), (3, 2), (6, 2)])
def test_the_bound_is_its_formula_and_hardly_more(num_terms: int, divisor: int, extra: int) -> None:
    unit, magnitude = Fraction(UNIT_ROUNDOFF), Fraction(7)
    first_order = (num_terms - 1 + extra) * unit * magnitude
    one = torch.tensor(float(magnitude), dtype=torch.float64)
    bound = Fraction(float(rounding_bound(one, num_terms, Prescale(PrescaleKind.DIVIDE, divisor))))
    double = (2 * num_terms + 4) * Fraction(2.0**-53) * magnitude
    assert first_order + double <= bound <= first_order * (1 + 4 * (num_terms + extra) * unit) + double * (1 + unit)


def test_the_bound_of_nothing_is_one_subnormal_a_term() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(rounding_bound(zero, 5, Prescale(PrescaleKind.DIVIDE, 3))) == 5 * math.ulp(0.0) * 2.0**925


def test_the_exact_probe_allows_nothing() -> None:
    world = JudgedMesh(OrderingName.OWN_BUCKET, Mesh(2, 2), ProbeName.EXACT)
    row = world.judge()[world.holders[0]].divergence
    assert (row.max_error_over_bound, row.min_detectable_share, row.relative_l2_error) == (0, 0, 0)
    assert row.ratio_to_expected == 1
