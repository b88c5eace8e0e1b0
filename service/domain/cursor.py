"""Opaque keyset cursors: where the next page starts. Pure; a cursor carries no secret and grants nothing."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.domain.errors import CursorError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Items in order, and the cursor of the next page or None at the end."""

    items: tuple[Item, ...]
    next_cursor: str | None


def encode(listing: str, key: tuple[str | int, ...]) -> str:
    """The cursor that continues `listing` after the row whose sort key is `key`."""
    text = json.dumps([listing, *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(listing: str, cursor: str, kinds: tuple[type, ...]) -> tuple[str | int, ...]:
    """The sort key inside `cursor`. Raises CursorError unless it was made for `listing` with keys of `kinds`."""
    values = _values(cursor)
    if len(values) != len(kinds) + 1 or values[0] != listing:
        raise CursorError(_complaint(cursor))
    # `type` and not isinstance: True is an int to Python, but never a key.
    if any(type(value) is not kind for value, kind in zip(values[1:], kinds, strict=True)):
        raise CursorError(_complaint(cursor))
    return tuple(values[1:])


def _values(cursor: str) -> list[str | int]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        values = json.loads(text)
    except (binascii.Error, ValueError, RecursionError) as error:
        raise CursorError(_complaint(cursor)) from error
    if not isinstance(values, list):
        raise CursorError(_complaint(cursor))
    return values


def _complaint(cursor: str) -> str:
    return f"cursor {cursor[:80]!r} is not one of this listing; pass next_cursor of the last page, or leave it out"
