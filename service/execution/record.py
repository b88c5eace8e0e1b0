"""One attempt on the supervisor's side: what the driver says of it becomes rows and events, in order.

Writes nothing but through storage functions fenced by attempt; when one says that the attempt is lost, it stops.
Everything that waits is written in one transaction, so a busy database makes batches larger, not the attempt slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from service import telemetry
from service.domain.cause import Attribution, unknown
from service.domain.validation import EventType, FailureDetail
from service.execution.chronicle import Chronicle, Entry, cause_reason, told_repeated, told_repeating
from service.execution.measures import PHASES, Measures
from service.execution.messages import (
    Cancelled,
    Failed,
    Finished,
    Formed,
    Progress,
    Repeated,
    Repeating,
    Reserved,
    Start,
    WorkKey,
)
from service.storage import ledger, queue, reaping
from service.storage.events import append_many
from service.storage.ledger import Turn
from service.storage.session import DATABASE_AWAY, Connection, Database
from service.tracing import tell_attempt
from workers.contract import Fingerprint, Judgement, TrialSpec, Verdict
from workers.evidence import sign_fingerprints
from workers.plan import ExperimentSpec, trials
from workers.verdict import judge

_RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_log = logging.getLogger("gradgate.dispatcher")


@dataclass(frozen=True, slots=True)
class Requeue:
    """The supervisor's own final word: nobody works on this attempt any more."""

    message: str
    lost: bool = True
    """False: handed back in good order, which uses up nothing."""


Message = Reserved | Formed | Progress | Repeating | Finished | Failed | Cancelled | Requeue
Final = Finished | Failed | Cancelled | Requeue


@dataclass(frozen=True, slots=True)
class _Step:
    """What one message adds to the history: whether the attempt starts running with it, then its events."""

    entries: list[Entry]
    starts_running: bool = False
    nodes: tuple[str, ...] = ()
    """Where the attempt has just got its room."""


