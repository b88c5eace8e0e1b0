"""The collectives a trial uses, over the ranks that this process hosts.

`ProcessGroups` hosts one rank and talks to the others through torch.distributed; `VirtualRanks` hosts all of them
in one process and adds in the order in which gloo adds. The sync phases are written once, against this interface, so
that a golden vector, a virtual mesh of thousands and a live gang run through the same lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from workers.errors import CollectiveError
from workers.mesh import Members, MeshGroups


class Moment(StrEnum):
    """Where inside a collective a rank is; drills strike at one of them."""

    BEFORE = "before"
    IN = "in"
    AFTER = "after"


Interceptor = Callable[[Moment], None]


class Pending(Protocol):
    """A collective that was started. Its tensors belong to it until `wait` returns."""

    def wait(self) -> None:
        """Block until it is done. Raises CollectiveError where it broke."""


class Finished:
    """A collective that was over when it started."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Communicator(Protocol):
    """Collectives over groups given by their members' world ranks.

    Tensor arguments map each *hosted* member's world rank to its tensor. Every member must call.
    """

    @property
    def hosted(self) -> Sequence[int]:
        """World ranks that live in this process."""

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """Sum flat buckets [N], N a multiple of the group's size, in place; only member i's i-th part is summed."""

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """The same without waiting for it."""

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """Sum flat tensors [N] on every member, in place."""

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """The same without waiting for it."""

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """Fill every part of flat buckets [N] from the member that owns it, in place."""

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """Copy the flat tensor [N] of the member with world rank `source` into every member's, in place."""


