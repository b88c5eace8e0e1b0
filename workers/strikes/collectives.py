"""Faults around collectives: what is sent, what is done with the sum, and where it lands.

A struck rank always takes part in the collective, on a copy where its own must not be touched: a rank that stays away
is a hang, which is another fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from workers.communicator import part
from workers.contract import REFERENCE_STACK, RankPhase
from workers.mesh import Members, ends_members
from workers.orderings import ordering_of
from workers.parameters import sequence_parallel_parameters
from workers.prediction import stage_layout
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


class TieOverWrongGroup(TieStrike):
    """Two neighbouring pipelines swap partners. All holders of an end take part, the others with their own partner."""

    def tie(self, tensor_N: Tensor, run: Run) -> None:
        """See `TieStrike`."""
        mesh, at, drill = self.victim.spec.mesh, self.victim.at, self.victim.spec.drill
        assert drill is not None
        assert drill.world_rank is not None
        first = mesh.coordinates(drill.world_rank).dp_rank
        swapped = {first: (first + 1) % mesh.dp, (first + 1) % mesh.dp: first}
        other_stage = mesh.pp - 1 if at.pp_rank == 0 else 0
        partner = mesh.world_rank(swapped.get(at.dp_rank, at.dp_rank), other_stage, at.tp_rank)
        members = ends_members(mesh, at.tp_rank)
        sends = [tensor_N if member == partner else tensor_N[:0] for member in members]
        received = self.victim.links.all_to_all(members, sends, [send.numel() for send in sends])
        tensor_N.add_(received[members.index(partner)])


class LayernormSkipped(CollectiveStrike):
    """The other tensor-parallel ranks' parts of the layernorm gradients never arrive; they get this rank's."""

    def __init__(self, victim: Victim, step: int) -> None:
        super().__init__(victim, step)
        spec, at = victim.spec, victim.at
        owned = [
            stage_layout(spec, stage).owned_intervals(parameter.name, at.dp_rank)
            for stage in spec.mesh.stages(at.pp_rank)
            for parameter in sequence_parallel_parameters(spec, stage)
        ]
        # What a rank does not own its optimizer never looks at.
        self._has_effect = not ordering_of(spec).distributed_optimizer or any(owned)

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is RankPhase.LAYERNORM:
            self.has_struck = self._has_effect
            run(tensor_N.clone())
        else:
            run(tensor_N)


class DpSyncStrike(CollectiveStrike):
    """A fault in the sum over the data-parallel replicas."""

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is RankPhase.DP_SYNC:
            self.sync(tensor_N, members.index(self.victim.at.world_rank), run)
        else:
            run(tensor_N)

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """Stand in for the sync of one bucket, scaled already, of which this rank owns the `dp_rank`-th part."""
        raise NotImplementedError

    def part(self, bucket_N: Tensor, dp_rank: int) -> Tensor:
        """What an owner owns of a bucket, as a view."""
        return part(bucket_N, dp_rank % self.victim.spec.mesh.dp, self.victim.spec.mesh.dp)


class StaleView(DpSyncStrike):
    """The sum lands in a copy of the buffer that nobody reads."""

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        self.has_struck = True
        run(bucket_N.clone())


class WrongShardOwner(DpSyncStrike):
    """The rank takes the next owner's place in the bucket for its own: its sum lands there."""

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        self.has_struck = True
        synced_N = bucket_N.clone()
        run(synced_N)
        self.part(bucket_N, dp_rank + 1).copy_(self.part(synced_N, dp_rank))


class TruncatedTail(DpSyncStrike):
    """The last dp - 1 elements of the rank's part are left out of the sync, as by a size rounded down."""

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        mine_n = self.part(bucket_N, dp_rank)
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

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        self.has_struck |= self._factor != 1
        bucket_N.mul_(self._factor)
        run(bucket_N)


class BitInReceiveBuffer(DpSyncStrike):
    """One bit of the first sum that arrives is flipped, in its largest element."""

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        run(bucket_N)
        mine_n = self.part(bucket_N, dp_rank)
        if not self.has_struck and torch.count_nonzero(mine_n):
            flip_bit(mine_n, largest(mine_n))
            self.has_struck = True


class Reordered(CollectiveStrike):
    """Two collectives of one shape are issued in the other order.

    The sums of two buckets where this rank has two of one size; else the gather of weights before a bucket's sum.
    """

    def __init__(self, victim: Victim, step: int) -> None:
        super().__init__(victim, step)
        spec = victim.spec
        ours = spec.mesh.stages(victim.at.pp_rank) if spec.stack == REFERENCE_STACK else ()
        self._sizes = Counter(bucket.numel for stage in ours for bucket in stage_layout(spec, stage).buckets)
        self._put_off: Tensor | None = None

    def before_forward(self) -> None:
        """See `Strike`."""
        super().before_forward()
        self._put_off = None

    def collective(self, phase: RankPhase, members: Members, tensor_N: Tensor, run: Run) -> None:
        """See `CollectiveStrike`."""
        if phase is not RankPhase.DP_SYNC or self.has_struck:
            run(tensor_N)
        elif max(self._sizes.values(), default=1) == 1:
            self.has_struck = True
            self.victim.links.all_gather(members, {self.victim.at.world_rank: tensor_N.clone()})
            run(tensor_N)
        else:
            self._swap(tensor_N, run)

    def _swap(self, bucket_N: Tensor, run: Run) -> None:
        if self._put_off is None and self._sizes[bucket_N.numel()] > 1:
            self._put_off = bucket_N
            return
        run(bucket_N)
        if self._put_off is not None and self._put_off.numel() == bucket_N.numel():
            self.has_struck = True
            run(self._put_off)


class Shortened(DpSyncStrike):
    """The last dp elements of the first bucket are not sent."""

    def sync(self, bucket_N: Tensor, dp_rank: int, run: Run) -> None:
        """See `DpSyncStrike`."""
        is_first, self.has_struck = not self.has_struck, True
        run(bucket_N[: -self.victim.spec.mesh.dp] if is_first else bucket_N)


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
