"""The gradient buffer is one piece of memory: views of it alias, hooks add into it in float32, padding stays zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.grad_buffer import GradBuffer, ParameterBuffer, accumulate_into, select
from workers.intervals import Interval
from workers.layout import RULES, BufferLayout, LayoutVersion, build_layout
from workers.parameters import ParameterShape

SHAPES = (ParameterShape("first", (3, 5), shared_embedding=True), ParameterShape("second", (8,)))


def layout(version: LayoutVersion = LayoutVersion.V0_13) -> BufferLayout:
    return build_layout(SHAPES, RULES[version], 2)


class TwoParameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, 5, generator=generator).to(dtype))
        self.second = nn.Parameter(torch.randn(8, generator=generator).to(dtype))

    def forward(self) -> torch.Tensor:
        return (self.first * self.first).sum() + (self.second * 3).sum()


@pytest.mark.parametrize("version", list(LayoutVersion))
def test_every_view_is_a_part_of_one_buffer(version: LayoutVersion) -> None:
    buffer = GradBuffer(layout(version), torch.device("cpu"), "first")
    for value, name in enumerate(("first", "second"), start=1):
        buffer.grad(name).fill_(value)
    assert torch.equal(buffer.tied_grad(), torch.ones(15))
    assert float(buffer.main_grad.sum()) == 15 + 8 * 2
    assert sum(float(buffer.bucket(index).sum()) for index in buffer.buckets()) == 15 + 8 * 2
    buffer.zero()
    assert not buffer.main_grad.any()


def test_a_stage_without_the_tied_weight_says_so() -> None:
    with pytest.raises(KeyError, match="no copy of the tied weight"):
        GradBuffer(layout(), torch.device("cpu"), None).tied_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_adds_in_float32_and_frees_the_gradient(dtype: torch.dtype) -> None:
    module = TwoParameters(dtype)
    expected = 2 * module.first.detach().float().flatten()
    buffer = GradBuffer(layout(), torch.device("cpu"), "first")
    accumulate_into(module, buffer)
    for microbatch in range(1, 4):
        module().backward()
        assert module.first.grad is None
        torch.testing.assert_close(buffer.grad("first"), microbatch * expected, rtol=1e-6, atol=0)
        assert torch.equal(buffer.grad("second"), torch.full((8,), 3.0 * microbatch))
    assert buffer.main_grad.dtype is torch.float32
    used = sum(shape.numel for shape in SHAPES)
    assert int(torch.count_nonzero(buffer.main_grad)) == used < buffer.main_grad.numel()


def test_a_microbatch_too_small_for_bfloat16_is_not_lost() -> None:
    module = TwoParameters(torch.bfloat16)
    buffer = GradBuffer(layout(), torch.device("cpu"), "first")
    accumulate_into(module, buffer)
    buffer.grad("second").fill_(1024.0)
    module().backward()
    # 1027 has no bfloat16 form.
    assert torch.equal(buffer.grad("second"), torch.full((8,), 1027.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_become_views_of_their_buffer(dtype: torch.dtype) -> None:
    module = TwoParameters(dtype)
    before = module.first.detach().clone()
    weights = ParameterBuffer(module, layout())
    assert weights.values.dtype is dtype
    assert torch.equal(module.first, before)
    weights.parameter("first").fill_(2)
    assert torch.equal(module.first, torch.full((3, 5), 2.0, dtype=dtype))
    assert float(weights.bucket(0).float().sum() + weights.bucket(1).float().sum()) == pytest.approx(
        30 + float(module.second.detach().float().sum()), abs=1e-5
    )


def test_select() -> None:
    values = torch.arange(10)
    assert select(values, ()).tolist() == []
    assert select(values, (Interval(2, 5),)).tolist() == [2, 3, 4]
    assert select(values, (Interval(0, 2), Interval(7, 9))).tolist() == [0, 1, 7, 8]
