"""Sharded Adam gives every rank the weights that one process with the whole gradient would have."""

from __future__ import annotations

import pytest
import torch
from lockstep import Lockstep
from torch import nn

from workers.communicator import ProcessGroups
from workers.contract import ProbeName
from workers.grad_buffer import GradBuffer, ParameterBuffer
from workers.layout import RULES, LayoutVersion, build_layout
from workers.optimizer import ADAM_LEARNING_RATE, ShardedOptimizer, optimizer_for
from workers.parameters import ParameterShape

NUM_STEPS = 3


class Stage(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.tied = nn.Parameter(torch.randn(11, 5, generator=generator).to(dtype))
        self.other = nn.Parameter(torch.randn(12, generator=generator).to(dtype))


def gradient(step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step + shape.numel()))


def unsharded(probe: ProbeName, dtype: torch.dtype) -> Stage:
    stage = Stage(dtype)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in stage.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(masters, lr=ADAM_LEARNING_RATE)
    if probe is ProbeName.EXACT:
        optimizer = torch.optim.SGD(masters, lr=1.0)
    for step in range(NUM_STEPS):
        for master in masters:
            master.grad = gradient(step, master.shape)
        optimizer.step()
    for parameter, master in zip(stage.parameters(), masters, strict=True):
        parameter.data.copy_(master.detach())
    return stage


def sharded(probe: ProbeName, dtype: torch.dtype, dp: int, version: LayoutVersion, distributed: bool) -> list[Stage]:
    shapes = [ParameterShape("tied", (11, 5), shared_embedding=True), ParameterShape("other", (12,))]
    layout = build_layout(shapes, RULES[version], dp)
    members = tuple(range(dp))

    def rank_main(rank: int, communicator: ProcessGroups) -> Stage:
        stage = Stage(dtype)
        weights, grads = ParameterBuffer(stage, layout), GradBuffer(layout, torch.device("cpu"), "tied")
        optimizer = ShardedOptimizer(optimizer_for(probe), [weights], [grads], members, rank, distributed)
        for step in range(NUM_STEPS):
            # What a rank does not own is rubbish after a reduce-scatter and must not be used.
            grads.main_grad.fill_(777.0)
            for name, parameter in stage.named_parameters():
                view, values = grads.grad(name), gradient(step, parameter.shape).flatten()
                owned = layout.owned_intervals(name, rank)
                for interval in owned:
                    view[interval.start : interval.stop] = values[interval.start : interval.stop]
                if not distributed:
                    view.copy_(values)
            optimizer.step(communicator)
        return stage

    return Lockstep(dp).run(rank_main)


@pytest.mark.parametrize("probe", list(ProbeName))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", [LayoutVersion.DE4028A, LayoutVersion("0650d83"), LayoutVersion.V0_13])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_shards_add_up_to_one_optimizer(probe: ProbeName, dtype: torch.dtype, version: LayoutVersion, dp: int) -> None:
    expected = unsharded(probe, dtype)
    stages = sharded(probe, dtype, dp, version, distributed=True)
    for stage in stages:
        for parameter, wanted in zip(stage.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-7)
        for parameter, replica in zip(stage.parameters(), stages[0].parameters(), strict=True):
            assert torch.equal(parameter, replica)


def test_without_a_distributed_optimizer_nothing_is_gathered() -> None:
    expected = unsharded(ProbeName.GPT, torch.float32)
    for stage in sharded(ProbeName.GPT, torch.float32, 2, LayoutVersion.DE4028A, distributed=False):
        for parameter, wanted in zip(stage.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-7)


def test_masters_can_be_reloaded() -> None:
    layout = build_layout(
        [ParameterShape("tied", (11, 5)), ParameterShape("other", (12,))], RULES[LayoutVersion.V0_13], 1
    )
    stage = Stage(torch.float32)
    weights, grads = ParameterBuffer(stage, layout), GradBuffer(layout, torch.device("cpu"), "tied")
    optimizer = ShardedOptimizer(optimizer_for(ProbeName.EXACT), [weights], [grads], (0,), 0, distributed=True)
    weights.values.fill_(5.0)
    optimizer.reload_masters()
    grads.main_grad.fill_(2.0)
    Lockstep(1).run(lambda _, communicator: optimizer.step(communicator))
    assert torch.equal(stage.tied, torch.full((11, 5), 3.0))
