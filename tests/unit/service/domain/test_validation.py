from __future__ import annotations

import re
import time
from itertools import product

import pytest

from service.domain.errors import IllegalMove
from service.domain.validation import LEASED, TERMINAL, State, check_move, new_validation_id, sources

# Written out once more: queued -> starting -> running -> an end, back when taken over, failed when nobody comes.
ALLOWED = {
    ("queued", "starting"), ("queued", "failed"), ("queued", "cancelled"),
    ("starting", "running"), ("starting", "queued"), ("starting", "failed"), ("starting", "cancelled"),
    ("running", "completed"), ("running", "queued"), ("running", "failed"), ("running", "cancelled"),
}  # fmt: skip


@pytest.mark.parametrize(("current", "target"), list(product(State, State)))
def test_every_move(current: State, target: State) -> None:
    if (current.value, target.value) in ALLOWED:
        check_move(current, target)
        assert current in sources(target)
        return
    with pytest.raises(IllegalMove, match=f"{current} cannot become {target}"):
        check_move(current, target)
    assert current not in sources(target)


def test_every_state_is_waiting_held_or_final() -> None:
    assert {State.QUEUED} | LEASED | TERMINAL == set(State)
    assert [state for state in State if state.terminal] == [State.COMPLETED, State.FAILED, State.CANCELLED]


def test_ids_have_one_form_and_do_not_repeat() -> None:
    ids = [new_validation_id() for _ in range(1000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"val_[0-7][0-9a-hjkmnp-tv-z]{25}", validation_id) for validation_id in ids)


def test_ids_sort_by_the_time_of_their_making(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ms = [0, 1, 31, 32, 1_000, 1_700_000_000_000, 1_700_000_000_001, 2**48 - 1]
    ids = []
    for time_ms in times_ms:
        monkeypatch.setattr(time, "time_ns", lambda time_ms=time_ms: time_ms * 1_000_000 + 999_999)
        ids.append(new_validation_id())
    assert [i.encode() for i in ids] == sorted(i.encode() for i in ids)
    assert len({len(i) for i in ids}) == 1
