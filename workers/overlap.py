"""Starts each bucket's sync from backward hooks, while the rest of the backward is still computing.

Source: Megatron-LM's `overlap_grad_reduce`: hooks count a bucket's gradients in the last microbatch, and the complete
bucket is scaled and handed to an asynchronous collective. A gradient that belongs to a later bucket, but whose first
elements lie in this one's padding, comes too late for it. In Megatron it is then added while the collective runs; here
it waits for the collective first, which is one of the outcomes of that race, and the same one every time.

Must not decide what is scaled or summed; that is `workers.grad_sync`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from workers.communicator import Pending
from workers.errors import OverlapError
from workers.grad_buffer import GradBuffer, accumulate_into
from workers.layout import PlacedParameter

StartBucket = Callable[[int], Pending]
"""Starts the sync of the bucket with this index. Every replica starts the same buckets in the same order."""


class BucketLauncher:
    """The hooks of one chunk. Serves any number of steps, each begun with `reset` and ended with `finish`."""

    def __init__(self, module: nn.Module, buffer: GradBuffer, num_microbatches: int, start: StartBucket) -> None:
        """From now on every backward of `module` adds to `buffer`, and the last of a step starts the buckets."""
        self._buffer = buffer
        self._num_microbatches = num_microbatches
        self._start = start
        self._names = [
            {placed.name for placed in buffer.layout.params if placed.bucket == index} for index in buffer.buckets()
        ]
        self.reset()
        self._hook(module, self._settle)
        accumulate_into(module, buffer)
        self._hook(module, self._arrived)

    def reset(self) -> None:
        """A step begins: no gradient has come and nothing is under way."""
        self._counts = {placed.name: 0 for placed in self._buffer.layout.params}
        self._pending: dict[int, Pending] = {}
        self._num_started = 0

    def finish(self) -> None:
        """Wait for every bucket. Raises OverlapError where backward left one incomplete."""
        if self._num_started < len(self._names):
            short = {name: count for name, count in self._counts.items() if count < self._num_microbatches}
            raise OverlapError(
                f"{len(self._names) - self._num_started} of {len(self._names)} buckets were never complete: {short} "
                f"gradients came where each parameter needs {self._num_microbatches}; run it without overlap"
            )
        for index in list(self._pending):
            self._pending.pop(index).wait()

    def _hook(self, module: nn.Module, act: Callable[[PlacedParameter], None]) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(_acting(act, self._buffer.layout.param(name)))

    def _settle(self, placed: PlacedParameter) -> None:
        """Before a gradient is added: no collective may be reading where it goes."""
        for index in [index for index in self._pending if self._reaches_into(placed, index)]:
            self._pending.pop(index).wait()

    def _reaches_into(self, placed: PlacedParameter, index: int) -> bool:
        bucket = self._buffer.layout.buckets[index]
        return placed.start < bucket.offset + bucket.numel and bucket.offset < placed.stop

    def _arrived(self, placed: PlacedParameter) -> None:
        """After a gradient was added: its bucket may be complete."""
        self._counts[placed.name] += 1
        names = self._names[placed.bucket]
        if all(self._counts[name] == self._num_microbatches for name in names):
            self._pending[placed.bucket] = self._start(placed.bucket)
            self._num_started += 1


def _acting(act: Callable[[PlacedParameter], None], placed: PlacedParameter) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        act(placed)

    return hook
