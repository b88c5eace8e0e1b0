"""Interval arithmetic against sets of elements, element by element."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.intervals import (
    Interval,
    Intervals,
    count,
    intersect,
    lay_end_to_end,
    normalize,
    pieces,
    shift,
    subtract,
    union,
)

raw_intervals = st.lists(st.builds(Interval, st.integers(-20, 40), st.integers(-20, 40)), max_size=8)
sets = raw_intervals.map(normalize)


def elements(intervals: list[Interval] | Intervals) -> set[int]:
    return {element for interval in intervals for element in range(interval.start, interval.stop)}


def assert_canonical(intervals: Intervals) -> None:
    assert all(interval.start < interval.stop for interval in intervals)
    assert all(a.stop < b.start for a, b in pairwise(intervals))


@given(raw_intervals)
def test_normalize_keeps_the_elements_and_is_canonical(raw: list[Interval]) -> None:
    assert elements(normalize(raw)) == elements(raw)
    assert_canonical(normalize(raw))


@given(sets, sets)
def test_set_operations(a: Intervals, b: Intervals) -> None:
    assert elements(union(a, b)) == elements(a) | elements(b)
    assert elements(intersect(a, b)) == elements(a) & elements(b)
    assert elements(subtract(a, b)) == elements(a) - elements(b)
    for result in (union(a, b), intersect(a, b), subtract(a, b)):
        assert_canonical(result)


@given(sets, st.integers(-100, 100))
def test_count_and_shift(a: Intervals, offset: int) -> None:
    assert count(a) == len(elements(a))
    assert elements(shift(a, offset)) == {element + offset for element in elements(a)}


@given(sets, st.integers(1, 12))
def test_pieces_cut_in_order_and_fill_all_but_the_last(a: Intervals, max_elements: int) -> None:
    parts = pieces(a, max_elements)
    in_order = [element for part in parts for interval in part for element in range(interval.start, interval.stop)]
    assert in_order == sorted(elements(a))
    assert all(count(part) == max_elements for part in parts[:-1])
    assert all(0 < count(part) <= max_elements for part in parts[-1:])
    for part in parts:
        assert_canonical(part)


def test_equal_sets_are_equal_tuples() -> None:
    assert normalize([Interval(3, 5), Interval(0, 3), Interval(4, 4)]) == (Interval(0, 5),)


def test_an_empty_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="max_elements is 0"):
        pieces((Interval(0, 3),), 0)


def test_huge_sets_cost_their_intervals_only() -> None:
    huge = (Interval(0, 10**15),)
    assert count(subtract(huge, (Interval(5, 10**14),))) == 10**15 - 10**14 + 5
    assert len(pieces(huge, 10**14)) == 10


def test_things_laid_end_to_end_keep_their_elements_and_their_gaps() -> None:
    parts = [(4, (Interval(1, 3),)), (2, ()), (3, (Interval(0, 3),)), (2, (Interval(0, 1),))]
    assert lay_end_to_end(parts) == (Interval(1, 3), Interval(6, 10))
    assert lay_end_to_end([]) == ()
