"""Digests of tensors, computed where the tensor lives, for comparing what should be equal on several ranks.

A digest tells equal from unequal bits; it is no defence against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

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


def _words(tensor_N: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor's bits as int64 words, and the bytes that fill no whole word."""
    raw = tensor_N.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.storage_offset() % 8:
        raw = raw.clone()
    return raw[:whole].view(torch.int64), raw[whole:]
