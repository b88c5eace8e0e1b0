"""What tensor-parallel ranks exchange inside forward and backward, as operations that autograd can follow.

A model's forward is a *flow*: a generator that yields an `Operation` wherever the ranks of a stage must meet, and is
sent its result. `run_flow` drives one flow per hosted rank: live a process hosts one; a single process that hosts all
of them repeats the very same arithmetic. With one rank every operation hands its tensor back.

Source: Megatron-LM, megatron/core/tensor_parallel/mappings.py: what is yielded there, the gradient takes back here.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from workers.communicator import Communicator, VirtualRanks, part
from workers.mesh import Members

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensor-parallel ranks of one stage, and how they talk."""

    members: Members
    communicator: Communicator

    @property
    def size(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(self.members)

    @property
    def hosted(self) -> tuple[int, ...]:
        """tp_ranks that live in this process."""
        return tuple(i for i, world_rank in enumerate(self.members) if world_rank in self.communicator.hosted)


WHOLE = TensorGroup((0,), VirtualRanks(1))
"""The group of a model that is not cut."""


def together(tp: int) -> TensorGroup:
    """All `tp` ranks in this process."""
    return TensorGroup(tuple(range(tp)), VirtualRanks(tp))


@dataclass(frozen=True, slots=True)
class Operation:
    """Where the ranks meet: what is done with each one's tensor."""

    kind: type[torch.autograd.Function]
    tensor: Tensor


Flow = Generator[Operation, Tensor, T]
"""One rank's forward."""


def gather_sequence(x_BSH: Tensor) -> Operation:
    """[B, S / tp, ...] of each rank -> [B, S, ...] on all. Backward sums the ranks' gradients, each keeps its part."""
    return Operation(_GatherSequence, x_BSH)


def reduce_sequence(x_BSH: Tensor) -> Operation:
    """Sum of the ranks' [B, S, ...] -> each its part [B, S / tp, ...]. Backward gathers."""
    return Operation(_ReduceSequence, x_BSH)


def split_sequence(x_BSH: Tensor) -> Operation:
    """Equal [B, S, ...] on all -> each its part [B, S / tp, ...]. Backward gathers, so that it is whole on all."""
    return Operation(_SplitSequence, x_BSH)


def reduce_replicated(x: Tensor) -> Operation:
    """Sum of the ranks' tensors, on all. Backward hands each rank its own gradient: what follows is replicated."""
    return Operation(_ReduceReplicated, x)


def maximum(x: Tensor) -> Operation:
    """The largest of the ranks' values, on all; no gradient."""
    return Operation(_Maximum, x.detach())


def run_flow(flows: Sequence[Flow[T]], group: TensorGroup) -> list[T]:
    """Drive the flow of each hosted rank, in the order of `group.hosted`, to its end; what each returns.

    Collective over the group. All ranks' flows must yield the same operations.
    """
    results: dict[int, T] = {}
    sent: Sequence[Tensor] = ()
    while True:
        yielded: list[Operation] = []
        for index, flow in enumerate(flows):
            try:
                yielded.append(flow.send(sent[index]) if sent else next(flow))
            except StopIteration as end:
                results[index] = end.value
        if not yielded:
            return [results[index] for index in range(len(flows))]
        sent = _perform(yielded, group)


def _perform(operations: Sequence[Operation], group: TensorGroup) -> Sequence[Tensor]:
    tensors = [operation.tensor for operation in operations]
    if group.size == 1:
        return tensors
    outputs: tuple[Tensor, ...] = operations[0].kind.apply(group, *tensors)
    return outputs


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _gather(group, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_reduce_scatter(ctx.group, grads)


class _ReduceSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _reduce_scatter(group, wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_gather(ctx.group, grads)


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        size = wholes[0].shape[1] // group.size
        mine = zip(wholes, group.hosted, strict=True)
        return tuple(whole[:, i * size : (i + 1) * size].clone() for whole, i in mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_gather(ctx.group, grads)


class _ReduceReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        summed = [tensor.flatten().clone() for tensor in tensors]
        group.communicator.all_reduce(group.members, _by_world_rank(group, summed))
        return tuple(flat.view(tensor.shape) for flat, tensor in zip(summed, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads


class _Maximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        # By gathering: gloo's MAX loses a NaN that is not on its first rank, torch's does not.
        gathered = _all_gather(group, [tensor.flatten() for tensor in tensors])
        return tuple(
            flat.view(group.size, *tensor.shape).amax(0) for flat, tensor in zip(gathered, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(None for _ in grads)


def _gather(group: TensorGroup, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[B, S / tp, ...] -> [B, S, ...]."""
    sequence_first = [part_BSH.transpose(0, 1) for part_BSH in parts]
    gathered = _all_gather(group, [part_SBH.flatten() for part_SBH in sequence_first])
    return tuple(
        flat.view(-1, *part_SBH.shape[1:]).transpose(0, 1).contiguous()
        for flat, part_SBH in zip(gathered, sequence_first, strict=True)
    )


def _reduce_scatter(group: TensorGroup, wholes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[B, S, ...] -> [B, S / tp, ...]."""
    sequence_first = [whole_BSH.transpose(0, 1) for whole_BSH in wholes]
    # Cloned: the collective works in place, and autograd may still need what came in.
    flats = [whole_SBH.clone(memory_format=torch.contiguous_format).flatten() for whole_SBH in sequence_first]
    group.communicator.reduce_scatter(group.members, _by_world_rank(group, flats))
    mine = zip(flats, sequence_first, group.hosted, strict=True)
    return tuple(
        part(flat, tp_rank, group.size).view(-1, *whole_SBH.shape[1:]).transpose(0, 1).contiguous()
        for flat, whole_SBH, tp_rank in mine
    )


def _all_gather(group: TensorGroup, flats: Sequence[Tensor]) -> list[Tensor]:
    """Flat [N] of each rank -> [tp * N] on all."""
    buckets = [flat.new_empty(flat.numel() * group.size) for flat in flats]
    for bucket, flat, tp_rank in zip(buckets, flats, group.hosted, strict=True):
        part(bucket, tp_rank, group.size).copy_(flat)
    group.communicator.all_gather(group.members, _by_world_rank(group, buckets))
    return buckets


def _by_world_rank(group: TensorGroup, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return {group.members[tp_rank]: tensor for tp_rank, tensor in zip(group.hosted, tensors, strict=True)}
