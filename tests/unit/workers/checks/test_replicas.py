"""A digest tells any two unequal tensors apart, and does not depend on where or how a tensor is stored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.checks.replicas import digest

SIZES = [1, 2, 3, 7, 1024, 1025, 5000]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


def values(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size).to(dtype) % 251


def flip(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.uint8)[byte] ^= 1 << bit
    return flipped


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_counts(size: int, dtype: torch.dtype) -> None:
    tensor = values(size, dtype)
    num_bytes = size * tensor.element_size()
    tried = range(num_bytes) if num_bytes < 300 else {0, 1, num_bytes // 2, num_bytes - 9, num_bytes - 8, num_bytes - 1}
    digests = {digest([flip(tensor, byte, bit)]) for byte in tried for bit in (0, 7)}
    assert len(digests | {digest([tensor])}) == 2 * len(tried) + 1


@given(st.integers(2, 3000), st.data())
def test_any_swap_of_unequal_words_shows(size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size, dtype=torch.float64)
    a = data.draw(st.integers(0, size - 2))
    b = data.draw(st.integers(a + 1, size - 1))
    swapped = tensor.clone()
    swapped[[a, b]] = tensor[[b, a]]
    assert digest([swapped]) != digest([tensor])


@pytest.mark.parametrize("shift", [1, 2, 511, 512, 513, 2048])
def test_shifted_values_show(shift: int) -> None:
    tensor = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    assert digest([tensor.roll(shift)]) != digest([tensor])


def test_bits_count_not_values() -> None:
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.tensor([math.nan])]) == digest([torch.tensor([math.nan])])
    assert digest([torch.tensor([1.0])]) != digest([torch.tensor([1.0], dtype=torch.float64)])
    assert digest([torch.tensor([1, 2])]) != digest([torch.tensor([2, 1])])


def test_length_and_borders_count() -> None:
    whole = values(10)
    assert digest([whole]) != digest([whole[:4], whole[4:]])
    assert digest([torch.zeros(3)]) != digest([torch.zeros(4)])
    assert digest([]) != digest([torch.zeros(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("offset", [1, 3, 5])
def test_storage_does_not_count(dtype: torch.dtype, offset: int) -> None:
    tensor = values(1500, dtype)
    stored = torch.zeros(1600, dtype=dtype)
    stored[offset : offset + 1500] = tensor
    assert digest([stored[offset : offset + 1500]]) == digest([tensor])
    assert digest([torch.stack([tensor, tensor], dim=1)[:, 1]]) == digest([tensor])
    assert digest([tensor.clone().requires_grad_(dtype.is_floating_point)]) == digest([tensor])
