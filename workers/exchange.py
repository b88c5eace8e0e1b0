"""Moves local gradients, replays and results of the tied weight to the ranks that own it, piece by piece.

By all-to-all among the holders of the tied weight, never by the collective under test. Does not judge.

Shape legend: P = elements of the tied weight; n = elements of one piece of an owner's intervals; C = contributors, in
the order of `Expectation.members`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.communicator import ProcessGroups
from workers.contract import Mesh, ProbeName
from workers.contributions import EarlyScatter, MeanOfMeans, TiedSync
from workers.grad_buffer import select
from workers.grad_sync import Prescale
from workers.intervals import EMPTY, Interval, Intervals, count, intersect, pieces
from workers.mesh import Members
from workers.rank_code import RankCode

PIECE_ELEMENTS = 1 << 18
"""Most elements of an owner's intervals judged at a time."""
PIECE_TERMS = 1 << 24
"""Most elements times contributors judged at a time: bounds the memory of judging, however wide the mesh."""


Answer = Callable[[], Tensor]
"""The true sum of the whole tied weight, code included and unscaled: int64 [P], as the integer answer gives it."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an ordering does to the tied weight on one mesh; the same on every rank."""

    probe: ProbeName
    mesh: Mesh
    members: Members
    """World ranks of the holders: the first end by dp_rank, then (where there are two) the other."""
    prescale: Prescale
    """What the true sum is divided by, however the ordering goes about it."""
    sharded: bool
    """Each element has one owner at each end; otherwise every rank owns everything."""
    bit_tied: bool
    """Both ends add in the same order, so that any difference between them is a fault."""
    tied_sync: TiedSync | EarlyScatter | MeanOfMeans | None
    """Where and how the ordering leaves something else than the true sum; None where it never does."""
    owned: tuple[Intervals, ...]
    """By index in `members`: the elements that holder owns (all of them without a distributed optimizer)."""
    code: RankCode | None
    """How contributors sign their gradients; None where they do not."""

    @property
    def early(self) -> Intervals:
        """Elements of wte whose last gradient comes after they were scattered."""
        return self.tied_sync.early if self.tied_sync else EMPTY


@dataclass(frozen=True, slots=True)
class Replay:
    """One contributor's local gradient as a single process computes it, float32 [P], and that computation's floor."""

    grad_P: Tensor
    floor: float
    """Largest distance of `grad_P` from the same replay in float64; 0 where the arithmetic is exact."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one holder brings to the judgement; every tensor is flat [P]."""

    local_P: Tensor
    """Its own gradient before any synchronisation."""
    replay: Replay | None
    """The replay of the *next* dp_rank's contribution to the same end: nobody vouches for himself."""
    synced_P: Tensor
    weight_P: Tensor
    answer: Answer | None = None
    """Called only where elements are wrong that nothing else explains."""
    late_P: Tensor | None = None
    """The last microbatch's part of `local_P`; needed on holders of wte where the expectation has early elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What an owner knows about one piece of its intervals."""

    intervals: Intervals
    synced_n: Tensor
    local_Cn: Tensor
    replay_Cn: Tensor | None
    floor_C: Tensor | None
    other_end_n: Tensor | None
    """The same elements of lm_head, from their owners; on owners of wte only."""
    weight_n: Tensor
    other_weight_n: Tensor | None
    late_Cn: Tensor | None
    """What wte's contributors added after the scatter, zero elsewhere; None where the piece has no early element."""


