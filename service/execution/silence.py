"""How long somebody has said nothing, counted in ticks of the one who listens.

Not read off a clock: a process that was itself stopped, or starved, for a minute would else take its own absence
for the other's, and kill what is well.
"""

from __future__ import annotations


class Silence:
    """Grows by ticks until a word ends it."""

    def __init__(self) -> None:
        self._silent_s = 0.0

    def end(self) -> None:
        """Something was heard."""
        self._silent_s = 0.0

    def grow(self, tick_s: float) -> float:
        """One more tick without a word; how many seconds that makes."""
        self._silent_s += tick_s
        return self._silent_s