class Record:
    """Writes one attempt down. `hear` takes the driver's messages; `run` returns once the last is stored."""

    def __init__(
        self, database: Database, key: WorkKey, queued_s: float, measures: Measures, traceparent: str | None = None
    ) -> None:
        self.key = key
        self.cancel_requested = False
        self.lost = False
        """The attempt is somebody else's by now; nothing of it was or will be written."""
        self.ending = False
        """The last words are being written; after that nobody holds a lease."""
        self.heard_final = False
        self.alarm: asyncio.TimerHandle | None = None
        """Rings when the driver does not end the attempt."""
        self._database = database
        self._measures = measures
        self._traceparent = traceparent
        self._spec: ExperimentSpec | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._plan: tuple[TrialSpec, ...] = ()
        self._chronicle: Chronicle | None = None
        self._fingerprint: tuple[Fingerprint, ...] = ()
        self._timings: dict[str, Any] = {"queued_s": round(queued_s, 6)}
        self._num_writes = 0
        self._began_s = time.monotonic()
        self._repeating = False
        """The reports of the run are complete, so that nothing can take its verdict away any more."""
        self._attribution: Attribution | None = None

    def begin(self, start: Start) -> None:
        """The driver is about to get this order."""
        self._spec = start.spec

    def hear(self, message: Message) -> None:
        """Take a message of this attempt."""
        self._repeating = self._repeating or isinstance(message, Repeating)
        if self._repeating and isinstance(message, Failed | Cancelled | Requeue):
            message = Finished(self.key, (), Repeated(unknown(_interrupted(message))))
        self.heard_final = self.heard_final or isinstance(message, Final)
        self._inbox.put_nowait(message)

    def stop_alarm(self) -> None:
        """The attempt has come to its end."""
        if self.alarm is not None:
            self.alarm.cancel()

    async def run(self) -> None:
        """Write until the final message is stored, or until the attempt is lost."""
        telemetry.attempt.set((self.key.validation_id, self.key.attempt))
        final: Final | None = None
        while final is None and not self.lost:
            messages = await self._next_messages()
            steps = [step for message in messages if (step := self._absorb(message)) is not None]
            final = messages[-1] if isinstance(messages[-1], Final) else None
            self.ending = final is not None
            end = await self._judge() if isinstance(final, Finished) else final
            await self._store(steps, end)
            if end is not None and not self.lost:
                self._tell(end)

    def _tell(self, end: Judgement | Final) -> None:
        """The stored end, to whoever watches the dispatcher."""
        outcome = "completed" if isinstance(end, Judgement) else type(end).__name__.lower()
        verdict = end.verdict.value if isinstance(end, Judgement) else None
        self._measures.ended(outcome, verdict, self._timings)
        if isinstance(end, Failed | Cancelled) and end.leak is not None:
            self._measures.leaks.inc()
        phases = {phase: self._timings[key] for phase, key in PHASES.items() if key in self._timings}
        attributes: dict[str, str | int] = {
            "gradgate.validation_id": self.key.validation_id,
            "gradgate.attempt": self.key.attempt,
            "gradgate.outcome": outcome,
            "gradgate.verdict": verdict or "",
        }
        failure = end.detail if isinstance(end, Failed) else None
        told: dict[str, object] = {"outcome": outcome, "verdict": verdict, "phases_s": phases}
        if failure is not None:
            told |= {"code": failure.code, "world_rank": failure.world_rank, "node": failure.node}
        _log.info("an attempt ended", extra=told)
        tell_attempt(self._traceparent, attributes, phases, failure.message if failure else None)

    async def _next_messages(self) -> list[Message]:
        messages = [await self._inbox.get()]
        with contextlib.suppress(asyncio.QueueEmpty):
            while not isinstance(messages[-1], Final):
                messages.append(self._inbox.get_nowait())
        return messages

    def _absorb(self, message: Message) -> _Step | None:
        """Take a message into the attempt's history; what of it is to be written now."""
        if isinstance(message, Reserved):
            assert self._spec is not None
            self._plan = trials(self._spec, message.device)
            self._timings |= {"warm": message.warm, "reserve_s": round(message.seconds, 6)}
            told = {"device": message.device, "nodes": message.nodes, "warm": message.warm, "seconds": message.seconds}
            told |= {"why_device": message.why_device} if message.why_device else {}
            return _Step([(EventType.RESERVED, told)], nodes=message.nodes)
        if isinstance(message, Formed):
            self._fingerprint = message.fingerprints
            self._timings["form_s"] = round(message.seconds - self._timings["reserve_s"], 6)
            self._chronicle = Chronicle(self._plan)
            return _Step(self._chronicle.open(), starts_running=True)
        if isinstance(message, Progress | Repeating | Finished | Failed) and self._chronicle is not None:
            return _Step(self._chronicle.hear(message.reports) + self._absorb_repeat(message))
        return None

    def _absorb_repeat(self, message: Message) -> list[Entry]:
        if isinstance(message, Repeating):
            return [(EventType.REPEATING_ELSEWHERE, told_repeating(message))]
        if not isinstance(message, Finished) or message.repeated is None:
            return []
        self._attribution = message.repeated.attribution
        self._timings["repeat_s"] = round(message.repeated.seconds, 6)
        return [(EventType.REPEATED_ELSEWHERE, told_repeated(message.repeated))] if self._repeating else []

    async def _judge(self) -> Judgement | Failed:
        """The verdict. A defect in the judge is a failure of the attempt, never a hanging one."""
        assert self._chronicle is not None
        judging_s = time.monotonic()
        self._timings["phases_s"] = self._chronicle.seconds_by_phase()
        self._timings["run_s"] = round(
            judging_s
            - self._began_s
            - self._timings["reserve_s"]
            - self._timings["form_s"]
            - self._timings.get("repeat_s", 0.0),
            6,
        )
        try:
            nodes = {rank.world_rank: rank.node for rank in self._fingerprint}
            judgement = await asyncio.to_thread(judge, self._plan, self._chronicle.reports, nodes)
        except Exception as error:
            _log.exception("the judge broke")
            return Failed(self.key, FailureDetail("judge_error", f"the reports could not be judged: {error!r}"))
        self._timings["judge_s"] = round(time.monotonic() - judging_s, 6)
        self._timings["attempt_s"] = round(time.monotonic() - self._began_s, 6)
        if judgement.verdict is not Verdict.FAIL:
            return judgement
        self._attribution = self._attribution or unknown("the failed trials were not repeated")
        return replace(judgement, reasons=(*judgement.reasons, cause_reason(self._attribution)))

    async def _store(self, steps: Sequence[_Step], end: Judgement | Final | None) -> None:
        """Write in one transaction, again and again while the database is away: these results exist only here.

        Numbered, because a write whose commit was not heard of may have been made.
        """
        failures, number = 0, self._num_writes + 1
        while True:
            try:
                async with self._database.transaction() as connection:
                    turn = await ledger.take_turn(connection, self.key.validation_id, self.key.attempt, number)
                    self.lost = turn is Turn.LOST or (
                        turn is Turn.OPEN and not await self._write(connection, steps, end)
                    )
                self._num_writes = number
                return
            except DATABASE_AWAY as error:
                extra = {"reason": str(error)}
                _log.warning("cannot store an attempt, trying again", extra=extra)
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def _write(self, connection: Connection, steps: Sequence[_Step], end: Judgement | Final | None) -> bool:
        """False where a fence says that the attempt is lost."""
        key, pending = self.key, list[Entry]()
        for step in steps:
            if step.starts_running:
                held = await self._append(connection, pending) and await queue.mark_running(
                    connection, key.validation_id, key.attempt, self._fingerprint, self._timings
                )
                if not held:
                    return False
                pending = []
            pending += step.entries
            if step.nodes:
                # The events first: they lock the validation's row, as everything that ends the attempt does.
                if not await self._append(connection, pending):
                    return False
                await ledger.reserve(connection, key.validation_id, key.attempt, step.nodes)
                pending = []
        return await self._append(connection, pending) and await self._end(connection, end)

    async def _append(self, connection: Connection, entries: Sequence[Entry]) -> bool:
        if not entries:
            return True
        key = self.key
        return await append_many(connection, key.validation_id, entries, attempt=key.attempt) is not None

    async def _end(self, connection: Connection, end: Judgement | Final | None) -> bool:
        validation_id, attempt = self.key.validation_id, self.key.attempt
        reports = self._chronicle.reports if self._chronicle is not None else []
        if isinstance(end, Judgement):
            return await queue.complete(
                connection,
                validation_id,
                attempt,
                end,
                reports,
                sign_fingerprints(self._fingerprint, reports),
                self._timings,
                cause=self._attribution.cause if self._attribution and end.verdict is Verdict.FAIL else None,
            )
        if isinstance(end, Failed):
            detail = end.detail if end.leak is None else _with_leak(end.detail, end.leak)
            return await queue.fail(connection, validation_id, attempt, detail, reports, self._timings)
        if isinstance(end, Cancelled):
            return await queue.cancel(connection, validation_id, attempt, end.leak)
        if isinstance(end, Requeue):
            return await self._requeue(connection, end)
        return True

    async def _requeue(self, connection: Connection, end: Requeue) -> bool:
        validation_id, attempt = self.key.validation_id, self.key.attempt
        if self.cancel_requested:
            return await queue.cancel(connection, validation_id, attempt, f"{end.message}; its ranks end by themselves")
        if end.lost:
            return await reaping.lose(connection, validation_id, attempt, end.message) is not None
        return await queue.release(connection, validation_id, attempt, end.message)


def _with_leak(detail: FailureDetail, leak: str) -> FailureDetail:
    return replace(detail, message=f"{detail.message}; left behind: {leak}")


def _interrupted(message: Failed | Cancelled | Requeue) -> str:
    why = message.message if isinstance(message, Requeue) else "it broke"
    if isinstance(message, Cancelled):
        why = "the validation was cancelled" + (f"; left behind: {message.leak}" if message.leak else "")
    return f"the repeat with the ranks in other seats came to no end: {why}"
