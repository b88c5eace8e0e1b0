"""The order of gloo's additions, written a second time element by element, and the collectives of virtual ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.communicator import VirtualRanks, part, ring_chunk_elements, ring_sum


def naive_chunk(num_elements: int, element_bytes: int, num_ranks: int) -> int:
    """The design's formula: segs = roundup(max(ceil(bytes/1MiB), 2n), n), chunk = (segs/n) roundup(ceil(b/segs), e)."""
    size_bytes = num_elements * element_bytes
    segments = max(-(-size_bytes // (1024 * 1024)), 2 * num_ranks)
    while segments % num_ranks:
        segments += 1
    segment_bytes = -(-size_bytes // segments)
    while segment_bytes % element_bytes:
        segment_bytes += 1
    return segments // num_ranks * segment_bytes // element_bytes


def naive_ring_sum(terms: np.ndarray) -> np.ndarray:
    """Element by element: in chunk r, ((g[r-1] + g[r-2]) + ...) + g[r]."""
    num_ranks, num_elements = terms.shape
    chunk = naive_chunk(num_elements, 4, num_ranks)
    summed = np.empty(num_elements, dtype=np.float32)
    for element in range(num_elements):
        ring = element // chunk
        total = terms[(ring - 1) % num_ranks, element]
        for distance in range(2, num_ranks + 1):
            total = np.float32(total + terms[(ring - distance) % num_ranks, element])
        summed[element] = total
    return summed


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("num_elements", [1, 2, 7, 64, 1001])
def test_ring_sum_adds_in_gloo_s_order(num_ranks: int, num_elements: int) -> None:
    generator = np.random.default_rng(num_ranks * 10_000 + num_elements)
    terms = (generator.standard_normal((num_ranks, num_elements)) * 10.0 ** generator.integers(-4, 5)).astype("f4")
    summed = ring_sum([torch.from_numpy(term) for term in terms]).numpy()
    np.testing.assert_array_equal(summed.view(np.uint32), naive_ring_sum(terms).view(np.uint32))


@given(st.integers(1, 2**27), st.sampled_from([2, 4, 8]), st.integers(2, 64))
def test_chunks_follow_the_formula_and_cover_everything(num_elements: int, element_bytes: int, num_ranks: int) -> None:
    chunk = ring_chunk_elements(num_elements, element_bytes, num_ranks)
    assert chunk == naive_chunk(num_elements, element_bytes, num_ranks)
    assert chunk * num_ranks >= num_elements


def test_chunks_of_known_sizes() -> None:
    # 8 KiB over two: four segments of 2 KiB, two to a chunk, which is the owner's shard.
    assert ring_chunk_elements(2048, 4, 2) == 1024
    # 9 MiB over two: nine segments rounded up to ten, each rounded up to whole elements; no longer the shard.
    assert ring_chunk_elements(9 * 2**18, 4, 2) == 5 * math.ceil(9 * 2**20 / 10 / 4) == 1_179_650


def test_virtual_reduce_scatter_sums_only_the_owner_s_part() -> None:
    buckets = {4: torch.tensor([1.0, 2.0, 3.0, 4.0]), 7: torch.tensor([10.0, 20.0, 30.0, 40.0])}
    VirtualRanks(8).reduce_scatter((4, 7), buckets)
    assert buckets[4].tolist() == [11.0, 22.0, 3.0, 4.0]
    assert buckets[7].tolist() == [10.0, 20.0, 33.0, 44.0]


def test_virtual_all_reduce_and_all_gather() -> None:
    tensors = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])}
    VirtualRanks(2).all_reduce((0, 1), tensors)
    assert tensors[0].tolist() == tensors[1].tolist() == [4.0, 6.0]
    buckets = {0: torch.tensor([1.0, 9.0]), 1: torch.tensor([9.0, 2.0])}
    VirtualRanks(2).all_gather((0, 1), buckets)
    assert buckets[0].tolist() == buckets[1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_non_finite_term_of_any_rank_reaches_every_rank(bad: float, where: int) -> None:
    tensors = {rank: torch.ones(5) for rank in range(3)}
    tensors[where][3] = bad
    VirtualRanks(3).all_reduce((0, 1, 2), tensors)
    for tensor in tensors.values():
        assert torch.isfinite(tensor).tolist() == [True, True, True, False, True]


def test_a_part_is_a_view() -> None:
    whole = torch.zeros(6)
    part(whole, 1, 3).fill_(1)
    assert whole.tolist() == [0, 0, 1, 1, 0, 0]
