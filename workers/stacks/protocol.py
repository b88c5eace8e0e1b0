"""What a stack is: the code between backward and the next forward, as one rank of a trial sees it.

A stack replaces buffer layout, gradient synchronisation and optimizer. `workers.stacks.reference` is one. The step
(`workers.step`) talks to nothing else, and never tells a stack what the answer is.

Somebody else's stack is a factory (`StackFactory`) that an installed package names in the entry-point group
`gradgate.stacks`, or the operator in `GRADGATE_STACKS` (`workers.stacks.registry`). A request gives its name. What it
says is not believed (`workers.stacks.guard`, `workers.checks.stack_audit`): its claims must cover each parameter once,
every gradient that it owns must be the sum of what backward gave on all replicas, and with the exact probe every weight
must be what it was less its gradient, on every replica. What it raises is reported under its name.

What it may rely on: weights and their gradients are those of `StackContext.modules`; backward runs microbatch after
microbatch, the loss already divided by their number (unless `num_tokens` is given). It must sum them in float32 in that
order, leave the modules' parameter objects and their weights alone until `step`, and start no threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from workers.communicator import Communicator
from workers.contract import Coordinates, Dtype, Mesh, ProbeName
from workers.grad_sync import Observer
from workers.intervals import Intervals
from workers.optimizer import MakeOptimizer


@dataclass(frozen=True, slots=True)
class StackContext:
    """What a stack is built from: one rank's part of the model, its place in the mesh, and its groups."""

    mesh: Mesh
    at: Coordinates
    modules: tuple[nn.Module, ...]
    """This rank's chunks of the model, weights in place; backward runs through exactly these modules."""
    tied: nn.Parameter | None
    """This rank's copy of the weight whose other copy is at the pipeline's other end; None where it holds none."""
    dp_group: dist.ProcessGroup
    """The replicas of this stage, by dp_rank."""
    pp_group: dist.ProcessGroup
    """The stages of this pipeline, by pp_rank."""
    tie_group: dist.ProcessGroup | None
    """The two holders of the tied weight in this pipeline; None where `tied` is, and where pp is 1."""
    communicator: Communicator
    """The same groups with this package's collectives, which drills can strike; a stack need not use them."""
    divisor: int
    """What the sum over the dp replicas is divided by: dp, or for the exact probe a power of two."""
    num_microbatches: int
    make_optimizer: MakeOptimizer
    """The update rule of the trial over float32 master copies, whose `.grad` the stack sets before each step."""
    probe: ProbeName = ProbeName.GPT
    """The trial's; exact divides by powers of two only."""
    grad_reduce_dtype: Dtype = Dtype.FLOAT32
    """In what gradients are summed over the replicas; `grad` is float32 in any case."""
    num_tokens: Callable[[], Tensor] | None = None
    """Valid tokens of this rank's step, int64 [1], counted on the last stage (elsewhere 0), for `finalize` to divide
    by those of all replicas; None where gradients are means already."""


class Stack(Protocol):
    """One rank's stack for one trial, built over `StackContext.modules` by its factory (a collective call).

    Parameters are those of the given modules. Every rank makes the same calls in the same order: `zero_grad`, then
    forward and backward of every microbatch, `finalize`, `step`.
    """

    def zero_grad(self) -> None:
        """Forget the last step's gradients. Local."""

    def finalize(self, observe: Observer) -> None:
        """Synchronise the gradients of all microbatches, in place. Collective over the mesh.

        A stack may call `observe` after each of its phases, so that the trace shows it; after the last such call the
        gradients must not change any more.
        """

    def owned(self, parameter: nn.Parameter) -> Intervals:
        """The elements, in the parameter's flat coordinates, that this rank's optimizer updates. Local.

        Either every replica owns all of a parameter, or each element has exactly one owner among them.
        """

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The main gradient as float32 [numel]: a view, so that it follows what `finalize` does. Local.

        After `finalize` right where `owned`: the sum of all replicas' gradients over `divisor`, of the tied weight that
        of both copies. Before it only the reference is asked, for the sum over this rank's microbatches.
        """

    def step(self) -> None:
        """Update what this rank owns, then make the weights whole on every replica. Collective over the dp group."""

    def weights_changed(self) -> None:
        """The weights were rewritten in place from outside: take them as they are. Local."""


StackFactory = Callable[[StackContext], Stack]
"""Builds a stack over the context's modules. Collective over the mesh."""
