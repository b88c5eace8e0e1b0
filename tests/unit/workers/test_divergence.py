"""The judge's bound holds for every order of additions, and each fault is counted where it is and nowhere else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_mesh import JudgedMesh, each

from workers import exchange
from workers.contract import Mesh, Normalization, OrderingName, ProbeName, Role
from workers.divergence import EndJudgement, element_at, rounding_bound
from workers.grad_sync import Prescale
from workers.intervals import Interval
from workers.layout import PrescaleKind

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
TINY = st.floats(width=32, allow_nan=False, min_value=-(2.0**-120), max_value=2.0**-120)
MESHES = [Mesh(1, 1), Mesh(1, 2), Mesh(2, 1), Mesh(2, 2), Mesh(3, 2), Mesh(2, 3), Mesh(4, 2)]
PROBES = list(ProbeName)


# --- the bound -------------------------------------------------------------------------------------------------------


def scaled(value: np.float32, prescale: Prescale) -> np.float32:
    tensor = torch.tensor([value])
    prescale.apply(tensor)
    return np.float32(tensor.numpy()[0])


def inverse_scaled(value: np.float32, prescale: Prescale) -> np.float32:
    """How CUDA divides by a number."""
    return np.float32(value * np.float32(1 / prescale.divisor))


def random_order_sum(terms: list[np.float32], order: random.Random) -> np.float32:
    """Any two partial sums are added next, so every tree of additions can come up."""
    pool = list(terms)
    while len(pool) > 1:
        a, b = (pool.pop(order.randrange(len(pool))) for _ in range(2))
        pool.append(np.float32(a + b))
    return pool[0]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@settings(max_examples=200, deadline=None)
@given(
    terms=st.lists(FINITE | TINY, min_size=2, max_size=14),
    divisor=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 11]),
    kind=st.sampled_from(PrescaleKind),
    scale=st.sampled_from([scaled, inverse_scaled]),
    ties_first=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_no_order_of_additions_leaves_the_bound(
    terms: list[float],
    divisor: int,
    kind: PrescaleKind,
    scale: Callable[[np.float32, Prescale], np.float32],
    ties_first: bool,
    order: random.Random,
) -> None:
    prescale = Prescale(kind, divisor)
    values = [np.float32(term) for term in terms]
    if ties_first:
        # As `fixed` does: pairs are added before anything is scaled.
        pairs = [values[index : index + 2] for index in range(0, len(values), 2)]
        rounded = [scale(random_order_sum(pair, order), prescale) for pair in pairs]
    else:
        rounded = [scale(value, prescale) for value in values]
    computed = Fraction(float(random_order_sum(rounded, order)))
    truth = sum((Fraction(float(value)) for value in values), Fraction(0)) / divisor
    magnitude = (torch.tensor(values, dtype=torch.float64).abs() * prescale.factor).sum()
    bound = Fraction(float(rounding_bound(magnitude, len(values), prescale)))
    assert abs(computed - truth) <= bound


def test_the_bound_is_tight_enough_to_see_a_lost_term() -> None:
    bound = float(rounding_bound(torch.tensor(8.0, dtype=torch.float64), 8, Prescale(PrescaleKind.DIVIDE, 4)))
    assert 7 * 8 * 2**-24 <= bound < 7.01 * 8 * 2**-24


def test_powers_of_two_scale_without_rounding() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    exact, rounded = (float(rounding_bound(one, 2, Prescale(PrescaleKind.DIVIDE, dp))) for dp in (4, 3))
    assert exact == pytest.approx(2**-24, rel=1e-6)
    assert rounded == pytest.approx(3 * 2**-24, rel=1e-6)


# --- a right sync ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_every_ordering_diverges_exactly_where_predicted(ordering: OrderingName, mesh: Mesh, probe: ProbeName) -> None:
    world = JudgedMesh(ordering, mesh, probe)
    judged = world.judge()
    for rank, judgement in judged.items():
        row = judgement.divergence
        wrong = sorted(world.misowned() & set(world.owned(rank)))
        assert row.owned_elements == len(world.owned(rank))
        assert row.diverged_elements == row.predicted_elements == len(wrong)
        assert (row.missed_elements, row.unexpected_elements, row.nonfinite_elements) == (0, 0, 0)
        assert (row.first_diverged, row.last_diverged) == ((wrong[0], wrong[-1]) if wrong else (None, None))
        assert row.reference_exceeded_elements == 0
    compared = sum(judgement.tied.num_elements for judgement in judged.values() if judgement.tied)
    copies = 1 if world.ordering.distributed_optimizer else mesh.dp
    assert compared == (world.local[0].numel() * copies if mesh.pp > 1 else 0)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(3, 2), Mesh(2, 2, vpp=2)], ids=str)
def test_the_reporter_s_fix_diverges_under_overlap(mesh: Mesh, probe: ProbeName) -> None:
    world = JudgedMesh(OrderingName.FIXED, mesh, probe, overlap=True, bucket_size=700)
    assert world.misowned()
    for rank, judgement in world.judge().items():
        row = judgement.divergence
        wrong = world.misowned() & set(world.owned(rank))
        assert row.diverged_elements == row.predicted_elements == len(wrong)
        assert (row.missed_elements, row.unexpected_elements) == (0, 0)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 2), Mesh(3, 2), Mesh(2, 1)], ids=str)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_averaging_in_the_collective_is_predicted_too(ordering: OrderingName, mesh: Mesh, probe: ProbeName) -> None:
    world = JudgedMesh(ordering, mesh, probe, average_in_collective=True)
    diverged = 0
    for rank, judgement in world.judge().items():
        row = judgement.divergence
        assert (row.missed_elements, row.unexpected_elements, row.reference_exceeded_elements) == (0, 0, 0)
        assert row.diverged_elements == row.predicted_elements <= len(world.misowned() & set(world.owned(rank)))
        diverged += row.diverged_elements
    assert bool(diverged) == bool(world.misowned())


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 2), Mesh(3, 2), Mesh(2, 1)], ids=str)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_division_by_valid_tokens_is_judged_against_all_of_them(
    ordering: OrderingName, mesh: Mesh, probe: ProbeName
) -> None:
    world = JudgedMesh(ordering, mesh, probe, normalization=Normalization.NUM_TOKENS)
    means = ordering is OrderingName.MEAN_OF_MEANS and mesh.dp > 1
    for rank, judgement in world.judge().items():
        row = judgement.divergence
        assert (row.missed_elements, row.unexpected_elements, row.reference_exceeded_elements) == (0, 0, 0)
        wrong = world.owned(rank) if means else world.misowned() & set(world.owned(rank))
        assert row.diverged_elements == row.predicted_elements
        assert row.diverged_elements == len(wrong) or (means and row.diverged_elements > 0.9 * len(wrong))
        assert not judgement.tied or judgement.tied.exceeded_elements == 0 or world.ordering.role is Role.CONTROL


def test_only_the_unaligned_bucket_shards_a_weight_in_several_intervals() -> None:
    """The cases above cover owners of several intervals only if there are such owners."""
    counts = {
        ordering: max(len(owned) for owned in JudgedMesh(ordering, Mesh(2, 2)).expectation.owned)
        for ordering in OrderingName
    }
    assert counts[OrderingName.OWN_BUCKET_UNALIGNED] == 2


@pytest.mark.parametrize("ordering", list(OrderingName))
def test_small_pieces_change_no_count(ordering: OrderingName, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = JudgedMesh(ordering, Mesh(3, 2)).judge()
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 97)
    for rank, judgement in JudgedMesh(ordering, Mesh(3, 2)).judge().items():
        assert_alike(judgement, whole[rank])


def assert_alike(one: EndJudgement, other: EndJudgement) -> None:
    """All fields equal, but for the last bits of sums that were added piece by piece."""
    assert one.tied == other.tied
    for name in one.divergence.__slots__:
        a, b = getattr(one.divergence, name), getattr(other.divergence, name)
        assert a == (pytest.approx(b, rel=1e-6, abs=1e-9, nan_ok=True) if isinstance(b, float) else b), name


# --- faults ----------------------------------------------------------------------------------------------------------

SUBJECTS = [OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("ordering", SUBJECTS)
def test_one_flipped_element_is_found_on_its_owner(ordering: OrderingName, probe: ProbeName) -> None:
    world = JudgedMesh(ordering, Mesh(3, 2), probe)
    world.synchronise()
    rank = world.holders[4]
    element = world.owned(rank)[5]
    world.synced[rank][element] *= 1 + 2**-12
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements) == {rank: 1}
    assert each(judged, lambda j: j.divergence.unexpected_elements) == {rank: 1}
    row = judged[rank].divergence
    assert (row.first_diverged, row.last_diverged) == (element, element)
    assert row.max_error_over_bound > 1


@pytest.mark.parametrize("ordering", SUBJECTS)
def test_a_change_outside_the_owned_elements_is_no_fault(ordering: OrderingName) -> None:
    world = JudgedMesh(ordering, Mesh(3, 2))
    world.synchronise()
    rank = world.holders[1]
    foreign = sorted(set(range(world.local[rank].numel())) - set(world.owned(rank)))
    world.synced[rank][foreign] = 99.0
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements + j.divergence.unexpected_elements) == {}


@pytest.mark.parametrize("times", [0.0, 2.0], ids=["dropped", "doubled"])
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("ordering", SUBJECTS)
def test_a_dropped_or_doubled_contribution_is_found_at_both_owners(
    ordering: OrderingName, probe: ProbeName, times: float
) -> None:
    world = JudgedMesh(ordering, Mesh(3, 2), probe)
    broken = range(10, 25)
    world.held(world.holders[2])[list(broken)] *= times
    judged = world.judge()
    expected = {rank: len(set(broken) & set(world.owned(rank))) for rank in world.holders}
    assert each(judged, lambda j: j.divergence.diverged_elements) == {r: n for r, n in expected.items() if n}
    assert each(judged, lambda j: j.divergence.unexpected_elements) == {r: n for r, n in expected.items() if n}


@pytest.mark.parametrize("ordering", SUBJECTS)
def test_a_sum_that_went_to_another_owner_is_wrong_in_every_element(ordering: OrderingName) -> None:
    world = JudgedMesh(ordering, Mesh(2, 2))
    world.synchronise()
    rank = world.holders[1]
    owned = world.owned(rank)
    world.synced[rank][owned] = world.local[rank][owned] / 2
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements) == {rank: len(owned)}


@pytest.mark.parametrize("ordering", SUBJECTS)
def test_values_in_the_wrong_place_are_wrong(ordering: OrderingName) -> None:
    world = JudgedMesh(ordering, Mesh(2, 2))
    world.synchronise()
    rank = world.holders[0]
    owned = world.owned(rank)
    world.synced[rank][owned] = world.synced[rank][owned].roll(1)
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements) == {rank: len(owned)}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_a_non_finite_gradient_of_any_one_rank_is_never_hidden(
    ordering: OrderingName, probe: ProbeName, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 500)
    element = 2700
    for rank in (0, 2, 4):
        world = JudgedMesh(ordering, Mesh(3, 2), probe)
        for values in (world.held(rank), world.local[rank]):
            values[element] = bad
        judged = world.judge()
        seen = [owner for owner in world.owners(element) if judged[owner].divergence.nonfinite_elements]
        assert seen
        for owner in seen:
            row = judged[owner].divergence
            assert row.nonfinite_elements == 1
            assert row.diverged_elements >= 1
            assert row.unexpected_elements >= 1
            # Pieces before and after this one are finite; the peak must not forget.
            assert not math.isfinite(row.max_abs_error)
            assert not math.isfinite(row.sum)
        if element not in world.misowned():
            assert seen == world.owners(element)


def test_a_non_finite_gradient_that_the_sum_lost_still_diverges() -> None:
    world = JudgedMesh(OrderingName.OWN_BUCKET, Mesh(2, 2))
    world.local[world.holders[3]][7] = math.nan
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements) == dict.fromkeys(world.owners(7), 1)


def test_a_nan_at_one_end_shows_in_the_tied_difference() -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(2, 2))
    world.synchronise()
    lm_head_owner = world.owners(3)[-1]
    world.synced[lm_head_owner][3] = math.nan
    tied = [judgement.tied for judgement in world.judge().values() if judgement.tied]
    assert sum(row.exceeded_elements for row in tied) == 1
    assert any(math.isnan(row.max_abs_difference) for row in tied)


@pytest.mark.parametrize("ordering", [OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE])
def test_ends_that_must_agree_to_the_bit_are_held_to_it(ordering: OrderingName) -> None:
    world = JudgedMesh(ordering, Mesh(2, 2))
    world.synchronise()
    rank = world.owners(11)[-1]
    world.synced[rank][11] = torch.nextafter(world.synced[rank][11], torch.tensor(math.inf))
    tied = [judgement.tied for judgement in world.judge().values() if judgement.tied]
    assert sum(row.exceeded_elements for row in tied) == sum(row.unequal_elements for row in tied) == 1


@pytest.mark.parametrize("probe", PROBES)
def test_a_control_that_is_right_where_it_should_be_wrong_is_missed(probe: ProbeName) -> None:
    world = JudgedMesh(OrderingName.BUGGY, Mesh(2, 2), probe)
    right = JudgedMesh(OrderingName.ALL_REDUCE, Mesh(2, 2), probe)
    world.synchronise()
    right.synchronise()
    rank = world.owners(min(world.misowned()))[0]
    wrong = sorted(world.misowned() & set(world.owned(rank)))
    # Both use one layout, so the values may be taken over.
    world.synced[rank].copy_(right.synced[rank])
    row = world.judge()[rank].divergence
    assert row.predicted_elements == row.missed_elements == row.unexpected_elements == len(wrong)
    assert row.diverged_elements == 0


@pytest.mark.parametrize("probe", PROBES)
def test_a_control_that_is_wrong_by_another_value_is_unexpected(probe: ProbeName) -> None:
    world = JudgedMesh(OrderingName.BUGGY, Mesh(2, 2), probe)
    world.synchronise()
    element = min(world.misowned())
    rank = world.owners(element)[0]
    world.synced[rank][element] += 1
    row = world.judge()[rank].divergence
    assert row.unexpected_elements == 1
    assert row.missed_elements == (1 if probe is ProbeName.EXACT else 0)


def test_a_contribution_on_which_all_ranks_agree_is_held_against_the_replay() -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(2, 2), floor=1e-6)
    for rank in world.holders:
        world.held(rank).mul_(0.5)
        world.local[rank].mul_(0.5)
    judged = world.judge()
    for rank, judgement in judged.items():
        assert judgement.divergence.diverged_elements == 0
        assert judgement.divergence.reference_exceeded_elements == len(world.owned(rank))


def test_the_exact_probe_s_truth_is_the_integer_answer_not_what_ranks_computed() -> None:
    world = JudgedMesh(OrderingName.FIXED, Mesh(2, 2), ProbeName.EXACT)
    for values in (world.held(world.holders[0]), world.local[world.holders[0]]):
        values[3] += 1
    judged = world.judge()
    assert each(judged, lambda j: j.divergence.diverged_elements) == dict.fromkeys(world.owners(3), 1)


def test_the_ratio_names_a_sum_that_should_be_a_mean() -> None:
    world = JudgedMesh(OrderingName.OWN_BUCKET, Mesh(2, 2))
    world.synchronise()
    for values in world.synced.values():
        values.mul_(2)
    for judgement in world.judge().values():
        assert judgement.divergence.ratio_to_expected == pytest.approx(2, abs=1e-6)


def test_element_at() -> None:
    intervals = (Interval(3, 5), Interval(10, 13))
    assert [element_at(intervals, position) for position in range(5)] == [3, 4, 10, 11, 12]
    with pytest.raises(IndexError, match="position 0"):
        element_at(intervals, 5)
