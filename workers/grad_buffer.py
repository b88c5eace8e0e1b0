"""One chunk's contiguous main_grad buffer and, beside it, its parameters in the same layout.

Gradients are accumulated in float32 here, microbatch by microbatch, and synchronised in place. Must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from workers.intervals import Intervals
from workers.layout import BufferLayout


class GradBuffer:
    """A float32 buffer [layout.buffer_numel] in Megatron's layout. Padding is zero and stays zero under any sum."""

    def __init__(self, layout: BufferLayout, device: torch.device, tied_name: str | None) -> None:
        self.layout = layout
        self.tied_name = tied_name
        self.main_grad = torch.zeros(layout.buffer_numel, dtype=torch.float32, device=device)

    def bucket(self, index: int) -> Tensor:
        """The index-th bucket, padding included, as a view."""
        return bucket_view(self.main_grad, self.layout, index)

    def buckets(self) -> range:
        """Indices of the buckets, in buffer order."""
        return range(len(self.layout.buckets))

    def grad(self, name: str) -> Tensor:
        """A parameter's gradient, flat, as a view."""
        return parameter_view(self.main_grad, self.layout, name)

    def tied_grad(self) -> Tensor:
        """The tied weight's gradient, flat, as a view. KeyError on a stage that holds none."""
        if self.tied_name is None:
            raise KeyError("this stage holds no copy of the tied weight")
        return self.grad(self.tied_name)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.main_grad.zero_()


def tied_buffer(chunks: Sequence[GradBuffer]) -> GradBuffer:
    """Of a rank's buffers (one per chunk) the one that holds the tied weight. KeyError where none does."""
    for buffer in chunks:
        if buffer.tied_name is not None:
            return buffer
    raise KeyError("no chunk of this rank holds a copy of the tied weight")


class ParameterBuffer:
    """A stage's weights moved into one buffer of the same layout; each parameter becomes a view into it."""

    def __init__(self, module: nn.Module, layout: BufferLayout) -> None:
        named = dict(module.named_parameters())
        first = next(iter(named.values()), torch.empty(0))
        self.layout = layout
        self.values = torch.zeros(layout.buffer_numel, dtype=first.dtype, device=first.device)
        for name, parameter in named.items():
            view = parameter_view(self.values, layout, name)
            view.copy_(parameter.data.flatten())
            parameter.data = view.view(parameter.shape)

    def buckets(self) -> range:
        """Indices of the buckets, in buffer order."""
        return range(len(self.layout.buckets))

    def bucket(self, index: int) -> Tensor:
        """The index-th bucket as a view."""
        return bucket_view(self.values, self.layout, index)

    def parameter(self, name: str) -> Tensor:
        """A parameter's values, flat, as a view."""
        return parameter_view(self.values, self.layout, name)


def accumulate_into(module: nn.Module, buffer: GradBuffer) -> None:
    """From now on every backward adds each parameter's gradient into `buffer` and frees it, as Megatron's hooks do."""
    for name, parameter in module.named_parameters():
        main_grad = buffer.grad(name).view(parameter.shape)
        parameter.register_post_accumulate_grad_hook(_adder(main_grad))


def _adder(main_grad: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main_grad.add_(parameter.grad)
            parameter.grad = None

    return add


def bucket_view(values: Tensor, layout: BufferLayout, index: int) -> Tensor:
    """One bucket of a buffer, padding included."""
    bucket = layout.buckets[index]
    return values[bucket.offset : bucket.offset + bucket.numel]


def parameter_view(values: Tensor, layout: BufferLayout, name: str) -> Tensor:
    """One parameter of a buffer, flat."""
    placed = layout.param(name)
    return values[placed.start : placed.stop]


def select(values_P: Tensor, intervals: Intervals) -> Tensor:
    """The elements of a flat tensor inside `intervals`, in order; a view where there is one interval."""
    if len(intervals) == 1:
        return values_P[intervals[0].start : intervals[0].stop]
    if not intervals:
        return values_P[:0]
    return torch.cat([values_P[interval.start : interval.stop] for interval in intervals])
