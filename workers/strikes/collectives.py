"""Faults around collectives: what is sent, what is done with the sum, and where it lands.

A struck rank always takes part in the collective, on a copy where its own must not be touched: a rank that stays away is
a hang, which is another fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from workers.communicator import part
from workers.contract import RankPhase
from workers.mesh import Members
from workers.strikes.strike import CollectiveStrike, Victim, flip_bit, largest

Run = Callable[[Tensor], None]


class TieStrike(CollectiveStrike):
    """A fault in the sum of the two ends."""

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is RankPhase.TIE:
            self.has_struck = True
            self.tie(tensor_N, run)
        else:
            run(tensor_N)

    def tie(self, tensor_N: Tensor, run: Run) -> None:
        """Stand in for the tie."""
        raise NotImplementedError


class TieSkipped(TieStrike):
    """The other end's part never arrives."""

    def tie(self, tensor_N: Tensor, run: Run) -> None:
        """See `TieStrike`."""
        run(tensor_N.clone())


class TieDoubled(TieStrike):
    """The other end's part is added twice."""

    def tie(self, tensor_N: Tensor, run: Run) -> None:
        """See `TieStrike`."""
        own_N = tensor_N.clone()
        run(tensor_N)
        tensor_N.add_(tensor_N - own_N)


class TieMean(TieStrike):
    """The ends are averaged instead of added."""

    def tie(self, tensor_N: Tensor, run: Run) -> None:
        """See `TieStrike`."""
        run(tensor_N)
        tensor_N.mul_(0.5)


class DpSyncStrike(CollectiveStrike):
    """A fault in the sum over the data-parallel replicas."""

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is RankPhase.DP_SYNC:
            mine_n = part(tensor_N, members.index(self.victim.at.world_rank), len(members))
            self.sync(tensor_N, mine_n, run)
        else:
            run(tensor_N)

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """Stand in for the sync of one bucket, scaled already; `mine_n` is the part of it that this rank owns."""
        raise NotImplementedError


class StaleView(DpSyncStrike):
    """The sum lands in a copy of the buffer that nobody reads."""

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """See `DpSyncStrike`."""
        self.has_struck = True
        run(bucket_N.clone())


class WrongShardOwner(DpSyncStrike):
    """The rank takes the next owner's place in the bucket for its own: its sum lands there."""

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """See `DpSyncStrike`."""
        before_n = mine_n.clone()
        run(bucket_N)
        next_n = bucket_N.roll(-_offset(bucket_N, mine_n) - mine_n.numel())[: mine_n.numel()]
        self.has_struck |= next_n.numel() < bucket_N.numel()
        summed_n = mine_n.clone()
        mine_n.copy_(before_n)
        start = (_offset(bucket_N, mine_n) + mine_n.numel()) % bucket_N.numel()
        bucket_N[start : start + mine_n.numel()].copy_(summed_n)


class TruncatedTail(DpSyncStrike):
    """The last dp - 1 elements of the rank's part are left out of the sync, as by a size rounded down."""

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """See `DpSyncStrike`."""
        before_n = mine_n.clone()
        run(bucket_N)
        # Padding is zero before and after, and no part of the tail.
        synced = (mine_n != before_n).nonzero().flatten()
        left_out = synced[max(0, synced.numel() - (self.victim.spec.mesh.dp - 1)) :]
        mine_n[left_out] = before_n[left_out]
        self.has_struck |= left_out.numel() > 0


class WrongDivisor(DpSyncStrike):
    """The rank's own share is divided by something else than the others'."""

    def __init__(self, victim: Victim, step: int, factor: float) -> None:
        super().__init__(victim, step)
        self._factor = factor

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """See `DpSyncStrike`."""
        self.has_struck |= self._factor != 1
        bucket_N.mul_(self._factor)
        run(bucket_N)


class BitInReceiveBuffer(DpSyncStrike):
    """One bit of the first sum that arrives is flipped, in its largest element."""

    def sync(self, bucket_N: Tensor, mine_n: Tensor, run: Run) -> None:
        """See `DpSyncStrike`."""
        run(bucket_N)
        if not self.has_struck and torch.count_nonzero(mine_n):
            flip_bit(mine_n, largest(mine_n))
            self.has_struck = True


class NonfiniteBeforeGather(CollectiveStrike):
    """A weight that the rank has just updated is no number any more when it is sent to the replicas."""

    def __init__(self, victim: Victim, step: int, value: float) -> None:
        super().__init__(victim, step)
        self._value = value

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is RankPhase.OPTIMIZER and not self.has_struck:
            mine_n = part(tensor_N, members.index(self.victim.at.world_rank), len(members))
            if torch.count_nonzero(mine_n):
                mine_n[largest(mine_n)] = self._value
                self.has_struck = True
        run(tensor_N)
        assert not math.isfinite(self._value)


def _offset(bucket_N: Tensor, mine_n: Tensor) -> int:
    return mine_n.storage_offset() - bucket_N.storage_offset()
