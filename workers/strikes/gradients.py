"""Faults in how a rank adds up its own gradients, and in parameters between the phases of the sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from workers.contract import Phase, RankPhase
from workers.orderings import RANK_PHASES, ordering_of
from workers.strikes.strike import StackStrike, Victim, flip_bit, largest


class AccumulationStrike(StackStrike):
    """A fault in what one microbatch adds: hooks that see a parameter's gradient before the stack accumulates it."""

    def modules_built(self, modules: Sequence[nn.Module]) -> None:
        """See `Strike`."""
        self._seen: Counter[nn.Parameter] = Counter()
        for module in modules:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(self._hook)

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._seen.clear()

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> None:
        """Spoil one microbatch's gradient, in place, before the stack takes it."""
        raise NotImplementedError

    def _hook(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._seen[parameter] += 1
        if self.is_due and parameter.grad is not None:
            self.has_struck = True
            is_last = self._seen[parameter] == self.victim.spec.batch.num_microbatches
            self.accumulate(parameter, parameter.grad, is_last)


class MicrobatchLost(AccumulationStrike):
    """The last microbatch adds nothing."""

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> None:
        """See `AccumulationStrike`."""
        if is_last:
            grad.zero_()


class MicrobatchLate(AccumulationStrike):
    """The last microbatch is added when the data-parallel sync is already over."""

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._late: dict[nn.Parameter, Tensor] = {}

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> None:
        """See `AccumulationStrike`."""
        if is_last:
            self._late[parameter] = grad.clone().flatten()
            grad.zero_()

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        if phase is Phase.SCATTERED:
            for parameter, grad_P in self._late.items():
                self.stack.grad(parameter).add_(grad_P)


class MovingAverage(AccumulationStrike):
    """Each microbatch is averaged with what is there instead of added to it."""

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> None:
        """See `AccumulationStrike`."""
        self.stack.grad(parameter).mul_(0.5)
        grad.mul_(0.5)


class BitInGradient(StackStrike):
    """One bit of the rank's own gradient is flipped before anything is synchronised, in its largest element."""

    def after_backward(self) -> None:
        """See `Strike`."""
        if self.is_due:
            grad_P = self.stack.grad(self.choose_parameter())
            flip_bit(grad_P, largest(grad_P))
            self.has_struck = True


class ParameterNotSynchronised(StackStrike):
    """One parameter keeps the rank's own gradient."""

    def before_sync(self) -> None:
        """See `StackStrike`."""
        self._parameter = self.choose_parameter()
        self._own_P = self.stack.grad(self._parameter).clone()

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        if phase is Phase.SCATTERED:
            self.stack.grad(self._parameter).copy_(self._own_P)
            self.has_struck = True


class NonfiniteBefore(StackStrike):
    """An element is no number any more when a phase of the sync begins: of any parameter, or of the tied weight."""

    def __init__(self, victim: Victim, step: int, value: float, phase: RankPhase) -> None:
        super().__init__(victim, step)
        self._value = value
        self._phase = phase

    def after_backward(self) -> None:
        """See `Strike`."""
        self._upcoming = [RANK_PHASES[phase] for phase in ordering_of(self.victim.spec).phases]
        if self.is_due:
            self._strike()

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        self._upcoming = self._upcoming[1:]
        self._strike()

    def _strike(self) -> None:
        parameter = self.tied if self._phase is RankPhase.TIE else self.choose_parameter()
        if self._upcoming[:1] == [self._phase] and parameter is not None:
            self.stack.grad(parameter)[0] = self._value
            self.has_struck = True
