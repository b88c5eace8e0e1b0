"""Faults in the weights that a rank begins with or ends with, and in the settings that it computes with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from workers.grad_norm import GradNorm
from workers.models import seed_weights
from workers.parameters import OUTPUT_LAYER
from workers.pipeline import Pipeline
from workers.strikes.strike import StackStrike, Strike, flip_bit, largest

DELAY_S = 0.3
"""How long a slow rank is late."""


class BitInWeight(StackStrike):
    """One bit of a weight is flipped once the weights are whole, in the largest element of a parameter."""

    def weights_whole(self) -> None:
        """See `StackStrike`."""
        weight_P = self.choose_parameter().detach().flatten()
        flip_bit(weight_P, largest(weight_P))
        self.has_struck = True


class OtherInitialWeights(Strike):
    """The rank's first step starts from the weights of another seed."""

    def modules_built(self, modules: Sequence[nn.Module]) -> None:
        """See `Strike`."""
        spec, at = self.victim.spec, self.victim.at
        other = replace(spec, seed=spec.seed + 1)
        for stage, module in zip(spec.mesh.stages(at.pp_rank), modules, strict=True):
            seed_weights(module, other, stage)  # type: ignore[arg-type]

    def before_forward(self) -> None:
        """See `Strike`."""
        self.has_struck = self.victim.where()[1] == 0


class OtherThreadCount(Strike):
    """The rank computes with one more thread."""

    def before_forward(self) -> None:
        """See `Strike`."""
        self._usual = torch.get_num_threads()
        self.has_struck = self.is_due
        if self.is_due:
            torch.set_num_threads(self._usual + 1)

    def after_step(self) -> None:
        """See `Strike`."""
        torch.set_num_threads(self._usual)


class Tf32(Strike):
    """The rank may round the factors of matrix products to TF32."""

    def before_forward(self) -> None:
        """See `Strike`."""
        self.has_struck = self.is_due
        torch.backends.cuda.matmul.allow_tf32 = self.is_due

    def after_step(self) -> None:
        """See `Strike`."""
        torch.backends.cuda.matmul.allow_tf32 = False


class TiedTwiceInNorm(Strike):
    """The rank's copy of the tied weight counts in the gradient norm, though the first stage counts it already."""

    def step_built(self, pipeline: Pipeline, norm: GradNorm) -> None:
        """See `Strike`."""
        self._norm, self._usual = norm, norm.uncounted

    def before_forward(self) -> None:
        """See `Strike`."""
        self.has_struck = self.is_due and self.victim.at.pp_rank == self.victim.spec.mesh.pp - 1
        self._norm.uncounted = self._usual - {OUTPUT_LAYER} if self.is_due else self._usual


class Slow(Strike):
    """The rank does nothing for a while before the first backward of its step."""

    def step_built(self, pipeline: Pipeline, norm: GradNorm) -> None:
        """See `Strike`."""
        pipeline.before_backward(self._wait)

    def _wait(self) -> None:
        if self.is_due and not self.has_struck:
            self.has_struck = True
            time.sleep(DELAY_S)


class IdenticalData(Strike):
    """All ranks train on the same data, which `workers.models.microbatches` sees to."""

    def before_forward(self) -> None:
        """See `Strike`."""
        self.has_struck = True
