"""How a drill perturbs a rank's step: real values, at the seams of the real step. Reports are never edited.

Knows nothing of the judges: whatever a strike leaves behind is theirs to find.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.communicator import Communicator, Moment, Pending, ProcessGroups, part
from workers.contract import Drill, RankPhase
from workers.errors import DrillError
from workers.faults import FaultName
from workers.mesh import Members

Where = Callable[[], tuple[RankPhase, int | None]]
"""Tells the rank's phase and step."""

_MOMENTS = {
    FaultName.RAISE_BEFORE: Moment.BEFORE,
    FaultName.KILL_BEFORE: Moment.BEFORE,
    FaultName.RAISE_IN: Moment.IN,
    FaultName.KILL_IN: Moment.IN,
    FaultName.RAISE_AFTER: Moment.AFTER,
    FaultName.KILL_AFTER: Moment.AFTER,
}
_KILLS = (FaultName.KILL_BEFORE, FaultName.KILL_IN, FaultName.KILL_AFTER)


def arm(drill: Drill, communicator: ProcessGroups, where: Where) -> Communicator:
    """The communicator through which a struck rank is to run its step. Local."""
    if drill.fault in _MOMENTS:
        communicator.intercept = Striker(drill, where)
        return communicator
    return StruckCommunicator(communicator, drill, where)


@dataclass(frozen=True, slots=True)
class Striker:
    """Watches one rank's collectives and breaks it at the drill's moment, in the dp sync of the drill's step.

    With overlap that sync starts in the midst of backward, where there is no other collective of the stack.
    """

    drill: Drill
    where: Where

    def __call__(self, moment: Moment) -> None:
        """Called by the communicator before, in and after each collective."""
        fault = FaultName(self.drill.fault)
        phase, step = self.where()
        in_dp_sync = phase in (RankPhase.DP_SYNC, RankPhase.FORWARD_BACKWARD)
        if _MOMENTS[fault] is moment and in_dp_sync and step == self.drill.step:
            strike(fault)


def strike(fault: FaultName) -> None:
    """Break this process. Raises DrillError, or does not return."""
    if fault in _KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    raise DrillError(f"drill {fault.value}: this rank was told to break here; run without `drill` to validate for real")


class StruckCommunicator:
    """A struck rank's collectives: the real ones, with the drill's fault around those of its step's dp sync."""

    def __init__(self, inner: ProcessGroups, drill: Drill, where: Where) -> None:
        self._inner = inner
        self._drill = drill
        self._where = where

    @property
    def hosted(self) -> Members:
        """The one rank of this process."""
        return self._inner.hosted

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self.start_reduce_scatter(members, buckets).wait()

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        pending = self._inner.start_reduce_scatter(members, buckets)
        return _Struck(pending, lambda: self._damage(members, buckets))

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self.start_all_reduce(members, tensors).wait()

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        pending = self._inner.start_all_reduce(members, tensors)
        return _Struck(pending, lambda: self._damage(members, tensors))

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._inner.all_gather(members, buckets)

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._inner.broadcast(members, source, tensors)

    def _damage(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        if self._where() != (RankPhase.DP_SYNC, self._drill.step):
            return
        (world_rank,) = self.hosted
        received_n = part(tensors[world_rank], members.index(world_rank), len(members))
        if torch.count_nonzero(received_n):
            flip_bit(received_n)


@dataclass(frozen=True, slots=True)
class _Struck:
    """A collective under way whose result is damaged once it is there."""

    pending: Pending
    damage: Callable[[], None]

    def wait(self) -> None:
        """See `Pending`."""
        self.pending.wait()
        self.damage()


def flip_bit(values_n: Tensor, bit: int = 22) -> None:
    """Flip one bit of the largest element of a flat float32 tensor, in place; bit 22 is the mantissa's highest."""
    at = int(values_n.abs().argmax())
    values_n[at : at + 1].view(torch.int32).bitwise_xor_(1 << bit)
