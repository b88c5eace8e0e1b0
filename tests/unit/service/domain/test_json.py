from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.json import dumps, plain, timestamp
from workers.contract import OrderingName, Reason


@dataclass(frozen=True, slots=True)
class Measured:
    ordering: OrderingName
    value: float
    reasons: tuple[Reason, ...]


def test_numbers_that_are_not_finite_become_words() -> None:
    assert dumps([math.nan, math.inf, -math.inf, 1.5]) == '["NaN","Infinity","-Infinity",1.5]'


def test_dataclasses_and_enums_become_objects_and_strings() -> None:
    measured = Measured(OrderingName.BUGGY, math.inf, (Reason("a", "b"),))
    assert json.loads(dumps({"m": measured})) == {
        "m": {"ordering": "buggy", "value": "Infinity", "reasons": [{"code": "a", "message": "b"}]}
    }


@pytest.mark.parametrize("value", [0.1, 5e-324, -0.0, 1.7976931348623157e308, 1.0000000000000002])
def test_finite_numbers_keep_every_bit(value: float) -> None:
    assert json.loads(dumps(value)).hex() == value.hex()


@pytest.mark.parametrize(
    ("text", "stored"), [("größe", "größe"), ("a\0b", "a\ufffdb"), ("\ud800x", "?x"), ("\U0001f600", "\U0001f600")]
)
def test_text_is_kept_except_for_what_no_database_takes(text: str, stored: str) -> None:
    assert json.loads(dumps({text: text})) == {stored: stored}


@pytest.mark.parametrize("value", [b"x", object(), {1: 2}, {None: 1}, 1j, Reason])
def test_what_has_no_json_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        dumps(value)


def test_times_are_utc_and_say_so() -> None:
    noon = datetime(2030, 1, 2, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    assert timestamp(noon) == "2030-01-02T10:00:00.000001Z"
    assert timestamp(datetime(2030, 1, 2, tzinfo=UTC)) == "2030-01-02T00:00:00Z"
    with pytest.raises(ValueError, match="no time zone"):
        timestamp(datetime(2030, 1, 2))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_any_value_gives_strict_text_that_means_the_same(value: Any) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(f"bare {token}")

    text = dumps(value)
    assert json.loads(text, parse_constant=refuse) == plain(value)
    assert "\\u0000" not in text.replace("\\\\", "")
    text.encode("utf-8")
