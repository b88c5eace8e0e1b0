"""JSON that any strict parser reads, in which a non-finite number is neither lost nor turned into null."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contract import Mesh, OrderingName
from workers.encoding import dumps, plain, timestamp


def strict(text: str) -> object:
    def refuse(token: str) -> object:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    inner: tuple[float, ...]


def test_non_finite_numbers_are_strings_wherever_they_are() -> None:
    sample = Sample(math.nan, (math.inf, -math.inf, 1.5))
    assert strict(dumps({"a": [sample]})) == {"a": [{"value": "NaN", "inner": ["Infinity", "-Infinity", 1.5]}]}


def test_enums_booleans_and_dataclasses() -> None:
    assert strict(dumps([OrderingName.BUGGY, True, None, 3, Mesh(3, 2)])) == [
        "buggy",
        True,
        None,
        3,
        {"dp": 3, "pp": 2, "tp": 1, "vpp": 1},
    ]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=12))
def test_everything_plain_is_strict_json(value: object) -> None:
    text = dumps(value)
    strict(text)
    assert "\\u0000" not in text
    text.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_numbers_come_back_as_they_were(value: float) -> None:
    assert strict(dumps(value)) == value


def test_characters_that_postgres_refuses_are_replaced() -> None:
    assert strict(dumps("a\0b")) == "a\N{REPLACEMENT CHARACTER}b"
    assert strict(dumps({"\ud800": 1})) == {"?": 1}


def test_times_are_utc() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    assert timestamp(moment) == "2026-01-02T01:04:05Z"
    assert plain(moment.astimezone(UTC)) == "2026-01-02T01:04:05Z"
    with pytest.raises(ValueError, match="no time zone"):
        timestamp(datetime(2026, 1, 2))


@pytest.mark.parametrize("value", [object(), {1: 2}, b"bytes", Mesh])
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        dumps(value)
