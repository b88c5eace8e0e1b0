"""The seams of a rank's step, and what a fault does at each of them: by default nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.communicator import Communicator, Finished, Pending, ProcessGroups
from workers.contract import Coordinates, Phase, RankPhase, TrialSpec
from workers.grad_norm import GradNorm
from workers.grad_sync import Observer
from workers.intervals import Intervals, count
from workers.mesh import Members
from workers.pipeline import Pipeline
from workers.stacks.protocol import Stack

TOP_MANTISSA_BIT = 22
"""Of a float32: flipping it changes a value by a quarter to a half of itself."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The rank that is struck, and how far it is in its step."""

    spec: TrialSpec
    at: Coordinates
    where: Callable[[], tuple[RankPhase, int | None]]
    """Tells the rank's phase and step."""
    links: ProcessGroups
    """To the other ranks, for faults in which several take part."""


class Strike:
    """One fault on one rank in one trial. The step calls every method at its seam, on struck ranks only."""

    def __init__(self, victim: Victim, step: int) -> None:
        self.victim = victim
        self.has_struck = False
        """In this step."""
        self._step = step

    @property
    def is_due(self) -> bool:
        """Whether this is the step to strike in."""
        return self.victim.where()[1] == self._step

    def modules_built(self, modules: Sequence[nn.Module]) -> None:
        """The rank's chunks have their weights; nothing is built over them yet."""

    def around_communicator(self, inner: Communicator) -> Communicator:
        """What the stack is to talk through."""
        return inner

    def around_stack(self, inner: Stack, parameters: Sequence[nn.Parameter], tied: nn.Parameter | None) -> Stack:
        """What the step is to drive."""
        return inner

    def step_built(self, pipeline: Pipeline, norm: GradNorm) -> None:
        """All that a step runs on is there: what computes, and what will measure the gradient norm."""

    def before_forward(self) -> None:
        """A step begins; gradients are zero."""
        self.has_struck = False

    def after_backward(self) -> None:
        """The rank has its own gradients; nothing is synchronised yet."""

    def after_step(self) -> None:
        """The weights are whole; the judges come next."""


class CollectiveStrike(Strike):
    """A fault around the collectives that the stack runs."""

    def around_communicator(self, inner: Communicator) -> Communicator:
        """See `Strike`."""
        return StruckCommunicator(inner, self)

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Callable[[Tensor], None]) -> None:
        """Stand in for one collective of the step to strike in; `run` is the real one, in place on a tensor."""
        run(tensor_N)


class StruckCommunicator:
    """A struck rank's collectives."""

    def __init__(self, inner: Communicator, strike: CollectiveStrike) -> None:
        self._inner = inner
        self._strike = strike

    @property
    def hosted(self) -> Sequence[int]:
        """The one rank of this process."""
        return self._inner.hosted

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._run(members, buckets, self._inner.reduce_scatter)

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`; while it strikes, over when it starts."""
        if not self._strike.is_due:
            return self._inner.start_reduce_scatter(members, buckets)
        self.reduce_scatter(members, buckets)
        return Finished()

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`. That of the optimizer is the gradient norm's, and is never struck."""
        if self._strike.victim.where()[0] is RankPhase.OPTIMIZER:
            self._inner.all_reduce(members, tensors)
        else:
            self._run(members, tensors, self._inner.all_reduce)

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """As `start_reduce_scatter`."""
        if not self._strike.is_due:
            return self._inner.start_all_reduce(members, tensors)
        self.all_reduce(members, tensors)
        return Finished()

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`; never struck."""
        self._inner.broadcast(members, source, tensors)

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._run(members, buckets, self._inner.all_gather)

    def _run(
        self,
        members: Members,
        tensors: Mapping[int, Tensor],
        collective: Callable[[Members, Mapping[int, Tensor]], None],
    ) -> None:
        (world_rank,) = self.hosted

        def run(tensor_N: Tensor) -> None:
            collective(members, {world_rank: tensor_N})

        if self._strike.is_due:
            phase = self._strike.victim.where()[0]
            # With overlap the data-parallel sync starts during backward, which has no other collective of the stack.
            phase = RankPhase.DP_SYNC if phase is RankPhase.FORWARD_BACKWARD else phase
            self._strike.collective(phase, members, tensors[world_rank], run)
        else:
            run(tensors[world_rank])


class StackStrike(Strike):
    """A fault between the phases of the sync, or after the optimizer, in parameters that it can name."""

    def around_stack(self, inner: Stack, parameters: Sequence[nn.Parameter], tied: nn.Parameter | None) -> Stack:
        """See `Strike`."""
        self.stack, self.parameters, self.tied = inner, parameters, tied
        return StruckStack(inner, self)

    def before_sync(self) -> None:
        """The first phase of the sync is about to begin."""

    def after_phase(self, phase: Phase) -> None:
        """One phase of the sync is over; the next has not begun."""

    def weights_whole(self) -> None:
        """The optimizer's step is over."""

    def choose_parameter(self) -> nn.Parameter:
        """The one of which this rank owns most, the tied weight only where it owns nothing else."""
        inner = [each for each in self.parameters if each is not self.tied and count(self.stack.owned(each))]
        return max(inner or list(self.parameters), key=lambda each: count(self.stack.owned(each)))


class StruckStack:
    """A struck rank's stack."""

    def __init__(self, inner: Stack, strike: StackStrike) -> None:
        self._inner = inner
        self._strike = strike

    def zero_grad(self) -> None:
        """See `Stack`."""
        self._inner.zero_grad()

    def finalize(self, observe: Observer) -> None:
        """See `Stack`."""
        strike = self._strike
        if not strike.is_due:
            self._inner.finalize(observe)
            return

        def observe_struck(phase: Phase) -> None:
            strike.after_phase(phase)
            observe(phase)

        strike.before_sync()
        self._inner.finalize(observe_struck)

    def owned(self, parameter: nn.Parameter) -> Intervals:
        """See `Stack`."""
        return self._inner.owned(parameter)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """See `Stack`."""
        return self._inner.grad(parameter)

    def step(self) -> None:
        """See `Stack`."""
        self._inner.step()
        if self._strike.is_due:
            self._strike.weights_whole()

    def weights_changed(self) -> None:
        """See `Stack`."""
        self._inner.weights_changed()


def flip_bit(values_n: Tensor, at: int, bit: int = TOP_MANTISSA_BIT) -> None:
    """Flip one bit of one element of a flat tensor, in place; bits count as in float32, of which bfloat16 is a half."""
    if values_n.dtype == torch.bfloat16:
        values_n[at : at + 1].view(torch.int16).bitwise_xor_(1 << (bit - 16))
    else:
        values_n[at : at + 1].view(torch.int32).bitwise_xor_(1 << bit)


def largest(values_n: Tensor) -> int:
    """The index of the element that is largest in size."""
    return int(values_n.abs().argmax())
