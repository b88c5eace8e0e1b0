"""The owner's judge on pieces made by hand: every statistic, every limit from both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.contract import Dtype, Mesh, ProbeName
from workers.contributions import TiedSync
from workers.divergence import EndJudgement, Span, judge_pieces, rounding_bound
from workers.exchange import Expectation, Piece
from workers.grad_sync import Prescale
from workers.intervals import Interval
from workers.layout import PrescaleKind
from workers.wire import Wire

HALF = Prescale(PrescaleKind.DIVIDE, 2)
TWO_REPLICAS = Expectation(
    probe=ProbeName.GPT,
    mesh=Mesh(2, 1),
    members=(10, 11),
    prescale=HALF,
    sharded=True,
    bit_tied=True,
    tied_sync=None,
    owned=((Interval(4, 6), Interval(20, 22)), ()),
    code=None,
)
"""World rank 10 owns elements 4, 5, 20 and 21."""


def piece(
    start: int, synced: Sequence[float], local: Sequence[Sequence[float]], floors: Sequence[float] = (), **more: Any
) -> Piece:
    """One interval's elements from `start`; `local` by contributor."""
    fields: dict[str, Any] = {
        "intervals": (Interval(start, start + len(synced)),),
        "synced_n": torch.tensor(synced),
        "local_Cn": torch.tensor(local),
        "replay_Cn": torch.tensor(local) if floors else None,
        "floor_C": torch.tensor(floors) if floors else None,
        "other_end_n": None,
        "weight_n": torch.zeros(len(synced)),
        "other_weight_n": None,
        "late_Cn": None,
    }
    return Piece(**fields | more)


def judge(*pieces: Piece, expectation: Expectation = TWO_REPLICAS) -> EndJudgement:
    return judge_pieces(expectation, expectation.members[0], pieces, torch.zeros(30), None)


# --- against the ranks' own sum --------------------------------------------------------------------------------------

RIGHT = piece(4, [2.0, 3.0], [[1.0, 2.0], [3.0, 4.0]])
WRONG = piece(20, [4.0, 9.0], [[4.0, 8.0], [4.0, 8.0]])
"""Element 20 is right; 21 is 9 for 8."""


def test_every_statistic_by_hand() -> None:
    judged = judge(RIGHT, WRONG)
    row = judged.divergence
    assert (row.owned_elements, row.diverged_elements, row.unexpected_elements, row.nonfinite_elements) == (4, 1, 1, 0)
    assert (row.first_diverged, row.last_diverged) == (21, 21)
    assert row.max_abs_error == 1
    assert row.sum == 2 + 3 + 4 + 9
    assert row.l2 == pytest.approx(math.sqrt(4 + 9 + 16 + 81), rel=1e-12)
    truth_squared = 4 + 9 + 16 + 64
    assert row.relative_l2_error == pytest.approx(1 / math.sqrt(truth_squared), rel=1e-12)
    assert row.ratio_to_expected == pytest.approx((4 + 9 + 16 + 72) / truth_squared, rel=1e-12)
    largest_bound = float(rounding_bound(torch.tensor(8.0, dtype=torch.float64), 2, HALF))
    assert row.max_error_over_bound == pytest.approx(1 / largest_bound, rel=1e-12)
    assert row.min_detectable_share == pytest.approx(largest_bound / 4, rel=1e-12)
    surprise = judged.surprise
    assert (surprise.span.first, surprise.span.last) == (21, 21)
    assert (surprise.max_abs, surprise.max_over_bound) == (1, pytest.approx(1 / largest_bound, rel=1e-12))


def test_what_was_not_there_is_not_told() -> None:
    judged = judge(RIGHT)
    assert judged.tied is None
    assert judged.divergence.reference_max_abs_error is None
    assert judged.astray.world_ranks == set()


def test_a_round_without_a_piece_adds_nothing() -> None:
    nothing = replace(piece(0, [], [[], []]), intervals=())
    assert judge(RIGHT, nothing).divergence == judge(RIGHT).divergence


