"""Stacks with one mistake each, named for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acme_stack.ddp import PlainDdp
from workers.contract import Phase
from workers.intervals import Interval
from workers.stacks.protocol import StackContext


class TieDoubled(PlainDdp):
    def tie(self) -> None:
        super().tie()
        super().tie()


class TieSkipped(PlainDdp):
    def tie(self) -> None:
        pass


class ParameterForgotten(PlainDdp):
    """The last parameter of every stage that is not tied keeps its own replica's gradient."""

    def sync(self, parameter: nn.Parameter) -> None:
        if parameter is [p for p in self.parameters if p is not self.context.tied][-1]:
            self.grads[parameter].div_(self.context.divisor)
        else:
            super().sync(parameter)


class StaleGradients(PlainDdp):
    def zero_grad(self) -> None:
        pass


class WrongGroup(PlainDdp):
    """The tied weight's replicas are summed over the pair of its holders, instead of over dp."""

    def sync(self, parameter: nn.Parameter) -> None:
        if parameter is self.context.tied and self.context.tie_group is not None:
            self.grads[parameter].div_(self.context.divisor)
            dist.all_reduce(self.grads[parameter], group=self.context.tie_group)
        else:
            super().sync(parameter)


class DividedTwice(PlainDdp):
    def sync(self, parameter: nn.Parameter) -> None:
        super().sync(parameter)
        self.grads[parameter].div_(self.context.divisor)


class ClaimsTwice(PlainDdp):
    """The first replica says that it owns everything, the others half of it each."""

    def owned(self, parameter: nn.Parameter) -> tuple[Interval, ...]:
        return (Interval(0, parameter.numel() if self.context.at.dp_rank == 0 else parameter.numel() // 2),)


class ClaimsTooLittle(PlainDdp):
    def owned(self, parameter: nn.Parameter) -> tuple[Interval, ...]:
        return (Interval(0, parameter.numel() - 1),)


class StepsTooFar(PlainDdp):
    def step(self) -> None:
        for grad in self.grads.values():
            grad.mul_(2)
        super().step()


class WeightsDrift(PlainDdp):
    """One replica's update of one parameter is lost."""

    def step(self) -> None:
        last = self.parameters[-1]
        kept = last.detach().clone()
        super().step()
        if self.context.at.dp_rank == 1:
            last.detach().copy_(kept)


class RescalesWeights(PlainDdp):
    def __init__(self, context: StackContext) -> None:
        super().__init__(context)
        for parameter in self.parameters:
            parameter.detach().mul_(0.5)


class ReplacesParameters(PlainDdp):
    def __init__(self, context: StackContext) -> None:
        super().__init__(context)
        for module in context.modules:
            for child in module.modules():
                for name, parameter in list(child.named_parameters(recurse=False)):
                    setattr(child, name, nn.Parameter(parameter.detach().clone()))


class Raises(PlainDdp):
    def finalize(self, observe: Callable[[Phase], None]) -> None:
        if self.context.at.world_rank == 1:
            raise ValueError("bucket 3 is full")
        super().finalize(observe)


class Hangs(PlainDdp):
    def step(self) -> None:
        if self.context.at.world_rank == 1:
            time.sleep(3600)
        super().step()


class ShortGradient(PlainDdp):
    def grad(self, parameter: nn.Parameter) -> Tensor:
        return self.grads[parameter][:-1]


class NoStack:
    """Has none of the methods."""

    def __init__(self, context: StackContext) -> None:
        self.buffer = torch.zeros(context.mesh.dp)
