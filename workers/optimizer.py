"""The ZeRO-1 step: update the owned shards in float32, then all-gather the weights.

Without a distributed optimizer (`all_reduce`) every rank updates everything and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.communicator import Communicator, part
from workers.contract import ProbeName
from workers.grad_buffer import GradBuffer, ParameterBuffer
from workers.mesh import Members

ADAM_LEARNING_RATE = 1e-3

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
"""An update rule over float32 master copies."""


class ShardedOptimizer:
    """An update rule on float32 master copies of this rank's shards, over all its chunks."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        weights: Sequence[ParameterBuffer],
        grads: Sequence[GradBuffer],
        members: Members,
        world_rank: int,
        distributed: bool,
    ) -> None:
        self._weight_buckets = [buffer.bucket(index) for buffer in weights for index in buffer.buckets()]
        self._members = members
        self._world_rank = world_rank
        self._distributed = distributed
        index, size = (members.index(world_rank), len(members)) if distributed else (0, 1)
        grad_buckets = [buffer.bucket(bucket) for buffer in grads for bucket in buffer.buckets()]
        self._grad_shards = [part(bucket_N, index, size) for bucket_N in grad_buckets]
        self._weight_shards = [part(bucket_N, index, size) for bucket_N in self._weight_buckets]
        self._masters = [torch.nn.Parameter(shard.float().clone()) for shard in self._weight_shards]
        self._torch_optimizer = make_optimizer(self._masters)

    def step(self, communicator: Communicator) -> None:
        """Update and gather. Collective over the data-parallel group."""
        for master, grad_shard in zip(self._masters, self._grad_shards, strict=True):
            master.grad = grad_shard
        self._torch_optimizer.step()
        for master, weight_shard in zip(self._masters, self._weight_shards, strict=True):
            master.grad = None
            weight_shard.copy_(master.detach())
        if self._distributed:
            for bucket_N in self._weight_buckets:
                communicator.all_gather(self._members, {self._world_rank: bucket_N})

    def reload_masters(self) -> None:
        """Take the weights as they now stand; used where a trial re-seeds them each step."""
        for master, weight_shard in zip(self._masters, self._weight_shards, strict=True):
            master.detach().copy_(weight_shard)


def optimizer_for(probe: ProbeName) -> MakeOptimizer:
    """Adam for gpt, integer-preserving SGD for exact."""
    if probe is ProbeName.EXACT:
        # Adam divides, which leaves the integers; a unit step keeps every weight an exact multiple of a power of two.
        return lambda masters: torch.optim.SGD(masters, lr=1.0)
    return lambda masters: torch.optim.Adam(masters, lr=ADAM_LEARNING_RATE)
