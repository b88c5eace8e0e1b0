"""Deterministic draws: every weight and token follows from a seed and a name, on any rank, CPU and process.

Only integers are drawn (floats are scaled integers), because the bits of torch's normal draw depend on the CPU's
vector instructions and replicas on unlike nodes must start from equal weights. Must not touch torch's global generator.
"""

from __future__ import annotations

import hashlib

import torch

_GRID = 1 << 22
"""Half-width, in steps, of the grid that uniform weights are drawn from; exact in float32."""


def stream(seed: int, *name: str | int) -> torch.Generator:
    """A CPU generator for one named thing; equal arguments give equal draws, others are unrelated."""
    text = "/".join(map(str, (seed, *name)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def uniform(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    """Float32 values, uniform around 0 with standard deviation `std`, bit-identical on every CPU."""
    steps = torch.empty(shape, dtype=torch.float32).random_(-_GRID, _GRID, generator=generator)
    return steps.mul_(std * 3**0.5 / _GRID)


def integers(
    low: int, high: int, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Integer values in [low, high)."""
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def tiled_permutations(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` ids below `size`: whole permutations one after another, the last cut short. Int64 [count]."""
    tiles = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
    return torch.cat(tiles)[:count]
