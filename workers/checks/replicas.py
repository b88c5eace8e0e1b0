"""Digests of tensors, computed where the tensor lives, for comparing what should be equal on several ranks.

A digest tells equal from unequal bits; it is no defence against an adversary. Where there are only two replicas, and so
no majority, `GatherWatch` remembers what each of them sent, which tells the one that is damaged from the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from workers.communicator import Communicator, Pending, part
from workers.contract import ReplicaRow
from workers.mesh import Members

_COLUMNS = 512


def digest(tensors: Iterable[Tensor]) -> str:
    """A 128-bit digest (hex) of flat tensors' bits, in order.

    Bits are taken as 64-bit words in a matrix of 512 columns; the wrapping sums of its rows and of its columns are
    hashed, so that a pass at memory speed (also on a GPU) sees any single change and any swap of two unequal words.
    """
    state = hashlib.blake2b(digest_size=16)
    for tensor_N in tensors:
        state.update(f"{tensor_N.dtype}:{tensor_N.numel()};".encode())
        words, rest = _words(tensor_N.detach().contiguous())
        matrix = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
        tail = words[matrix.numel() :]
        for summed in (matrix.sum(dim=1), matrix.sum(dim=0), tail):
            state.update(summed.cpu().numpy().tobytes())
        state.update(rest.cpu().numpy().tobytes())
    return state.hexdigest()


class GatherWatch:
    """The collectives of one rank, watched where two replicas make their weights whole."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self._sent: list[str] = []
        self._parts: list[tuple[Tensor, Tensor]] = []

    @property
    def hosted(self) -> Sequence[int]:
        """The rank of this process."""
        return self._inner.hosted

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._inner.reduce_scatter(members, buckets)

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        return self._inner.start_reduce_scatter(members, buckets)

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._inner.all_reduce(members, tensors)

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        return self._inner.start_all_reduce(members, tensors)

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self._inner.broadcast(members, source, tensors)

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        (world_rank,) = self.hosted
        if len(members) == 2:
            index = members.index(world_rank)
            own_n, other_n = (part(buckets[world_rank], place, 2) for place in (index, 1 - index))
            self._sent.append(digest([own_n]))
            self._parts.append((own_n, other_n))
        self._inner.all_gather(members, buckets)

    def conclude(self, initial_weights_digest: str, weights_digest: str, tied_digest: str | None = None) -> ReplicaRow:
        """The row of the step that is over; forgets what was sent in it."""
        sent, parts = self._sent, self._parts
        self._sent, self._parts = [], []
        if not parts:
            return ReplicaRow(initial_weights_digest, weights_digest, tied_digest=tied_digest)
        kept = " ".join(digest([own_n]) for own_n, _ in parts)
        received = " ".join(digest([other_n]) for _, other_n in parts)
        watched = (_short(" ".join(sent)), _short(kept), _short(received))
        return ReplicaRow(initial_weights_digest, weights_digest, *watched, tied_digest=tied_digest)


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _words(tensor_N: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor's bits as int64 words, and the bytes that fill no whole word."""
    raw = tensor_N.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.storage_offset() % 8:
        raw = raw.clone()
    return raw[:whole].view(torch.int64), raw[whole:]
