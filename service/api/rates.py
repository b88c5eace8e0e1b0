"""How often each key may ask: one bucket of tokens per key, in this process alone.

Protects the process, so it counts what this process serves; the cap of unended validations, which protects the
cluster, is counted in the database.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_BUCKETS = 10_000


class Rates:
    """Lets each name through `per_minute` times a minute, all of them at once if need be."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = float(per_minute)
        self._per_s = per_minute / 60.0
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> float:
        """0 where the request may pass; else seconds until the next may."""
        now_s = self._clock()
        tokens, since_s = self._buckets.pop(name, (self._capacity, now_s))
        tokens = min(self._capacity, tokens + (now_s - since_s) * self._per_s)
        passes = tokens >= 1.0
        self._buckets[name] = (tokens - 1.0 if passes else tokens, now_s)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1.0 - tokens) / self._per_s
