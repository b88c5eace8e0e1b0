"""Where a rank is in its step and how long each phase took it; published, so that a hang or a death has a place."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.contract import Position, RankPhase


class PhaseClock:
    """One rank's position and times."""

    def __init__(self, world_rank: int) -> None:
        self.on_position: Callable[[Position], None] | None = None
        self._entered_s = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.compute_seconds: dict[str, float] = {}
        self.waited_s: Callable[[], float] = lambda: 0.0
        """Tells how long the rank has waited for others so far."""
        self._waited_before_s = 0.0
        self.position = Position(world_rank, RankPhase.IDLE, None, None, 0)

    def enter(self, phase: RankPhase, trial_index: int | None = None, step: int | None = None) -> None:
        """Move to a phase; the time since the last move is booked on the phase left."""
        now_s = time.perf_counter()
        waited_s = self.waited_s()
        self._book(self.position.phase.value, now_s - self._entered_s, waited_s - self._waited_before_s)
        self._entered_s, self._waited_before_s = now_s, waited_s
        self.position = Position(self.position.world_rank, phase, trial_index, step, self.position.sequence + 1)
        if self.on_position is not None:
            self.on_position(self.position)

    def restart(self) -> None:
        """Forget the booked times; a new step begins."""
        self.seconds, self.compute_seconds = {}, {}
        self._entered_s, self._waited_before_s = time.perf_counter(), self.waited_s()

    def _book(self, phase: str, passed_s: float, waited_s: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + passed_s
        self.compute_seconds[phase] = self.compute_seconds.get(phase, 0.0) + passed_s - waited_s
