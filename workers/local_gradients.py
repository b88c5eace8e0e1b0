"""A rank's own gradients as backward yields them, for the judge of a trial whose sync starts during backward.

By then the stack's buffers no longer hold them. Must not communicate and must not feed the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workers.witness import Witness


class LocalGradients:
    """Every parameter's sum over the microbatches of a step, and of the tied weight the last microbatch's part.

    Must be built before the stack, whose hooks take the gradients away.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tied: nn.Parameter | None) -> None:
        self._witness = Witness(parameters)
        self.last_P: Tensor | None = None
        """The tied weight's gradient of the last microbatch, float32 [P]; None on ranks that hold no copy of it."""
        if tied is not None:
            self.last_P = torch.zeros(tied.numel(), dtype=torch.float32, device=tied.device)
            tied.register_hook(self._remember)

    def zero(self) -> None:
        """A new step begins."""
        self._witness.zero()

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """One parameter's sum so far, float32 [numel], as a view."""
        return self._witness.grad(parameter)

    def _remember(self, gradient: Tensor) -> None:
        if self.last_P is not None:
            self.last_P.copy_(gradient.detach().flatten())
