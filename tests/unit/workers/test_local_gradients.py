"""What the judge remembers of backward where the stack's buffers are being synchronised already."""

from __future__ import annotations

import torch
from torch import nn

from workers.local_gradients import LocalGradients


def backward(module: nn.Linear, scale: float) -> None:
    module(torch.full((1, 3), scale)).sum().backward()
    # As a stack's hooks do.
    for parameter in module.parameters():
        parameter.grad = None


def test_sums_and_the_last_microbatch() -> None:
    module = nn.Linear(3, 2)
    local = LocalGradients(tuple(module.parameters()), module.weight)
    for scale in (1.0, 2.0, 4.0):
        backward(module, scale)
    assert local.grad(module.weight).tolist() == [7.0] * 6
    assert local.grad(module.bias).tolist() == [3.0] * 2
    assert local.last_P is not None
    assert local.last_P.tolist() == [4.0] * 6
    local.zero()
    backward(module, 8.0)
    assert local.grad(module.weight).tolist() == local.last_P.tolist() == [8.0] * 6


def test_a_rank_without_the_tied_weight_has_no_last_part() -> None:
    assert LocalGradients(tuple(nn.Linear(3, 2).parameters()), None).last_P is None
