"""Plain data parallelism: every gradient all-reduced by itself, the whole model updated on every replica."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.contract import Phase, ProbeName
from workers.intervals import Interval
from workers.stacks.protocol import StackContext


class PlainDdp:
    def __init__(self, context: StackContext) -> None:
        self.context = context
        self.parameters = [parameter for module in context.modules for parameter in module.parameters()]
        self.grads = {p: torch.zeros(p.numel(), device=p.device) for p in self.parameters}
        self.masters = [nn.Parameter(p.detach().float().flatten().clone()) for p in self.parameters]
        self.optimizer = context.make_optimizer(self.masters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.grads[parameter].add_(parameter.grad.flatten())
        parameter.grad = None

    def zero_grad(self) -> None:
        for grad in self.grads.values():
            grad.zero_()

    def finalize(self, observe: Callable[[Phase], None]) -> None:
        for parameter in self.parameters:
            self.sync(parameter)
        observe(Phase.SCATTERED)
        self.tie()
        observe(Phase.TIED)
        if self.context.num_tokens is not None:
            self.divide_by_tokens(self.context.num_tokens())

    def sync(self, parameter: nn.Parameter) -> None:
        self.grads[parameter].div_(self.context.divisor)
        dist.all_reduce(self.grads[parameter], group=self.context.dp_group)

    def tie(self) -> None:
        if self.context.tied is not None and self.context.tie_group is not None:
            dist.all_reduce(self.grads[self.context.tied], group=self.context.tie_group)

    def divide_by_tokens(self, tokens: Tensor) -> None:
        for group in (self.context.dp_group, self.context.pp_group):
            dist.all_reduce(tokens, group=group)
        divisor = max(1, int(tokens))
        if self.context.probe is ProbeName.EXACT:
            divisor = 1 << (divisor - 1).bit_length()
        for grad in self.grads.values():
            grad.div_(divisor)

    def owned(self, parameter: nn.Parameter) -> tuple[Interval, ...]:
        return (Interval(0, parameter.numel()),)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        return self.grads[parameter]

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = self.grads[parameter].clone()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.detach().copy_(master.detach().view_as(parameter))

    def weights_changed(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.detach().copy_(parameter.detach().flatten())