class ProcessGroups:
    """One hosted rank over torch.distributed (gloo or NCCL)."""

    def __init__(self, world_rank: int, groups: MeshGroups, intercept: Interceptor | None = None) -> None:
        self._world_rank = world_rank
        self._groups = groups
        self.intercept = intercept
        self.waited_s = 0.0
        """Time spent inside collectives so far, waiting for the others included."""

    @property
    def hosted(self) -> Members:
        """The one rank of this process."""
        return (self._world_rank,)

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`; parts that this rank does not own keep their values."""
        self.start_reduce_scatter(members, buckets).wait()

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        bucket_N = buckets[self._world_rank]
        shard = part(bucket_N, members.index(self._world_rank), len(members))
        group = self._groups[members]
        trivial = _is_trivial(bucket_N, members)
        return self._start(trivial, lambda: dist.reduce_scatter_single(shard, bucket_N, group=group, async_op=True))

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        self.start_all_reduce(members, tensors).wait()

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """See `Communicator`."""
        tensor_N = tensors[self._world_rank]
        group = self._groups[members]
        trivial = _is_trivial(tensor_N, members)
        return self._start(trivial, lambda: dist.all_reduce(tensor_N, group=group, async_op=True))

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        bucket_N = buckets[self._world_rank]
        shard = part(bucket_N, members.index(self._world_rank), len(members))
        group = self._groups[members]
        trivial = _is_trivial(bucket_N, members)
        self._start(trivial, lambda: dist.all_gather_single(bucket_N, shard, group=group, async_op=True)).wait()

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        tensor_N = tensors[self._world_rank]
        group = self._groups[members]
        trivial = _is_trivial(tensor_N, members)
        self._start(trivial, lambda: dist.broadcast(tensor_N, src=source, group=group, async_op=True)).wait()

    def all_to_all(self, members: Members, sends: Sequence[Tensor], receive_sizes: Sequence[int]) -> list[Tensor]:
        """Send `sends[i]` to member i; returns what each member i sent here, `receive_sizes[i]` elements."""
        sent = torch.cat(list(sends))
        received = torch.empty(sum(receive_sizes), dtype=sent.dtype, device=sent.device)
        sizes = [send.numel() for send in sends]
        group = self._groups[members]
        if len(members) == 1:
            received.copy_(sent)
        else:
            exchange = lambda: dist.all_to_all_single(received, sent, list(receive_sizes), sizes, group, async_op=True)  # noqa: E731
            # Never trivial: a rank with nothing to send may still be waited for.
            self._start(False, exchange).wait()
        return list(received.split(list(receive_sizes)))

    def _start(self, trivial: bool, issue: Callable[[], dist.Work | None]) -> Pending:
        """Issue one collective; a drill may strike before, in and after, also where it is trivial."""
        self.strike(Moment.BEFORE)
        entered_s = time.perf_counter()
        try:
            work = None if trivial else issue()
        except RuntimeError as error:
            raise CollectiveError(f"a collective could not start: {error}") from error
        self.waited_s += time.perf_counter() - entered_s
        return _Issued(work, self)

    def strike(self, moment: Moment) -> None:
        """This rank is at a moment of a collective."""
        if self.intercept is not None:
            self.intercept(moment)


class _Issued:
    """One collective of torch.distributed under way; None where it moves nothing."""

    def __init__(self, work: dist.Work | None, issuer: ProcessGroups) -> None:
        self._work = work
        self._issuer = issuer

    def wait(self) -> None:
        """See `Pending`."""
        entered_s = time.perf_counter()
        self._issuer.strike(Moment.IN)
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"a collective broke: {error}") from error
        self._issuer.waited_s += time.perf_counter() - entered_s
        self._issuer.strike(Moment.AFTER)


class VirtualRanks:
    """All ranks in one process, summing as gloo's ring does (source: gloo's ring in `allreduce.cc`)."""

    def __init__(self, world_size: int) -> None:
        self._hosted = range(world_size)

    @property
    def hosted(self) -> Sequence[int]:
        """Every rank; a range, so that asking for one of thousands costs nothing."""
        return self._hosted

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        tensors = [buckets[world_rank] for world_rank in members]
        summed_N = ring_sum(tensors)
        for index, tensor_N in enumerate(tensors):
            part(tensor_N, index, len(members)).copy_(part(summed_N, index, len(members)))

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        """Done at once: the others' part is done by the same call."""
        self.reduce_scatter(members, buckets)
        return Finished()

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        summed_N = ring_sum([tensors[world_rank] for world_rank in members])
        for world_rank in members:
            tensors[world_rank].copy_(summed_N)

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        """Done at once."""
        self.all_reduce(members, tensors)
        return Finished()

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        size = len(members)
        gathered_N = torch.cat([part(buckets[rank], index, size) for index, rank in enumerate(members)])
        for world_rank in members:
            buckets[world_rank].copy_(gathered_N)

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        """See `Communicator`."""
        for world_rank in members:
            tensors[world_rank].copy_(tensors[source])


def _is_trivial(tensor_N: Tensor, members: Members) -> bool:
    """Whether a sum or gather of a tensor that is equally long on every member moves nothing."""
    return len(members) == 1 or tensor_N.numel() == 0


def part(tensor_N: Tensor, index: int, num_parts: int) -> Tensor:
    """The index-th of `num_parts` equal parts of a flat tensor, as a view."""
    size = tensor_N.numel() // num_parts
    return tensor_N[index * size : (index + 1) * size]


def ring_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of flat tensors [N] with the additions in gloo's order: chunk r is ((g[r-1] + g[r-2]) + ...) + g[r].

    All chunks at once, so that thousands of ranks take as many additions and not their square.
    """
    num_terms, num_elements = len(tensors), tensors[0].numel()
    if num_terms == 1:
        return tensors[0].clone()
    chunk = ring_chunk_elements(num_elements, tensors[0].element_size(), num_terms)
    terms_RN = torch.stack(list(tensors))
    terms_RCn = F.pad(terms_RN, (0, num_terms * chunk - num_elements)).view(num_terms, num_terms, chunk)
    chunks_C = torch.arange(num_terms)
    summed_Cn = terms_RCn[(chunks_C - 1) % num_terms, chunks_C]
    for distance in range(2, num_terms + 1):
        summed_Cn += terms_RCn[(chunks_C - distance) % num_terms, chunks_C]
    return summed_Cn.flatten()[:num_elements]


def ring_chunk_elements(num_elements: int, element_bytes: int, num_ranks: int) -> int:
    """Elements of one of gloo's ring chunks: segments of at most 1 MiB, at least two a rank, whole elements each."""
    size_bytes = num_elements * element_bytes
    num_segments = max(math.ceil(size_bytes / 2**20), 2 * num_ranks)
    num_segments = math.ceil(num_segments / num_ranks) * num_ranks
    segment_bytes = math.ceil(math.ceil(size_bytes / num_segments) / element_bytes) * element_bytes
    return (num_segments // num_ranks) * segment_bytes // element_bytes
