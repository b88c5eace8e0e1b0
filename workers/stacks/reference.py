"""The reference stack: Megatron-LM's buffer, sync phases and distributed optimizer, under an ordering of the catalogue.

What the live step runs; the phases themselves are in `workers.grad_sync`. Must not judge.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from workers.communicator import Pending
from workers.grad_buffer import GradBuffer, ParameterBuffer, accumulate_into
from workers.grad_sync import Announce, Observer, Prescale, TokenCounts, start_bucket, sync_gradients
from workers.intervals import Interval, Intervals
from workers.layout import BufferLayout
from workers.mesh import dp_members
from workers.optimizer import ShardedOptimizer
from workers.orderings import DP_PHASES, Ordering
from workers.overlap import BucketLauncher
from workers.stacks.protocol import StackContext


class ReferenceStack:
    """See `workers.stacks.protocol.Stack`. `layouts` are those of the modules' parameters, one per chunk.

    With `overlap` each bucket's dp sync starts in the midst of backward.
    """

    def __init__(
        self,
        context: StackContext,
        ordering: Ordering,
        layouts: Sequence[BufferLayout],
        prescale: Prescale,
        overlap: bool = False,
    ) -> None:
        self._context = context
        self._ordering = ordering
        self._prescale = prescale
        self.announce: Announce | None = None
        """Hears of each bucket before it is summed."""
        self._places = {
            parameter: (chunk, name)
            for chunk, module in enumerate(context.modules)
            for name, parameter in module.named_parameters()
        }
        self._grads = tuple(map(self._grad_buffer, range(len(layouts)), layouts))
        self._weights = tuple(map(ParameterBuffer, context.modules, layouts))
        self._launchers = tuple(self._launcher(chunk) for chunk in range(len(layouts))) if overlap else ()
        if not overlap:
            for module, buffer in zip(context.modules, self._grads, strict=True):
                accumulate_into(module, buffer)
        self._optimizer = ShardedOptimizer(
            context.make_optimizer,
            self._weights,
            self._grads,
            dp_members(context.mesh, context.at.pp_rank, context.at.tp_rank),
            context.at.world_rank,
            ordering.distributed_optimizer,
        )

    def _grad_buffer(self, chunk: int, layout: BufferLayout) -> GradBuffer:
        tied = self._context.tied
        tied_chunk, tied_name = (None, None) if tied is None else self._places[tied]
        device = next(self._context.modules[chunk].parameters()).device
        return GradBuffer(layout, device, tied_name if chunk == tied_chunk else None)

    def _launcher(self, chunk: int) -> BucketLauncher:
        context, buffer = self._context, self._grads[chunk]
        members = dp_members(context.mesh, context.at.pp_rank, context.at.tp_rank)
        phase = next(phase for phase in self._ordering.phases if phase in DP_PHASES)

        def start(bucket: int) -> Pending:
            buckets = {context.at.world_rank: buffer.bucket(bucket)}
            return start_bucket(phase, members, buckets, context.communicator, self._prescale, self.announce)

        return BucketLauncher(context.modules[chunk], buffer, context.num_microbatches, start)

    def zero_grad(self) -> None:
        """Zero the buffers, padding included."""
        for buffer in self._grads:
            buffer.zero()
        for launcher in self._launchers:
            launcher.reset()

    def finalize(self, observe: Observer) -> None:
        """Run the ordering's phases."""
        context = self._context
        buffers = {context.at.world_rank: self._grads}
        finish = self._finish_launched if self._launchers else None
        tokens = context.num_tokens and TokenCounts(context.probe, {context.at.world_rank: context.num_tokens()})
        sync_gradients(
            self._ordering,
            context.mesh,
            buffers,
            context.communicator,
            self._prescale,
            observe,
            finish,
            tokens,
            self.announce,
        )

    def _finish_launched(self) -> None:
        for launcher in self._launchers:
            launcher.finish()

    def owned(self, parameter: nn.Parameter) -> Intervals:
        """This rank's shards of the parameter; all of it without a distributed optimizer."""
        if not self._ordering.distributed_optimizer:
            return (Interval(0, parameter.numel()),)
        chunk, name = self._places[parameter]
        return self._grads[chunk].layout.owned_intervals(name, self._context.at.dp_rank)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's part of its chunk's buffer."""
        chunk, name = self._places[parameter]
        return self._grads[chunk].grad(name)

    def step(self) -> None:
        """Update the shards and gather the weights."""
        self._optimizer.step(self._context.communicator)

    def weights_changed(self) -> None:
        """Take the weights into the optimizer's master copies."""
        self._optimizer.reload_masters()