@pytest.mark.parametrize("inside", [True, False])
def test_the_bound_is_held_from_both_sides(inside: bool) -> None:
    bound = float(rounding_bound(torch.tensor(1.0, dtype=torch.float64), 2, HALF))
    off = 1.0 + bound * (0.999 if inside else 1.001)
    given = piece(4, [0.0], [[1.0], [1.0]], synced_n=torch.tensor([off], dtype=torch.float64))
    row = judge(given).divergence
    assert (row.diverged_elements, row.unexpected_elements) == ((0, 0) if inside else (1, 1))


def test_a_sum_where_nothing_was_given_is_endlessly_wrong() -> None:
    row = judge(piece(4, [1.0], [[0.0], [0.0]])).divergence
    assert row.relative_l2_error == math.inf
    assert math.isnan(row.ratio_to_expected)
    clean = judge(piece(4, [0.0], [[0.0], [0.0]])).divergence
    assert (clean.relative_l2_error, clean.max_abs_error, clean.max_error_over_bound) == (0, 0, 0)


def test_the_span_grows_both_ways() -> None:
    span = Span()
    for start, picked in ((10, [False, True, False]), (3, [True, False, False]), (6, [False, False, False])):
        span.include((Interval(start, start + 3),), torch.tensor(picked))
    assert (span.first, span.last) == (3, 11)


# --- against the replay ----------------------------------------------------------------------------------------------


def replayed(synced: float, local: Sequence[float], replay: Sequence[float], floors: Sequence[float]) -> EndJudgement:
    parts = torch.tensor([[value] for value in local], dtype=torch.float64)
    return judge(
        piece(
            4,
            [0.0],
            [[0.0], [0.0]],
            floors,
            synced_n=torch.tensor([synced], dtype=torch.float64),
            local_Cn=parts,
            replay_Cn=torch.tensor([[value] for value in replay], dtype=torch.float64),
        )
    )


FLOORS = (2**-3, 2**-4)
"""Of contributors; halved they are the sums' share."""
ALLOWED = 2 * (2**-3 + 2**-4) / 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("inside", [True, False])
def test_a_sum_may_be_off_the_replay_by_twice_all_floors(inside: bool, sign: int) -> None:
    synced = 1 + sign * ALLOWED * (0.999 if inside else 1.001)
    row = replayed(synced, [1.0, 1.0], [1.0, 1.0], FLOORS).divergence
    assert row.reference_exceeded_elements == (0 if inside else 1)
    assert row.reference_max_abs_error == pytest.approx(abs(synced - 1), rel=1e-12)


@pytest.mark.parametrize("contributor", [0, 1])
@pytest.mark.parametrize("inside", [True, False])
def test_a_contributor_may_be_off_its_replay_by_twice_its_floor(inside: bool, contributor: int) -> None:
    replay = [1.0, 1.0]
    replay[contributor] += 2 * FLOORS[contributor] * (0.999 if inside else 1.001)
    judged = replayed(1.0, [1.0, 1.0], replay, FLOORS)
    assert judged.astray.world_ranks == (set() if inside else {TWO_REPLICAS.members[contributor]})
    # The sum itself is within: alone the contributor's own distance counts here.
    assert judged.divergence.reference_exceeded_elements == (0 if inside else 1)


def test_those_astray_are_gathered_over_pieces_with_their_span() -> None:
    first = piece(4, [2.0, 2.0], [[1.0, 1.0], [3.0, 3.0]], (0.1, 0.1), replay_Cn=torch.tensor([[1.0, 5.0], [3.0, 3.0]]))
    clean = piece(20, [2.0], [[1.0], [3.0]], (0.1, 0.1))
    last = piece(21, [2.0], [[1.0], [3.0]], (0.1, 0.1), replay_Cn=torch.tensor([[1.0], [4.0]]))
    astray = judge(first, clean, last).astray
    assert astray.world_ranks == {10, 11}
    assert (astray.span.first, astray.span.last) == (5, 21)
    alone = judge(first, clean).astray
    assert (alone.world_ranks, alone.span.first, alone.span.last) == ({10}, 5, 5)


