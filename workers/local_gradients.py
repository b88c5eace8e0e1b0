"""A rank's own gradients as backward yields them, for the judge of a trial whose sync starts during backward.

By then the stack's buffers no longer hold them. Filled by tensor hooks that are set before the stack is built: they see
each microbatch's gradient before it is accumulated, so that what a stack drops, doubles or scales is seen against it.
Must not communicate and must not feed the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class LocalGradients:
    """Every parameter's sum over the microbatches of a step, and of the tied weight the last microbatch's part.

    Must be built before the stack, whose hooks take the gradients away.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: nn.Parameter | None) -> None:
        self._sums = {parameter: _zeros_like(parameter) for parameter in parameters}
        for parameter, sum_P in self._sums.items():
            parameter.register_hook(_adder(sum_P.view(parameter.shape)))
        self.last_P: Tensor | None = None
        """The tied weight's gradient of the last microbatch, float32 [P]; None on ranks that hold no copy of it."""
        if tied is not None:
            self.last_P = _zeros_like(tied)
            tied.register_hook(self._remember)

    def zero(self) -> None:
        """A new step begins."""
        for sum_P in self._sums.values():
            sum_P.zero_()

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """One parameter's sum so far, float32 [numel], as a view. KeyError for a parameter of another module."""
        return self._sums[parameter]

    def _remember(self, gradient: Tensor) -> None:
        if self.last_P is not None:
            self.last_P.copy_(gradient.detach().flatten())


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)


def _adder(sum_view: Tensor) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        sum_view.add_(gradient.detach())

    return add
