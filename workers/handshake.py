"""Ranks agree on which collective comes next before they enter it.

A collective has no name on the wire: two of one shape issued in another order mix their values without a word, and two
of unequal size abort the process in C++ or hang. So every member first says what it is about to do, in a message whose
own shape never varies. Must not look at values, and must not decide what a collective does.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contract import Primitive
from workers.errors import CollectiveError, CollectiveMismatchError
from workers.mesh import Members

_UNKNOWN = -1
_NO_PLAN, _KEEPS, _LEAVES = range(3)
"""What a rank says of its next collective: whether it is the one that its plan has next."""
Place = tuple[int, int, int]
"""(buffer, offset, number of elements) of a bucket."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float16, torch.int32)


_PRIMITIVES = tuple(Primitive)


@dataclass(frozen=True, slots=True)
class Intent:
    """One rank's next collective in a group. `buffer` and `offset` say where its tensor lies, where that is known."""

    sequence: int
    """How many went before it in this group."""
    primitive: int
    source: int
    num_elements: int
    dtype: int
    buffer: int = _UNKNOWN
    offset: int = _UNKNOWN

    def agrees(self, other: Intent) -> bool:
        """Whether both can be the same collective; what one side does not know is no contradiction."""
        if self.is_placed and other.is_placed:
            return self == other
        return self.without_place() == other.without_place()

    @property
    def is_placed(self) -> bool:
        """Whether it is known where its tensor lies."""
        return self.buffer != _UNKNOWN

    def without_place(self) -> Intent:
        """The same of a tensor that may lie anywhere."""
        return replace(self, buffer=_UNKNOWN, offset=_UNKNOWN)

    def differs_in(self, other: Intent) -> str:
        """`order` or `shape`."""
        shapes = (self.num_elements, self.dtype) != (other.num_elements, other.dtype)
        order = (self.sequence, self.primitive, self.source) != (other.sequence, other.primitive, other.source)
        placed = self.is_placed and other.is_placed
        order = order or (placed and (self.buffer, self.offset) != (other.buffer, other.offset))
        return "shape" if shapes and not order else "order"

    def __str__(self) -> str:
        dtype = str(_DTYPES[self.dtype]).removeprefix("torch.") if self.dtype != _UNKNOWN else "another dtype"
        where = f" at element {self.offset} of buffer {self.buffer}" if self.is_placed else ""
        where += f" from world_rank {self.source}" if self.source != _UNKNOWN else ""
        return f"{_PRIMITIVES[self.primitive].value} {self.sequence} of {self.num_elements} {dtype}{where}"


