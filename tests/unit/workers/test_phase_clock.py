"""The clock that knows where a rank is, and what of a phase was its own work."""

from __future__ import annotations

from workers.contract import Position, RankPhase
from workers.phase_clock import PhaseClock


def test_the_clock_publishes_every_move_in_order() -> None:
    clock = PhaseClock(5)
    seen: list[Position] = []
    clock.on_position = seen.append
    clock.enter(RankPhase.DP_SYNC, 1, 0)
    clock.enter(RankPhase.TIE, 1, 0)
    assert [position.sequence for position in seen] == [1, 2]
    assert clock.position == Position(5, RankPhase.TIE, 1, 0, 2)
    assert set(clock.seconds) == {"idle", "dp_sync"}
    assert all(seconds >= 0 for seconds in clock.seconds.values())
    clock.restart()
    assert clock.seconds == {}


def test_what_was_waited_for_others_is_no_work_of_the_rank() -> None:
    clock = PhaseClock(0)
    waited = [5.0]
    clock.waited_s = lambda: waited[0]
    clock.restart()
    clock.enter(RankPhase.DP_SYNC, 0, 0)
    waited[0] += 100.0
    clock.enter(RankPhase.TIE, 0, 0)
    clock.enter(RankPhase.IDLE, 0, 0)
    # Waiting longer than the clock ran would be absurd; it shows that it is taken off, and from one phase only.
    assert clock.compute_seconds["dp_sync"] - clock.seconds["dp_sync"] == -100.0
    assert clock.compute_seconds["tie"] == clock.seconds["tie"]
