"""The first NaN or infinity of a rank is found by parameter and element, in what that rank answers for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workers.checks.finiteness import find_nonfinite, find_nonfinite_weights
from workers.checks.named import Named, name_parameters
from workers.contract import NonfiniteRow, ParameterElement, RankPhase
from workers.intervals import Interval


def named(*sizes: int) -> list[Named]:
    return [Named(f"p{index}", nn.Parameter(torch.ones(size))) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_element_counts_and_the_first_and_last_are_named(value: float) -> None:
    held = named(4, 6)
    grads: dict[nn.Parameter, Tensor] = {each.parameter: torch.ones(each.parameter.numel()) for each in held}
    assert find_nonfinite(RankPhase.TIE, held, grads.__getitem__) == []
    grads[held[0].parameter][2] = value
    grads[held[1].parameter][5] = value
    row = NonfiniteRow(RankPhase.TIE, 2, ParameterElement("p0", 2), ParameterElement("p1", 5))
    assert find_nonfinite(RankPhase.TIE, held, grads.__getitem__) == [row]
    assert find_nonfinite(RankPhase.TIE, [], grads.__getitem__) == []


def test_a_weight_is_told_by_the_rank_that_updated_it() -> None:
    held = named(4)
    with torch.no_grad():
        held[0].parameter[1] = math.nan
    element = ParameterElement("p0", 1)
    found = find_nonfinite_weights(held, lambda _: (Interval(0, 2),))
    assert found == [NonfiniteRow(RankPhase.OPTIMIZER, 1, element, element)]
    assert find_nonfinite_weights(held, lambda _: (Interval(2, 4),)) == []


def test_chunks_keep_their_parameters_apart() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert [each.name for each in name_parameters(modules[:1])] == ["weight", "bias"]
    assert [each.name for each in name_parameters(modules)][2:] == ["chunk 1: weight", "chunk 1: bias"]
