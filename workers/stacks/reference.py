"""The reference stack: Megatron-LM's buffer, sync phases and distributed optimizer, under an ordering of the catalogue.

What the live step runs; the phases themselves are in `workers.grad_sync`. Must not judge.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.grad_buffer import GradBuffer, ParameterBuffer, accumulate_into
from workers.grad_sync import Observer, Prescale, sync_gradients
from workers.intervals import Interval, Intervals
from workers.layout import BufferLayout
from workers.mesh import dp_members
from workers.optimizer import ShardedOptimizer
from workers.orderings import Ordering
from workers.stacks.protocol import StackContext


class ReferenceStack:
    """See `workers.stacks.protocol.Stack`. `layout` is that of the one module's parameters."""

    def __init__(self, context: StackContext, ordering: Ordering, layout: BufferLayout, prescale: Prescale) -> None:
        [module] = context.modules
        self._context = context
        self._ordering = ordering
        self._prescale = prescale
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        tied_name = None if context.tied is None else self._names[context.tied]
        device = next(module.parameters()).device
        self._grads = GradBuffer(layout, device, tied_name)
        self._weights = ParameterBuffer(module, layout)
        accumulate_into(module, self._grads)
        self._optimizer = ShardedOptimizer(
            context.make_optimizer,
            self._weights,
            self._grads,
            dp_members(context.mesh, context.at.pp_rank),
            context.at.world_rank,
            ordering.distributed_optimizer,
        )

    def zero_grad(self) -> None:
        """Zero the buffer, padding included."""
        self._grads.zero()

    def finalize(self, observe: Observer) -> None:
        """Run the ordering's phases."""
        context = self._context
        buffers = {context.at.world_rank: self._grads}
        sync_gradients(self._ordering, context.mesh, buffers, context.communicator, self._prescale, observe)

    def owned(self, parameter: nn.Parameter) -> Intervals:
        """This rank's shards of the parameter; all of it without a distributed optimizer."""
        if not self._ordering.distributed_optimizer:
            return (Interval(0, parameter.numel()),)
        return self._grads.layout.owned_intervals(self._names[parameter], self._context.at.dp_rank)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's part of the buffer."""
        return self._grads.grad(self._names[parameter])

    def step(self) -> None:
        """Update the shards and gather the weights."""
        self._optimizer.step(self._context.communicator)

    def weights_changed(self) -> None:
        """Take the weights into the optimizer's master copies."""
        self._optimizer.reload_masters()
