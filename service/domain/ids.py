"""Identifiers that sort by the time of their making, also as bytes."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in ascending ASCII order, so that ids sort as bytes in the order of their making."""
_NUM_CHARACTERS = 26
_NUM_RANDOM_BITS = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def sortable_id(prefix: str) -> str:
    """`prefix` and 26 characters: 48 bits of Unix milliseconds, then 80 random bits."""
    return _encode(prefix, time.time_ns() // 1_000_000, secrets.randbits(_NUM_RANDOM_BITS))


def first_id(prefix: str, moment: datetime) -> str:
    """The smallest id that can be made at `moment`: all earlier ones sort before it, all later ones after."""
    return _encode(prefix, (moment - _EPOCH) // timedelta(milliseconds=1), 0)


def made_at(prefix: str, identifier: str) -> datetime | None:
    """When an id was made, by its maker's clock; None for text that is no such id."""
    digits = identifier.removeprefix(prefix)
    if len(digits) != _NUM_CHARACTERS or not identifier.startswith(prefix) or set(digits) - set(_ALPHABET):
        return None
    number = 0
    for digit in digits:
        number = number << 5 | _ALPHABET.index(digit)
    try:
        return _EPOCH + timedelta(milliseconds=number >> _NUM_RANDOM_BITS)
    except OverflowError:
        return None


def _encode(prefix: str, milliseconds: int, random_bits: int) -> str:
    number = milliseconds << _NUM_RANDOM_BITS | random_bits
    digits = (_ALPHABET[(number >> 5 * place) & 31] for place in reversed(range(_NUM_CHARACTERS)))
    return prefix + "".join(digits)
