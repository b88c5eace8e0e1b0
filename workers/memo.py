"""Answers remembered up to a number, the one that was asked for longest ago forgotten first. Not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """At most `max_entries` answers by their keys."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._known: OrderedDict[Key, Value] = OrderedDict()

    def recall(self, key: Key, compute: Callable[[], Value]) -> Value:
        """The answer of this key, computed where it is not known."""
        if key not in self._known:
            if len(self._known) >= self._max_entries:
                self._known.popitem(last=False)
            self._known[key] = compute()
        self._known.move_to_end(key)
        return self._known[key]
