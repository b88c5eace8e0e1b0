"""The judge's own account of a rank's local gradients, kept apart from whatever stack is under test.

Filled by tensor hooks that are set before the stack is built: they see each microbatch's gradient before it is
accumulated, so that what a stack drops, doubles or scales is seen against it. Must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from workers.intervals import Interval


class Witness:
    """Sums of every parameter's gradients since `zero`, float32, in one flat tensor [N], parameter after parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        stops = list(accumulate(sizes))
        self.spans = tuple(Interval(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
        """Each parameter's place in the flat tensor."""
        device = self.parameters[0].device
        self.local_N = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for parameter in self.parameters:
            parameter.register_hook(_adder(self.grad(parameter).view(parameter.shape)))

    def zero(self) -> None:
        """A new step begins."""
        self.local_N.zero_()

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """One parameter's sum, flat, as a view."""
        return self.part(self.local_N, parameter)

    def part(self, values_N: Tensor, parameter: nn.Parameter) -> Tensor:
        """One parameter's part of any tensor laid out alike, as a view."""
        span = self.span(parameter)
        return values_N[span.start : span.stop]

    def span(self, parameter: nn.Parameter) -> Interval:
        """A parameter's place in the flat tensor. StopIteration for a parameter of another module."""
        return next(span for span, known in zip(self.spans, self.parameters, strict=True) if known is parameter)

    def flatten(self, of_parameter: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """A copy of something that there is of every parameter, float32 [N]."""
        return torch.cat([of_parameter(parameter).flatten().float() for parameter in self.parameters])


def _adder(sum_view: Tensor) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        sum_view.add_(gradient.detach())

    return add
