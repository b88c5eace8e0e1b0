"""An optimizer sharded by whole parameters where it can be: each replica updates every dp-th one and broadcasts it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from acme_stack.ddp import PlainDdp
from workers.intervals import Interval
from workers.stacks.protocol import StackContext


class ShardedDdp(PlainDdp):
    """Gradients are reduced to their owner only and are not right elsewhere; the tied weight is everybody's."""

    def __init__(self, context: StackContext) -> None:
        super().__init__(context)
        alone = [parameter for parameter in self.parameters if parameter is not context.tied]
        self.owner = {parameter: index % context.mesh.dp for index, parameter in enumerate(alone)}

    def sync(self, parameter: nn.Parameter) -> None:
        if parameter is self.context.tied:
            super().sync(parameter)
            return
        self.grads[parameter].div_(self.context.divisor)
        dist.reduce(self.grads[parameter], self.source(parameter), group=self.context.dp_group)

    def source(self, parameter: nn.Parameter) -> int:
        return dist.get_global_rank(self.context.dp_group, self.owner[parameter])

    def owned(self, parameter: nn.Parameter) -> tuple[Interval, ...]:
        if self.owner.get(parameter, self.context.at.dp_rank) == self.context.at.dp_rank:
            return super().owned(parameter)
        return ()

    def step(self) -> None:
        super().step()
        for parameter in self.owner:
            dist.broadcast(parameter.detach(), self.source(parameter), group=self.context.dp_group)
        self.weights_changed()
