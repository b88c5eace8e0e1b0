"""Megatron-LM's layouts written down a second time, as slowly and plainly as they can be: element after element.

Shares no line with `workers.layout`: what each version does is told here by the design's table, in its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from workers.parameters import ParameterShape

# version: (parameters start at multiples of, buckets end at multiples of dp and, own bucket, start moved, asserts)
TABLE = {
    "de4028a": (1, 1, False, "never", False),
    "daf0006": (1, 1, True, "never", False),
    "a67ffda": (1, 1, True, "never", True),
    "0650d83": (1, 128, True, "never", True),
    "v0.8": (64, 128, True, "never", True),
    "v0.9": (64, 128, True, "if not a multiple of dp", False),
    "v0.13": (64, 128, True, "always", False),
}


class StopsByItselfError(Exception):
    """The version asserts that the tied weight's start is a multiple of dp, and it is not."""


def tied_owners(
    parameters: Sequence[ParameterShape], version: str, dp: int, bucket_size: int | None = None
) -> tuple[list[int], list[bool]]:
    """By element of the tied weight: who owns it, and whether its bucket is full before its own gradient is there."""
    alignment, bucket_alignment, own_bucket, moved, asserts = TABLE[version]
    multiple = lcm(dp, bucket_alignment)
    cells: list[str | None] = []  # one entry a buffer element: its parameter, None for padding
    ends: list[int] = []  # where buckets end
    collected_in = {}  # parameter: number of its bucket
    waiting = False  # whether the open bucket has a parameter

    def fill_up(to_multiple_of: int) -> None:
        while len(cells) % to_multiple_of:
            cells.append(None)

    for parameter in reversed(parameters):
        overwritten = 0
        fill_up(alignment)
        if own_bucket and parameter.shared_embedding and waiting:
            start = len(cells)
            if asserts and start % dp:
                raise StopsByItselfError
            if moved == "if not a multiple of dp" and start % dp:
                fill_up(multiple)
                start = len(cells)
            fill_up(multiple)
            ends.append(len(cells))
            if moved != "always":
                overwritten = len(cells) - start  # it begins in the padding just made
        collected_in[parameter.name] = len(ends)
        position = len(cells) - overwritten
        for element in range(parameter.numel):
            if position + element < len(cells):
                cells[position + element] = parameter.name
            else:
                cells.append(parameter.name)
        stop = position + parameter.numel
        waiting = True
        bucket_start = ends[-1] if ends else 0
        full = bucket_size is not None and stop - bucket_start >= bucket_size
        if (own_bucket and parameter.shared_embedding) or full:
            fill_up(multiple)
            ends.append(len(cells))
            waiting = False
    if waiting:
        fill_up(multiple)
        ends.append(len(cells))
    return _owners(cells, ends, dp, collected_in, next(p.name for p in parameters if p.shared_embedding))


def _owners(
    cells: list[str | None], ends: list[int], dp: int, collected_in: dict[str, int], tied: str
) -> tuple[list[int], list[bool]]:
    owners, early = [], []
    start = 0
    for number, end in enumerate(ends):
        for cell in range(start, end):
            if cells[cell] == tied:
                owners.append((cell - start) // ((end - start) // dp))
                early.append(number < collected_in[tied])
        start = end
    return owners, early
