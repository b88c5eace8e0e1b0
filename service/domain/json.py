"""Strict JSON for values that may hold non-finite floats; pure.

The one way in which this product writes JSON: into jsonb, events and responses. It must never emit the bare
tokens NaN or Infinity (not JSON), never turn a non-finite number into null (that hides a fault), and never let
through a character that Postgres refuses in jsonb (U+0000, lone surrogates).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any


def dumps(value: object) -> str:
    """`value` as compact JSON text; dataclasses become objects, non-finite floats strings. TypeError for the rest."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def plain(value: object) -> Any:
    """`value` as what JSON has: dict, list, str, int, bool, None and finite float."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return _storable(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, datetime):
        return timestamp(value)
    return _container(value)


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC. ValueError for a datetime without a zone, since its instant is unknown."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone; times here are UTC, pass an aware datetime")
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _container(value: object) -> Any:
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form here; pass plain values, dataclasses or enums")


def _key(key: object) -> str:
    if isinstance(key, str):
        return str(plain(key))
    raise TypeError(f"{key!r} is not a string; keys of JSON objects are strings")


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _storable(text: str) -> str:
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