class Handshake:
    """One rank's part in agreeing, over the groups of one trial.

    `plan` are a step's gradient buckets in the order in which the replicas sum them. None where backward decides: then
    the plan is the order in which buckets are announced as complete. Each rank says whether it keeps to its own, which
    has a vote, so that of two replicas the one that left it is named.
    """

    def __init__(self, world_rank: int, replicas: Members = (), plan: Sequence[Place] | None = ()) -> None:
        self._world_rank = world_rank
        self._replicas = replicas
        self._fixed_plan = plan
        self._plan = list(plan or ())
        self._carried: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._buffers: dict[int, int] = {}
        self._held: list[Tensor] = []
        self._sequences: defaultdict[Members, int] = defaultdict(int)
        self._num_planned = 0
        self.is_due = True

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Buffers that replicas lay out alike, by their order: what lies in them is told apart by its place."""
        for tensor in tensors:
            # Held, so that no other tensor can ever lie at its address.
            self._held.append(tensor)
            self._buffers.setdefault(tensor.untyped_storage().data_ptr(), len(self._buffers))

    def begin_step(self, is_due: bool = True) -> None:
        """The plan starts over. Without `is_due` this step's collectives are trusted."""
        self._num_planned = 0
        self._plan = list(self._fixed_plan or ())
        self._carried.clear()
        self.is_due = is_due

    def announce(self, bucket_N: Tensor, carried_N: Tensor) -> None:
        """A bucket [N] of a known buffer is complete and will be summed next, as `carried_N` [N]: itself or a copy."""
        buffer, offset = self._place(bucket_N)
        if buffer == _UNKNOWN:
            return
        if self._fixed_plan is None:
            self._plan.append((buffer, offset, bucket_N.numel()))
        if carried_N.untyped_storage().data_ptr() not in self._buffers:
            # Not held: a copy is gone when its sum is over, and another tensor may then lie at its address.
            self._carried[carried_N.untyped_storage().data_ptr()] = (weakref.ref(carried_N), buffer, offset)

    def agree(
        self,
        group: dist.ProcessGroup,
        members: Members,
        primitive: Primitive,
        tensor_N: Tensor,
        source: int,
        alike: bool,
    ) -> None:
        """Exchange intents. Collective over `members`; `alike` where they are replicas that lay buffers out alike.

        Raises CollectiveMismatchError on the ranks that left the others, or on all where nobody can tell, and
        CollectiveError on those that only noticed.
        """
        mine = self._intent(members, primitive, tensor_N, source, alike)
        bearing = self._follow_plan(mine) if members == self._replicas else _NO_PLAN
        said = _exchange(group, mine, bearing, len(members))
        intents = [intent for intent, _ in said]
        if all(mine.agrees(intent) for intent in intents):
            return
        self._object(members, intents, {intent for intent, bearing in said if bearing == _KEEPS})

    def _intent(self, members: Members, primitive: Primitive, tensor_N: Tensor, source: int, alike: bool) -> Intent:
        sequence = self._sequences[members]
        self._sequences[members] += 1
        buffer, offset = self._place(tensor_N) if alike else (_UNKNOWN, _UNKNOWN)
        dtype = _DTYPES.index(tensor_N.dtype) if tensor_N.dtype in _DTYPES else _UNKNOWN
        return Intent(sequence, _PRIMITIVES.index(primitive), source, tensor_N.numel(), dtype, buffer, offset)

    def _place(self, tensor_N: Tensor) -> tuple[int, int]:
        """(buffer, offset) of a tensor, or of the bucket that it is a copy of; unknown for any other."""
        address, offset = tensor_N.untyped_storage().data_ptr(), int(tensor_N.storage_offset())
        if address in self._buffers:
            return self._buffers[address], offset
        carried = self._carried.get(address)
        if carried is None or carried[0]() is None:
            return _UNKNOWN, _UNKNOWN
        _, buffer, first = carried
        return buffer, first + offset

    def _follow_plan(self, mine: Intent) -> int:
        """Whether this is what the plan has next, which is passed where this rank is about to sum a bucket."""
        if self._num_planned >= len(self._plan):
            return _NO_PLAN
        upcoming = self._plan[self._num_planned]
        sums = (_PRIMITIVES.index(Primitive.REDUCE_SCATTER), _PRIMITIVES.index(Primitive.ALL_REDUCE))
        self._num_planned += mine.primitive in sums and mine.is_placed
        return _KEEPS if (mine.buffer, mine.offset, mine.num_elements) == upcoming else _LEAVES

    def _object(self, members: Members, intents: Sequence[Intent], keeping: set[Intent]) -> None:
        # Where several keep to plans that differ, none of them is any help.
        votes = [*intents, *keeping] if len(keeping) == 1 else list(intents)
        support = Counter({intent: sum(map(intent.agrees, votes)) for intent in votes})
        (expected, most), *others = support.most_common()
        tied = [intent for intent, number in others if number == most and not intent.agrees(expected)]
        guilty = [rank for rank, intent in zip(members, intents, strict=True) if not intent.agrees(expected)]
        if tied:
            guilty = list(members)
        said = "; ".join(f"world_rank {rank}: {intent}" for rank, intent in zip(members, intents, strict=True))
        kind = next(intent for intent in intents if not intent.agrees(expected)).differs_in(expected)
        named = f"world_rank {guilty[0]}" if len(guilty) == 1 else f"one of the world ranks {guilty}"
        message = (
            f"{named} is about to enter another collective than its group: {kind} differs; expected {expected}, got "
        )
        message += f"{said}; every member must issue the same collectives of the same sizes in the same order"
        raise (CollectiveMismatchError if self._world_rank in guilty else CollectiveError)(message)


def _exchange(group: dist.ProcessGroup, mine: Intent, bearing: int, num_members: int) -> list[tuple[Intent, int]]:
    """Every member's intent and what it says of its plan, in group order."""
    device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    fields = [mine.sequence, mine.primitive, mine.source, mine.num_elements, mine.dtype, mine.buffer, mine.offset]
    fields.append(bearing)
    sent = torch.tensor(fields, device=device)
    received = torch.empty(num_members * len(fields), dtype=sent.dtype, device=device)
    dist.all_gather_single(received, sent, group=group)
    return [(Intent(*said), bearing) for *said, bearing in received.view(num_members, -1).tolist()]
