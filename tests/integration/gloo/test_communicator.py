"""What real gloo adds, bit for bit, against the virtual communicator that golden vectors and predictions rest on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gloo_world import run_world

from workers.communicator import ProcessGroups, VirtualRanks
from workers.contract import Mesh
from workers.mesh import dp_members

SIZES = (1, 5, 127, 2048, 10_001, 524_289, 1_310_723)
"""Elements a rank's part of a reduce-scatter; the last two give tensors of more than 2 MiB and of 10 to 20 MiB."""


def terms(num_elements: int, dp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_elements * 8 + dp_rank)
    return torch.randn(num_elements, generator=generator)


def real_sums(session: Any, dp: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """On one rank, per size: reduce-scattered, all-reduced, and what all-to-all brought."""
    mesh = Mesh(dp, 1)
    communicator = ProcessGroups(session.world_rank, session.mesh_groups(mesh))
    members, me = dp_members(mesh, 0), session.world_rank
    results = []
    for size in SIZES:
        scattered, reduced = terms(size * dp, me), terms(size, me)
        communicator.reduce_scatter(members, {me: scattered})
        communicator.all_reduce(members, {me: reduced})
        # One rank sends nothing at all, and rank 0 receives nothing at all.
        sizes = [0 if me == 1 or receiver == 0 else receiver + 1 for receiver in range(dp)]
        sends = [torch.full((number,), float(me)) for number in sizes]
        receive_sizes = [0 if sender == 1 or me == 0 else me + 1 for sender in range(dp)]
        exchanged = torch.cat(communicator.all_to_all(members, sends, receive_sizes))
        results.append((scattered.numpy(), reduced.numpy(), exchanged.numpy()))
    return results


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_gloo_adds_as_virtual_ranks_do(dp: int) -> None:
    results = run_world(dp, real_sums, dp)
    members = tuple(range(dp))
    for index, size in enumerate(SIZES):
        scattered = {rank: terms(size * dp, rank) for rank in members}
        reduced = {rank: terms(size, rank) for rank in members}
        VirtualRanks(dp).reduce_scatter(members, scattered)
        VirtualRanks(dp).all_reduce(members, reduced)
        for rank in members:
            real_scattered, real_reduced, exchanged = results[rank][index]
            assert_same_bits(real_scattered, scattered[rank].numpy(), f"reduce_scatter of {size} x {dp} on {rank}")
            assert_same_bits(real_reduced, reduced[rank].numpy(), f"all_reduce of {size} on {rank}")
            senders = [] if rank == 0 else [sender for sender in members if sender != 1]
            assert exchanged.tolist() == [float(sender) for sender in senders for _ in range(rank + 1)]


def assert_same_bits(real: np.ndarray, virtual: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(real.view(np.uint32), virtual.view(np.uint32), what)
