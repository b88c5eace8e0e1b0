"""Where a rank first holds a NaN or an infinity. Looks only; runs no collective, so that ranks' answers stay apart.

Asked for before each collective, since afterwards the ranks that received it look as broken as the one that sent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from workers.checks.named import Named
from workers.contract import NonfiniteRow, ParameterElement, RankPhase
from workers.intervals import Intervals

GradSource = Callable[[nn.Parameter], Tensor]


def find_nonfinite(phase: RankPhase, named: Sequence[Named], grad: GradSource) -> list[NonfiniteRow]:
    """What gradients are not finite when `phase` begins: one row, or none. Waits for the device."""
    return _rows(phase, ((each.name, grad(each.parameter)) for each in named))


def find_nonfinite_weights(named: Sequence[Named], owned: Callable[[nn.Parameter], Intervals]) -> list[NonfiniteRow]:
    """The same of weights after the optimizer, of those that this rank updated; the others' are theirs to tell."""
    weights = [(each, each.parameter.detach().flatten()) for each in named]
    if count_nonfinite(*(weight_P for _, weight_P in weights)) == 0:
        return []
    return _rows(
        RankPhase.OPTIMIZER, ((each.name, _only(weight_P, owned(each.parameter))) for each, weight_P in weights)
    )


def _rows(phase: RankPhase, held: Iterable[tuple[str, Tensor]]) -> list[NonfiniteRow]:
    flat = list(held)
    if not flat or count_nonfinite(*(values_P for _, values_P in flat)) == 0:
        return []
    found = [
        ParameterElement(name, element)
        for name, values_P in flat
        for element in (~torch.isfinite(values_P)).nonzero().flatten().tolist()
    ]
    return [NonfiniteRow(phase, len(found), found[0], found[-1])] if found else []


def _only(values_P: Tensor, intervals: Intervals) -> Tensor:
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
