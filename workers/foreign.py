"""Somebody else's stack in a trial: built behind its guard, asked what it owns, judged over every parameter.

Of the reference everything follows from an ordering. Of a foreign stack nothing is believed: its claims are gathered,
and local gradients are those that our own hooks saw.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from workers.checks.named import name_parameters
from workers.checks.ownership import gather_claims, is_replicated
from workers.checks.stack_audit import StackAudit
from workers.communicator import ProcessGroups
from workers.contract import ProbeName, StackRow, TrialSpec
from workers.exchange import Expectation
from workers.grad_sync import scale_of
from workers.intervals import Intervals, count
from workers.local_gradients import LocalGradients
from workers.mesh import ends_members
from workers.stacks.guard import GuardedStack
from workers.stacks.protocol import StackContext
from workers.stacks.registry import find_stack


class ForeignStack:
    """One rank's foreign stack and the account of it. Building it is collective over the mesh.

    `local` must be there before, so that its hooks come first. Raises StackError.
    """

    def __init__(
        self, spec: TrialSpec, context: StackContext, local: LocalGradients, communicator: ProcessGroups
    ) -> None:
        origin = find_stack(spec.stack)
        self.stack = GuardedStack(origin, context)
        self._owned: tuple[Intervals, ...] = ()
        self.shards: list[Intervals] = []
        """By dp_rank: the part of this end's tied weight that it owns. Empty where this rank holds no copy."""
        if context.tied is not None:
            self._gather(context, context.tied, communicator)
        self._audit = StackAudit(
            self.stack,
            origin,
            local,
            name_parameters(context.modules),
            context.tied,
            context.mesh,
            context.at,
            communicator,
            scale_of(spec),
            spec.probe is ProbeName.EXACT,
        )

    def _gather(self, context: StackContext, tied: nn.Parameter, communicator: ProcessGroups) -> None:
        """Collective over the holders of the tied weight."""
        members, dp = ends_members(context.mesh), context.mesh.dp
        gathered = gather_claims(communicator, members, [self.stack.owned(tied)], tied.device)
        self._owned = tuple(claim for (claim,) in gathered)
        end_index = members.index(context.at.world_rank) // dp
        self.shards = list(self._owned[end_index * dp : (end_index + 1) * dp])

    def expect(self, expectation: Expectation) -> Expectation:
        """The same with what the stack says it owns; as it is on ranks that hold no copy of the tied weight."""
        if not self._owned:
            return expectation
        everything = count(expectation.owned[0])
        return replace(expectation, owned=self._owned, sharded=not is_replicated(self._owned, everything))

    def begin_step(self) -> None:
        """Called before `zero_grad`."""
        self._audit.begin_step()

    def remember(self) -> None:
        """Called between `finalize` and `step`."""
        self._audit.remember()

    def synced(self, parameter: nn.Parameter) -> Tensor:
        """The gradient that the optimizer got, float32 [numel]; called after `remember`."""
        return self._audit.synced(parameter)

    def conclude(self) -> StackRow:
        """How every parameter of this rank fared, once the stack has stepped. Collective over the dp replicas."""
        return self._audit.conclude()
