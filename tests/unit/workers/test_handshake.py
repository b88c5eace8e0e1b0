"""What two ranks may mean to do together, and how what differs is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.handshake import Intent

INTENT = Intent(sequence=3, primitive=0, source=-1, num_elements=64, dtype=0, buffer=0, offset=128)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sequence": 4}, "order"),
        ({"primitive": 1}, "order"),
        ({"source": 2}, "order"),
        ({"offset": 0}, "order"),
        ({"offset": 0, "num_elements": 32}, "order"),
        ({"num_elements": 63}, "shape"),
        ({"dtype": 1}, "shape"),
    ],
)
def test_whatever_differs_is_named(changes: dict[str, int], what: str) -> None:
    other = replace(INTENT, **changes)
    assert INTENT.agrees(INTENT)
    assert not INTENT.agrees(other)
    assert not other.agrees(INTENT)
    assert other.differs_in(INTENT) == INTENT.differs_in(other) == what
    assert str(other) != str(INTENT)


def test_an_unknown_place_is_no_contradiction_but_an_unknown_size_is() -> None:
    assert INTENT.agrees(INTENT.without_place())
    assert INTENT.without_place().agrees(INTENT)
    assert not INTENT.agrees(replace(INTENT.without_place(), num_elements=63))
