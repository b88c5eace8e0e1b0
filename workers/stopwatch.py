"""How long a rank itself computes, apart from what it waits for. Must not communicate.

On a GPU work is queued, so its time is taken by events in the device's stream: a queued wait for another rank's data
lies outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time spent inside `running`. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        if self._cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._laps.append((start, stop))
        else:
            started_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started_s

    def take(self) -> float:
        """The seconds since the last `take`. Waits for the device where there is one."""
        if self._laps:
            self._laps[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(stop) for start, stop in self._laps) / 1000.0
            self._laps.clear()
        taken, self._seconds = self._seconds, 0.0
        return taken