def test_an_element_exceeds_where_either_the_sum_or_a_part_does() -> None:
    local = [[1.0, 1.0], [1.0, 1.0]]
    given = piece(4, [9.0, 1.0], local, (0.1, 0.1), replay_Cn=torch.tensor([[1.0, 1.0], [1.0, 1.15 + 0.1]]))
    assert judge(given).divergence.reference_exceeded_elements == 2


# --- the two ends ----------------------------------------------------------------------------------------------------


def ends(difference: float, bit_tied: bool, **more: Any) -> EndJudgement:
    one = torch.tensor([1.0], dtype=torch.float64)
    given = piece(4, [0.0], [[1.0], [1.0]], synced_n=one, other_end_n=one + difference, **more)
    return judge(given, expectation=replace(TWO_REPLICAS, bit_tied=bit_tied))


BOUND = float(rounding_bound(torch.tensor(1.0, dtype=torch.float64), 2, HALF))


@pytest.mark.parametrize(
    ("difference", "bit_tied", "unequal", "exceeded"),
    [
        (0.0, True, 0, 0),
        (0.5 * BOUND, True, 1, 1),
        (0.5 * BOUND, False, 1, 0),
        (1.999 * BOUND, False, 1, 0),
        (-1.999 * BOUND, False, 1, 0),
        (2.001 * BOUND, False, 1, 1),
        (0.0, False, 0, 0),
    ],
)
def test_the_ends_may_differ_by_two_bounds_unless_tied_to_the_bit(
    difference: float, bit_tied: bool, unequal: int, exceeded: int
) -> None:
    tied = ends(difference, bit_tied).tied
    assert tied is not None
    assert (tied.num_elements, tied.unequal_elements, tied.exceeded_elements) == (1, unequal, exceeded)
    assert tied.max_abs_difference == pytest.approx(abs(difference), rel=1e-6)
    assert (tied.weights_num_elements, tied.weights_max_abs_difference) == (0, 0)


def test_the_ends_weights_are_compared_too() -> None:
    weights = {"weight_n": torch.tensor([2.0]), "other_weight_n": torch.tensor([2.75])}
    tied = ends(0.0, True, **weights).tied
    assert tied is not None
    assert (tied.weights_num_elements, tied.weights_max_abs_difference) == (1, 0.75)


# --- elements that an ordering is predicted to get wrong -------------------------------------------------------------

