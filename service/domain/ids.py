"""Identifiers that sort by the time of their making, also as bytes."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in ascending ASCII order, so that ids sort as bytes in the order of their making."""
_NUM_CHARACTERS = 26


def sortable_id(prefix: str) -> str:
    """`prefix` and 26 characters: 48 bits of Unix milliseconds, then 80 random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = (_ALPHABET[(number >> 5 * place) & 31] for place in reversed(range(_NUM_CHARACTERS)))
    return prefix + "".join(digits)