class Exchange:
    """Moves pieces of every holder's tensors to the owners, one all-to-all a round."""

    def __init__(
        self, expectation: Expectation, world_rank: int, holding: Holding, communicator: ProcessGroups
    ) -> None:
        self._members = expectation.members
        self._me = self._members.index(world_rank)
        self._mesh = expectation.mesh
        self._owned = expectation.owned
        self._sharded = expectation.sharded
        self._early = expectation.early
        self._holding = holding
        self._communicator = communicator
        self._pieces = [cut_pieces(owned, len(self._members)) for owned in expectation.owned]
        self.num_rounds = max(len(owner_pieces) for owner_pieces in self._pieces)

    def round(self, round_index: int) -> Piece:
        """Send what every owner needs for its piece of this round; return what this owner needs for its own."""
        wants = [owner[round_index] if round_index < len(owner) else () for owner in self._pieces]
        sends = [torch.cat(self._message(owner, wanted)) for owner, wanted in enumerate(wants)]
        mine = wants[self._me]
        sizes = [sum(self._message_sizes(sender, self._me, mine)) for sender in range(len(self._members))]
        received = self._communicator.all_to_all(self._members, sends, sizes)
        parts = [message.split(self._message_sizes(sender, self._me, mine)) for sender, message in enumerate(received)]
        return self._assemble(mine, parts)

    def _message(self, owner: int, wanted: Intervals) -> list[Tensor]:
        """[local, replay, floor, synced, weight, late] for one owner; parts that it does not need are empty."""
        held = self._holding
        replay, floor = held.local_P[:0], held.local_P[:0]
        if held.replay is not None and wanted:
            replay = select(held.replay.grad_P, wanted)
            floor = held.local_P.new_full((1,), held.replay.floor)
        synced = select(held.synced_P, self._tied_part(self._me, owner, wanted))
        weight = select(held.weight_P, wanted if self._is_partner(self._me, owner) else ()).float()
        late = held.local_P[:0] if held.late_P is None else select(held.late_P, self._late_part(self._me, wanted))
        return [select(held.local_P, wanted), replay, floor, synced, weight, late]

    def _message_sizes(self, sender: int, owner: int, wanted: Intervals) -> list[int]:
        size = count(wanted)
        replayed = self._holding.replay is not None and size > 0
        tied = count(self._tied_part(sender, owner, wanted))
        weight = size if self._is_partner(sender, owner) else 0
        return [size, size if replayed else 0, int(replayed), tied, weight, count(self._late_part(sender, wanted))]

    def _late_part(self, sender: int, wanted: Intervals) -> Intervals:
        """What of `wanted` a holder of wte sends of its last microbatch's gradient."""
        return intersect(self._early, wanted) if sender < self._mesh.dp else ()

    def _tied_part(self, sender: int, owner: int, wanted: Intervals) -> Intervals:
        """What of `wanted` a holder of lm_head sends to an owner of wte: the elements it owns itself.

        Where every rank owns everything, only the holder of the same pipeline sends.
        """
        if not self._crosses(sender, owner):
            return ()
        if not self._sharded and not self._is_partner(sender, owner):
            return ()
        return intersect(self._owned[sender], wanted)

    def _crosses(self, sender: int, owner: int) -> bool:
        return sender >= self._mesh.dp > owner

    def _is_partner(self, sender: int, owner: int) -> bool:
        return self._crosses(sender, owner) and sender - self._mesh.dp == owner

    def _assemble(self, mine: Intervals, parts: Sequence[Sequence[Tensor]]) -> Piece:
        replayed = self._holding.replay is not None and bool(mine)
        tied_owner = self._me < self._mesh.dp and self._mesh.pp > 1
        weights = [message[4] for message in parts if message[4].numel() > 0]
        return Piece(
            intervals=mine,
            synced_n=select(self._holding.synced_P, mine),
            local_Cn=torch.stack([message[0] for message in parts]),
            replay_Cn=self._by_contributor([message[1] for message in parts]) if replayed else None,
            floor_C=self._by_contributor([message[2] for message in parts]).flatten() if replayed else None,
            other_end_n=self._merge(mine, [message[3] for message in parts]) if tied_owner else None,
            weight_n=select(self._holding.weight_P, mine).float(),
            other_weight_n=weights[0] if weights else None,
            late_Cn=self._lay_out_late(mine, [message[5] for message in parts]),
        )

    def _lay_out_late(self, mine: Intervals, parts: Sequence[Tensor]) -> Tensor | None:
        early = positions(mine, intersect(self._early, mine))
        if not early:
            return None
        late_Cn = self._holding.local_P.new_zeros(len(parts), count(mine))
        at = torch.cat([torch.arange(local.start, local.stop, device=late_Cn.device) for local in early])
        for contributor, received in enumerate(parts[: self._mesh.dp]):
            late_Cn[contributor, at] = received
        return late_Cn

    def _by_contributor(self, from_senders: list[Tensor]) -> Tensor:
        """Stack what senders replayed in the order of contributors: the sender at dp_rank d speaks for d + 1."""
        dp = self._mesh.dp
        order = [end * dp + (index - 1) % dp for end in range(len(self._members) // dp) for index in range(dp)]
        return torch.stack([from_senders[sender] for sender in order])

    def _merge(self, mine: Intervals, parts: list[Tensor]) -> Tensor:
        """Put the owners' parts of lm_head into the order of this piece."""
        merged = self._holding.synced_P.new_zeros(count(mine))
        for sender, received in enumerate(parts):
            if received.numel() == 0:
                continue
            offset = 0
            for local in positions(mine, intersect(self._owned[sender], mine)):
                size = local.stop - local.start
                merged[local.start : local.stop] = received[offset : offset + size]
                offset += size
        return merged


def cut_pieces(owned: Intervals, num_contributors: int) -> list[Intervals]:
    """An owner's elements in the pieces in which they are judged: so few at a time that their terms fit in memory."""
    return pieces(owned, max(1, min(PIECE_ELEMENTS, PIECE_TERMS // num_contributors)))


def positions(outer: Intervals, inner: Intervals) -> list[Interval]:
    """Where the elements of `inner` (a subset) lie when the elements of `outer` are laid out one after another."""
    found: list[Interval] = []
    offset = 0
    for interval in outer:
        for part in intersect((interval,), inner):
            found.append(Interval(offset + part.start - interval.start, offset + part.stop - interval.start))
        offset += interval.stop - interval.start
    return found
