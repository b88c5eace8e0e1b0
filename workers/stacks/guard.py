"""A foreign stack behind a guard: what it raises is named after it, what it gives is held against the protocol.

Checks form only; whether the gradients are right is `workers.checks.stack_audit`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from workers.checks.replicas import digest
from workers.contract import StackOrigin
from workers.errors import StackError, WorkerError
from workers.grad_sync import Observer
from workers.intervals import Interval, Intervals, normalize
from workers.stacks.protocol import Stack, StackContext
from workers.stacks.registry import load_factory

T = TypeVar("T")

METHODS = ("zero_grad", "finalize", "owned", "grad", "step", "weights_changed")


class GuardedStack:
    """See `workers.stacks.protocol.Stack`. Every call may raise StackError (code `stack_failed`)."""

    def __init__(self, origin: StackOrigin, context: StackContext) -> None:
        self._origin = origin
        self._modules = context.modules
        self._parameters = self._current()
        factory, weights = load_factory(origin), self._weights()
        self._stack: Stack = self._named("its factory", lambda: factory(context))
        missing = [name for name in METHODS if not callable(getattr(self._stack, name, None))]
        if missing:
            raise self._broken(f"built a {type(self._stack).__name__} without {', '.join(missing)}")
        self._check_modules("its factory")
        if self._weights() != weights:
            raise self._broken("changed weights in its factory; they are the trial's, and `step` is the time to")

    def zero_grad(self) -> None:
        """Local."""
        self._call("zero_grad")

    def finalize(self, observe: Observer) -> None:
        """Collective over the mesh."""
        self._call("finalize", observe)

    def owned(self, parameter: nn.Parameter) -> Intervals:
        """The claim, normalised. Local."""
        claimed = self._named("owned", lambda: tuple(self._stack.owned(parameter)))
        if not all(isinstance(interval, Interval) for interval in claimed):
            raise self._broken(f"owns {claimed!r}; `owned` gives workers.intervals.Interval objects")
        size = parameter.numel()
        if any(interval.start < 0 or interval.stop > size for interval in claimed):
            raise self._broken(f"owns {claimed!r} of a parameter with {size} elements; stay between 0 and {size}")
        return normalize(claimed)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The main gradient, flat. Local."""
        grad = self._call("grad", parameter)
        if not isinstance(grad, Tensor) or grad.numel() != parameter.numel():
            given = f"a tensor of {grad.numel()} elements" if isinstance(grad, Tensor) else type(grad).__name__
            wanted = f"`grad` gives all {parameter.numel()} elements of the parameter"
            raise self._broken(f"gave {given} as a gradient; {wanted}, owned here or not")
        return grad.detach().flatten().float()

    def step(self) -> None:
        """Collective over the dp group."""
        self._call("step")

    def weights_changed(self) -> None:
        """Local."""
        self._call("weights_changed")

    def _call(self, method: str, *arguments: object) -> Any:
        answer = self._named(method, lambda: getattr(self._stack, method)(*arguments))
        self._check_modules(method)
        return answer

    def _check_modules(self, when: str) -> None:
        if list(map(id, self._current())) != list(map(id, self._parameters)):
            raise self._broken(f"put other parameters into the modules in {when}; change `.data`, keep the objects")

    def _named(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except WorkerError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise StackError(f"stack {self._origin.name!r} ({self._origin}) raised in {what}: {said}") from error

    def _broken(self, what: str) -> StackError:
        return StackError(f"stack {self._origin.name!r} ({self._origin}) {what}; see workers/stacks/protocol.py")

    def _current(self) -> list[nn.Parameter]:
        return [parameter for module in self._modules for parameter in module.parameters()]

    def _weights(self) -> str:
        return digest([parameter.detach().flatten() for parameter in self._parameters])
