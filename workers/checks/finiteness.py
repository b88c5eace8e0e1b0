"""Where a rank first holds a NaN or an infinity. Looks only; runs no collective, so that ranks' answers stay apart.

Asked for before each collective, since afterwards the ranks that received it look as broken as the one that sent it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from workers.contract import NonfiniteRow, ParameterElement, RankPhase
from workers.intervals import Intervals


def find_nonfinite(phase: RankPhase, held: Iterable[tuple[str, Tensor]]) -> NonfiniteRow | None:
    """What is not finite in named flat tensors when `phase` begins; None where all is. Waits for the device."""
    named = list(held)
    if count_nonfinite(*(values_P for _, values_P in named)) == 0:
        return None
    found = [
        ParameterElement(name, element)
        for name, values_P in named
        for element in (~torch.isfinite(values_P)).nonzero().flatten().tolist()
    ]
    return NonfiniteRow(phase, len(found), found[0], found[-1])


def only(values_P: Tensor, intervals: Intervals) -> Tensor:
    """A copy in which every element outside `intervals` is zero."""
    kept_P = torch.zeros_like(values_P)
    for interval in intervals:
        kept_P[interval.start : interval.stop] = values_P[interval.start : interval.stop]
    return kept_P


def count_nonfinite(*tensors: Tensor) -> int:
    """How many elements are NaN or infinite; neither ever leaves a sum finite, so that one pass clears most tensors."""
    if math.isfinite(float(torch.stack([values_N.sum(dtype=torch.float32) for values_N in tensors]).sum())):
        return 0
    return sum(int(torch.count_nonzero(~torch.isfinite(values_N))) for values_N in tensors)
