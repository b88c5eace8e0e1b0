"""Who waits for room in front of whom. First come, first served; a smaller request may pass a larger one, rarely.

Without this Ray would place whatever fits: a stream of small requests would starve a large one for ever. So nobody
passes a request of its own size, and after `MAX_OVERTAKES` nobody passes a waiting request at all. Knows no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MAX_OVERTAKES = 3
"""How many younger, smaller requests may start before one that waits for more room."""


class Place:
    """One request's place in the line."""

    def __init__(self, line: Line, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_overtakes = 0
        """How many younger requests have started before this one."""
        self._line = line

    @property
    def is_first(self) -> bool:
        """Whether nobody older waits."""
        return self._line.places[0] is self

    @property
    def may_pass(self) -> bool:
        """Whether every older request lets this one go first, should there be room for it now."""
        return all(
            self.num_ranks < older.num_ranks and older.num_overtakes < MAX_OVERTAKES
            for older in self._line.before(self)
        )

    async def until_first(self) -> None:
        """Wait until everybody older has got its room or has given up."""
        while not self.is_first:
            self._line.moved.clear()
            await self._line.moved.wait()

    def serve(self) -> None:
        """It has got its room: whoever is older was overtaken."""
        for older in self._line.before(self):
            older.num_overtakes += 1


class Line:
    """The requests that wait, oldest first."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.moved = asyncio.Event()

    @contextmanager
    def join(self, num_ranks: int) -> Iterator[Place]:
        """Stand in line for the time of a block."""
        place = Place(self, num_ranks)
        self.places.append(place)
        try:
            yield place
        finally:
            self.places.remove(place)
            self.moved.set()

    def before(self, place: Place) -> list[Place]:
        """Everybody older."""
        return self.places[: self.places.index(place)]
