"""Where the words of a gang's ranks meet: reports go on at once, failures wait a grace for the first cause.

Used by every launcher, so that a killed rank is told the same way whoever started it. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from service.domain.validation import FailureDetail
from service.execution.failure import Death, Symptom, first_cause, grace_s
from workers.contract import RankFailure, StepReport

Word = StepReport | RankFailure | Death | FailureDetail | int
"""What a rank says, or what is noticed about it; an int is a world_rank that has said everything, and a
FailureDetail the end of a launcher that can say no more of any rank."""

OnReports = Callable[[list[StepReport]], None]


class GangFailure(Exception):  # noqa: N818 - named for what happened
    """A gang broke; `detail` is the first cause."""

    def __init__(self, detail: FailureDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail


class Outbox:
    """Words in order of arrival. `put` may be called from the event loop only."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._words: asyncio.Queue[Word] = asyncio.Queue()

    def put(self, word: Word) -> None:
        """Add a word."""
        self._words.put_nowait(word)

    async def collect(self, on_reports: OnReports) -> None:
        """Pass reports on until every rank has said everything. Raises GangFailure with the first cause."""
        running = set(range(self._world_size))
        symptoms: list[Symptom] = []
        until_s: float | None = None
        while running and (words := await self._take(until_s)):
            if reports := [word for word in words if isinstance(word, StepReport)]:
                on_reports(reports)
            for word in words:
                if isinstance(word, int):
                    running.discard(word)
                elif isinstance(word, FailureDetail):
                    raise GangFailure(first_cause(symptoms) if symptoms else word)
                elif isinstance(word, RankFailure | Death) and (word.world_rank in running or symptoms):
                    # A rank that is done may well go away; one that broke may be followed by a better explanation.
                    symptoms.append(word)
                    running.discard(word.world_rank)
                    sooner_s = asyncio.get_running_loop().time() + grace_s(word)
                    until_s = sooner_s if until_s is None else min(until_s, sooner_s)
        if symptoms:
            raise GangFailure(first_cause(symptoms))

    async def _take(self, until_s: float | None) -> list[Word]:
        """Everything there is, at least one word; empty when `until_s` passes first."""
        try:
            async with asyncio.timeout_at(until_s):
                words = [await self._words.get()]
        except TimeoutError:
            return []
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                words.append(self._words.get_nowait())
        return words