TIED = TiedSync(dp=2, summed=0.5, local=0.5, misowned=(Interval(4, 5),), early=(Interval(4, 6),))
"""Element 4 has other owners at the ends, and its bucket was scattered early; so was that of 5, whose owner agrees."""
FOUR_HOLDERS = Expectation(
    probe=ProbeName.GPT,
    mesh=Mesh(2, 2),
    members=(0, 1, 2, 3),
    prescale=HALF,
    sharded=True,
    bit_tied=True,
    tied_sync=TIED,
    owned=((Interval(4, 8),), (), (), ()),
    code=None,
)
LOCAL_CN = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [1000.0, 2000.0, 3000.0]])
LATE_CN = torch.tensor([[0.25, 0.5, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def left_by_hand(with_late: bool = True) -> list[float]:
    """What dp rank 0 has of wte after scatter, late gradient and tie: element 4, 5, 6."""
    (a, b, c, d), late = LOCAL_CN.tolist(), LATE_CN.tolist()
    early = [
        [x - with_late * y for x, y in zip(local, after, strict=True)]
        for local, after in zip((a, b), late, strict=False)
    ]
    own = [(early[0][n] + early[1][n]) / 2 + with_late * late[0][n] for n in range(3)]
    # At the other end rank 2 owns 5 and 6, and of 4 has only its own half.
    return [own[0] + c[0] / 2, own[1] + (c[1] + d[1]) / 2, own[2] + (c[2] + d[2]) / 2]


def mixed(values: Sequence[float], late_Cn: Tensor | None = LATE_CN, **replay: Any) -> EndJudgement:
    given = Piece(
        intervals=(Interval(4, 7),),
        synced_n=torch.tensor(values, dtype=torch.float64),
        local_Cn=LOCAL_CN,
        replay_Cn=replay.get("replay_Cn"),
        floor_C=replay.get("floor_C"),
        other_end_n=None,
        weight_n=torch.zeros(3),
        other_weight_n=None,
        late_Cn=late_Cn,
    )
    return judge(given, expectation=FOUR_HOLDERS)


def test_what_comes_late_is_predicted_to_the_value() -> None:
    row = mixed(left_by_hand()).divergence
    assert (row.diverged_elements, row.predicted_elements) == (2, 2)
    assert (row.missed_elements, row.unexpected_elements) == (0, 0)


def test_without_anything_late_only_misowned_elements_are_wrong() -> None:
    row = mixed(left_by_hand(with_late=False), late_Cn=torch.zeros_like(LATE_CN)).divergence
    assert (row.diverged_elements, row.predicted_elements, row.unexpected_elements) == (1, 1, 0)
    row = mixed(left_by_hand(with_late=False), late_Cn=None).divergence
    assert (row.diverged_elements, row.predicted_elements, row.unexpected_elements) == (1, 1, 0)


@pytest.mark.parametrize("element", [0, 1, 2])
def test_another_value_than_the_predicted_one_is_a_surprise(element: int) -> None:
    values = left_by_hand()
    values[element] += 0.01
    judged = mixed(values)
    assert judged.divergence.unexpected_elements == 1
    assert (judged.surprise.span.first, judged.surprise.span.last) == (4 + element, 4 + element)
    assert judged.surprise.max_abs == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("element", [0, 1])
@pytest.mark.parametrize("inside", [True, False])
def test_a_prediction_s_bound_counts_all_that_goes_into_it(element: int, inside: bool) -> None:
    """Both roundings on top, and the late parts' sizes."""
    values, late = left_by_hand(), LATE_CN.double()
    [mixture] = [m for m in TIED.mixtures(0, 0) if any(i.start <= 4 + element < i.stop for i in m.elements)]
    whole, late_factors = torch.tensor(mixture.whole).double(), torch.tensor(mixture.late).double()
    magnitude = whole.abs() @ LOCAL_CN.double().abs()[:, element] + late_factors.abs() @ late[:, element].abs()
    truth_magnitude = LOCAL_CN.double().abs()[:, element].sum() / 2
    bound = max(float(rounding_bound(magnitude, 6, HALF)), float(rounding_bound(truth_magnitude, 4, HALF)))
    values[element] += bound * (0.999 if inside else 1.001)
    assert mixed(values).divergence.unexpected_elements == (0 if inside else 1)


# --- the bound itself ------------------------------------------------------------------------------------------------

U, D = Fraction(1, 2**24), Fraction(1, 2**53)
SUBNORMAL = {Dtype.FLOAT32: Fraction(1, 2**149), Dtype.BFLOAT16: Fraction(1, 2**133)}


@pytest.mark.parametrize("num_terms", [1, 2, 5, 64])
@pytest.mark.parametrize(("divisor", "extra"), [(1, 0), (2, 0), (8, 0), (3, 2), (5, 2), (6, 2), (7, 2), (12, 2)])
@pytest.mark.parametrize("dtype", list(SUBNORMAL))
def test_the_bound_term_by_term(num_terms: int, divisor: int, extra: int, dtype: Dtype) -> None:
    """(n-1+e) u, its second order, the truth's 2n+4 double roundings, the wire's error of all, a subnormal a term."""
    wire = Wire(dtype, 4, divisor) if dtype is not Dtype.FLOAT32 else Wire()
    relative = (num_terms - 1 + extra) * U * (1 + 2 * (num_terms + extra) * U) + (2 * num_terms + 4) * D
    relative += (1 + relative) * Fraction(wire.relative_error)
    for magnitude in (0.0, 3.0):
        expected = float(Fraction(magnitude) * relative + num_terms * SUBNORMAL[dtype])
        prescale = replace(Prescale(PrescaleKind.DIVIDE, divisor), wire=wire)
        found = float(rounding_bound(torch.tensor(magnitude, dtype=torch.float64), num_terms, prescale))
        assert found == pytest.approx(expected, rel=1e-13, abs=0)
