"""Every rank of a mesh as a thread of this process: the real code of a rank, collectives through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from workers.communicator import Finished, Pending, ProcessGroups, VirtualRanks
from workers.mesh import Members

T = TypeVar("T")
WAIT_S = 30.0


class Lockstep:
    """Runs one function on every rank; ranks meet where they call a collective."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._virtual = VirtualRanks(world_size)
        self._lock = threading.Lock()
        self._meetings: dict[Members, tuple[threading.Barrier, dict[int, Any]]] = {}

    def run(self, function: Callable[[int, ProcessGroups], T]) -> list[T]:
        """`function(world_rank, communicator)` on every rank; results by world_rank. Raises what a rank raised."""
        results: list[Any] = [None] * self._world_size
        errors: list[BaseException] = []

        def rank_main(world_rank: int) -> None:
            try:
                results[world_rank] = function(world_rank, cast("ProcessGroups", LockstepRank(self, world_rank)))
            except BaseException as error:
                errors.append(error)
                for barrier, _ in self._meetings.values():
                    barrier.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self._world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
        if causes:
            raise causes[0]
        return results

    def meet(self, members: Members, world_rank: int, brought: Any, act: Callable[[dict[int, Any]], None]) -> Any:
        """Everyone brings something; one of them acts on it all, then everyone sees it all."""
        with self._lock:
            barrier, table = self._meetings.setdefault(members, (threading.Barrier(len(members)), {}))
        table[world_rank] = brought
        if barrier.wait(WAIT_S) == 0:
            act(table)
        barrier.wait(WAIT_S)
        seen = dict(table)
        barrier.wait(WAIT_S)
        return seen


class LockstepRank:
    """One rank's communicator."""

    def __init__(self, world: Lockstep, world_rank: int) -> None:
        self._world = world
        self._world_rank = world_rank
        self._virtual = VirtualRanks(0)

    @property
    def hosted(self) -> Members:
        return (self._world_rank,)

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        self._meet(members, buckets, self._virtual.reduce_scatter)

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        self.reduce_scatter(members, buckets)
        return Finished()

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        self._meet(members, tensors, self._virtual.all_reduce)

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        self.all_reduce(members, tensors)
        return Finished()

    def all_gather(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        self._meet(members, buckets, self._virtual.all_gather)

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        self._meet(members, tensors, lambda group, table: self._virtual.broadcast(group, source, table))

    def all_to_all(self, members: Members, sends: Sequence[Tensor], receive_sizes: Sequence[int]) -> list[Tensor]:
        table = self._world.meet(members, self._world_rank, [send.clone() for send in sends], lambda _: None)
        me = members.index(self._world_rank)
        received = [table[sender][me] for sender in members]
        assert [message.numel() for message in received] == list(receive_sizes)
        return [torch.clone(message) for message in received]

    def _meet(
        self,
        members: Members,
        tensors: Mapping[int, Tensor],
        collective: Callable[[Members, dict[int, Tensor]], None],
    ) -> None:
        self._world.meet(members, self._world_rank, tensors[self._world_rank], lambda table: collective(members, table))
