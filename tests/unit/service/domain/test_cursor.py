from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain import cursor
from service.domain.errors import CursorError


@given(st.integers(), st.text())
def test_a_key_survives(number: int, word: str) -> None:
    made = cursor.encode("rows", (number, word))
    assert cursor.decode("rows", made, (int, str)) == (number, word)
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@pytest.mark.parametrize(
    "values",
    [["other", 1, "x"], ["rows", 1], ["rows", 1, "x", 2], ["rows", "1", "x"], ["rows", True, "x"], ["rows", 1.0, "x"],
     ["rows", 1, None], [], {"rows": 1}, "rows", None],
)  # fmt: skip
def test_a_cursor_of_another_shape_is_refused(values: object) -> None:
    forged = base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")
    with pytest.raises(CursorError):
        cursor.decode("rows", forged, (int, str))


@given(st.text(max_size=40))
def test_any_text_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(CursorError, match="next_cursor"):
        cursor.decode("rows", text, (int, str))
