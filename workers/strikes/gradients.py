"""Faults in how a rank adds up its own gradients, and in parameters between the phases of the sync.

Where the sync starts during backward, gradients are spoilt on their way into the buffer: once a bucket's collective is
under way nothing may write there, or what comes of it is chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from workers.contract import Phase, RankPhase
from workers.orderings import RANK_PHASES, ordering_of
from workers.strikes.strike import StackStrike, Victim, flip_bit, largest


class AccumulationStrike(StackStrike):
    """A fault in what one microbatch adds: hooks that change a gradient before anybody else sees it."""

    def modules_built(self, modules: Sequence[nn.Module]) -> None:
        """See `Strike`."""
        self._seen: Counter[nn.Parameter] = Counter()
        for module in modules:
            for parameter in module.parameters():
                parameter.register_hook(self._hook(parameter))

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._seen.clear()

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """Spoil one microbatch's gradient, in place, before the stack takes it; whether it was."""
        raise NotImplementedError

    def _hook(self, parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def spoil(grad: Tensor) -> Tensor:
            self._seen[parameter] += 1
            if not self.is_due:
                return grad
            is_last = self._seen[parameter] == self.victim.spec.batch.num_microbatches
            # Cloned, since autograd may still need what it hands out.
            spoilt = grad.clone()
            self.has_struck |= self.accumulate(parameter, spoilt, is_last)
            return spoilt

        return spoil


class MicrobatchLost(AccumulationStrike):
    """The last microbatch adds nothing."""

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """See `AccumulationStrike`."""
        if is_last:
            grad.zero_()
        return is_last


class MicrobatchLate(AccumulationStrike):
    """The last microbatch is added when the data-parallel sync is already over."""

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._late: dict[nn.Parameter, Tensor] = {}

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """See `AccumulationStrike`."""
        if is_last:
            self._late[parameter] = grad.clone().flatten()
            grad.zero_()
        return is_last

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        if phase is Phase.SCATTERED:
            for parameter, grad_P in self._late.items():
                self.stack.grad(parameter).add_(grad_P)


class MovingAverage(AccumulationStrike):
    """Each microbatch is averaged with what is there instead of added to it."""

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """See `AccumulationStrike`."""
        self.stack.grad(parameter).mul_(0.5)
        grad.mul_(0.5)
        return True


class SpoiltGradient(AccumulationStrike):
    """A fault in the rank's own gradient of one parameter, once backward is over.

    Where the sync has begun by then, it is in what the last microbatch adds to that gradient.
    """

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """See `AccumulationStrike`."""
        is_struck = self.victim.spec.overlap and is_last and parameter is self.struck_parameter()
        if is_struck:
            # A copy where the gradient does not lie flat.
            flat_P = grad.flatten()
            self.spoil(flat_P)
            grad.copy_(flat_P.view(grad.shape))
        return is_struck

    def after_backward(self) -> None:
        """See `Strike`."""
        parameter = self.struck_parameter()
        if self.is_due and not self.victim.spec.overlap and parameter is not None:
            self.spoil(self.stack.grad(parameter))
            self.has_struck = True

    def struck_parameter(self) -> nn.Parameter | None:
        """Which; None where none is to be struck before the sync."""
        return self.choose_parameter()

    def spoil(self, grad_P: Tensor) -> None:
        """Do it, in place."""
        raise NotImplementedError


class BitInGradient(SpoiltGradient):
    """One bit of the rank's own gradient is flipped before anything is synchronised, in its largest element."""

    def spoil(self, grad_P: Tensor) -> None:
        """See `SpoiltGradient`."""
        flip_bit(grad_P, largest(grad_P))


class NonfiniteBefore(SpoiltGradient):
    """An element is no number any more when a phase of the sync begins: of any parameter, or of the tied weight."""

    def __init__(self, victim: Victim, step: int, value: float, phase: RankPhase) -> None:
        super().__init__(victim, step)
        self._value = value
        self._phase = phase
        self._phases = [RANK_PHASES[each] for each in ordering_of(victim.spec).phases]

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._upcoming = list(self._phases)

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        self._upcoming = self._upcoming[1:]
        parameter = self.struck_parameter()
        if parameter is not None:
            self.spoil(self.stack.grad(parameter))
            self.has_struck = True

    def struck_parameter(self) -> nn.Parameter | None:
        """See `SpoiltGradient`; the phase to strike before must be the next."""
        if self._upcoming[:1] != [self._phase]:
            return None
        return self.tied if self._phase is RankPhase.TIE else self.choose_parameter()

    def spoil(self, grad_P: Tensor) -> None:
        """See `SpoiltGradient`."""
        grad_P[0] = self._value


class ParameterNotSynchronised(AccumulationStrike):
    """One parameter keeps the rank's own gradient."""

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._own_P: Tensor | None = None

    def accumulate(self, parameter: nn.Parameter, grad: Tensor, is_last: bool) -> bool:
        """See `AccumulationStrike`; spoils nothing, but sees what the whole gradient is before its bucket is sent."""
        if is_last and self.victim.spec.overlap and parameter is self.choose_parameter():
            self._own_P = self.stack.grad(parameter) + grad.flatten()
        return False

    def before_sync(self) -> None:
        """See `StackStrike`."""
        if not self.victim.spec.overlap:
            self._own_P = self.stack.grad(self.choose_parameter()).clone()

    def after_phase(self, phase: Phase) -> None:
        """See `StackStrike`."""
        if phase is Phase.SCATTERED and self._own_P is not None:
            self.stack.grad(self.choose_parameter()).copy_(self._own_P)
            self.has_struck = True
