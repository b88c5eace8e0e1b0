"""Sets of flat element indices as sorted intervals: who owns what, at the price of the number of intervals.

A set is a tuple of disjoint, non-empty, non-touching intervals in rising order, so that equal sets are equal tuples
and a 175-billion-parameter layout costs no more than a small one. Must never loop over elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """The elements start, start + 1, ..., stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements; an interval that ends before it starts has none."""
        return max(0, self.stop - self.start)


Intervals = tuple[Interval, ...]
"""A set of elements: disjoint, non-empty, non-touching intervals in rising order."""

EMPTY: Intervals = ()


def normalize(intervals: Iterable[Interval]) -> Intervals:
    """The set of all elements in any of `intervals`, which may be unsorted, empty, touching or overlapping."""
    merged: list[Interval] = []
    for interval in sorted(i for i in intervals if i.size):
        if merged and interval.start <= merged[-1].stop:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, interval.stop))
        else:
            merged.append(interval)
    return tuple(merged)


def count(intervals: Intervals) -> int:
    """Number of elements in the set."""
    return sum(interval.size for interval in intervals)


def union(a: Intervals, b: Intervals) -> Intervals:
    """Elements in a or b."""
    return normalize((*a, *b))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Elements in both a and b."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        overlap = Interval(max(a[i].start, b[j].start), min(a[i].stop, b[j].stop))
        if overlap.size:
            shared.append(overlap)
        if a[i].stop <= b[j].stop:
            i += 1
        else:
            j += 1
    return tuple(shared)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Elements in a that are not in b."""
    if not a:
        return EMPTY
    bounds = [a[0].start, *(bound for hole in b for bound in (hole.start, hole.stop)), a[-1].stop]
    gaps = (Interval(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True))
    return intersect(a, normalize(gaps))


def shift(a: Intervals, offset: int) -> Intervals:
    """Every element of a, moved by `offset`."""
    return tuple(Interval(interval.start + offset, interval.stop + offset) for interval in a)


def lay_end_to_end(parts: Iterable[tuple[int, Intervals]]) -> Intervals:
    """Sets of elements of several things as one set over all of them, laid one after another.

    `parts` are each thing's number of elements and the set of them.
    """
    laid: list[Interval] = []
    offset = 0
    for size, intervals in parts:
        laid.extend(shift(intervals, offset))
        offset += size
    return normalize(laid)


def pieces(intervals: Intervals, max_elements: int) -> list[Intervals]:
    """The set cut, in order, into parts of `max_elements` elements each (the last may have fewer).

    Raises ValueError when max_elements < 1.
    """
    if max_elements < 1:
        raise ValueError(f"max_elements is {max_elements}; a piece holds at least 1 element; ask for 1 or more")
    parts: list[list[Interval]] = []
    room = 0
    for interval in intervals:
        start = interval.start
        while start < interval.stop:
            if room == 0:
                parts.append([])
                room = max_elements
            stop = min(interval.stop, start + room)
            parts[-1].append(Interval(start, stop))
            room -= stop - start
            start = stop
    return [tuple(part) for part in parts]
