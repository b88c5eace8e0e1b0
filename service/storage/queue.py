"""The queue: validations that wait are claimed, held by lease, and end, all fenced by attempt.

A dispatcher that lost its lease may still be alive and about to write; every function here that takes an `attempt`
therefore changes nothing and returns False once the validation has moved on. Times are the database's, so that
dispatchers with different clocks agree on who holds what. Waiting for work is `service.storage.notifications`;
nothing here waits, except for a row lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, cast, func, literal, select, tuple_, update
from sqlalchemy.dialects.postgresql import INTERVAL

from service.domain.cause import Cause
from service.domain.validation import (
    LEASED,
    EventType,
    FailureDetail,
    Outcome,
    State,
)
from service.storage import ledger
from service.storage.events import record
from service.storage.moves import move
from service.storage.reports import copy_reports, insert_trials
from service.storage.session import Connection
from service.storage.tables import validations
from workers.contract import Judgement, StepReport, Verdict

Attempt = tuple[str, int]
"""A validation's id and the attempt in which it is held."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A validation that this dispatcher holds until the lease ends."""

    id: str
    attempt: int
    request: dict[str, Any]
    deadline_s: float
    num_ranks: int
    lease_expires_at: datetime
    created_at: datetime
    traceparent: str | None = None
    """The trace of the request that asked for it."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a renewal found: attempts still held, and those of them that somebody wants cancelled."""

    still_held: frozenset[Attempt]
    cancel_requested: frozenset[Attempt]


async def claim(connection: Connection, *, cluster: str, dispatcher_id: str, lease_s: float, limit: int) -> list[Claim]:
    """Take the oldest waiting validations of a cluster, at most `limit`; queued -> starting, attempt + 1."""
    # Materialized: inlined into the UPDATE the subquery could run more than once and lock more than `limit`.
    waiting = (
        select(validations.c.id)
        .where(validations.c.cluster == cluster, validations.c.state == State.QUEUED)
        .order_by(validations.c.created_at, validations.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("waiting")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    taken = (
        update(validations)
        .where(validations.c.id.in_(select(waiting.c.id)))
        .values(
            state=State.STARTING,
            attempt=validations.c.attempt + 1,
            dispatcher_id=dispatcher_id,
            lease_expires_at=_lease_end(lease_s),
            last_event_seq=validations.c.last_event_seq + 1,
            revision=validations.c.revision + 1,
        )
        .returning(validations)
    )
    rows = sorted((await connection.execute(taken)).all(), key=lambda row: (row.created_at, row.id))
    await ledger.open_entries(connection, [_to_entry(row) for row in rows])
    await record(
        connection,
        [
            (row.id, row.last_event_seq, EventType.CLAIMED, {"attempt": row.attempt, "dispatcher_id": dispatcher_id})
            for row in rows
        ],
    )
    return [_to_claim(row) for row in rows]


async def extend(connection: Connection, *, dispatcher_id: str, held: Iterable[Attempt], lease_s: float) -> Held:
    """Renew the leases of `held`. What is missing from `still_held` is lost: stop working on it."""
    pairs = list(held)
    if not pairs:
        return Held(frozenset(), frozenset())
    renewed = (
        update(validations)
        .where(
            tuple_(validations.c.id, validations.c.attempt).in_(pairs),
            validations.c.dispatcher_id == dispatcher_id,
            validations.c.state.in_(LEASED),
        )
        .values(lease_expires_at=_lease_end(lease_s))
        .returning(validations.c.id, validations.c.attempt, validations.c.cancel_requested_at)
    )
    rows = (await connection.execute(renewed)).all()
    return Held(
        frozenset((row.id, row.attempt) for row in rows),
        frozenset((row.id, row.attempt) for row in rows if row.cancel_requested_at is not None),
    )


async def mark_running(
    connection: Connection, validation_id: str, attempt: int, fingerprint: object, timings: Mapping[str, Any]
) -> bool:
    """The gang stands and the first trial begins; starting -> running."""
    return await move(
        connection,
        validation_id,
        State.RUNNING,
        EventType.FORMED,
        {"attempt": attempt, "timings": dict(timings)},
        attempt=attempt,
        started_at=func.clock_timestamp(),
        fingerprint=fingerprint,
        timings=dict(timings),
    )


async def complete(
    connection: Connection,
    validation_id: str,
    attempt: int,
    judgement: Judgement,
    reports: Sequence[StepReport],
    fingerprint: object,
    timings: Mapping[str, Any],
    *,
    cause: Cause | None = None,
) -> bool:
    """Store the verdict and every per-rank row it rests on, or nothing; running -> completed."""
    if cause is None and judgement.verdict is Verdict.FAIL:
        cause = Cause.UNKNOWN
    moved = await move(
        connection,
        validation_id,
        State.COMPLETED,
        EventType.COMPLETED,
        {"attempt": attempt, "verdict": judgement.verdict, "cause": cause, "reasons": judgement.reasons},
        attempt=attempt,
        verdict=judgement.verdict,
        cause=cause,
        reasons=judgement.reasons,
        observations=judgement.observations,
        collectives=judgement.collectives,
        fingerprint=fingerprint,
        timings=dict(timings),
    )
    if moved:
        await insert_trials(connection, validation_id, judgement.trials)
        await copy_reports(connection, validation_id, reports)
    return moved


async def fail(
    connection: Connection,
    validation_id: str,
    attempt: int,
    detail: FailureDetail,
    reports: Sequence[StepReport] = (),
    timings: Mapping[str, Any] | None = None,
) -> bool:
    """Store why the attempt crashed and what its ranks had said until then; starting or running -> failed."""
    moved = await move(
        connection,
        validation_id,
        State.FAILED,
        EventType.FAILED,
        {"attempt": attempt, "error": detail},
        attempt=attempt,
        error=detail,
        timings=dict(timings or {}),
    )
    if moved:
        await copy_reports(connection, validation_id, reports)
    return moved


async def cancel(connection: Connection, validation_id: str, attempt: int, leak: str | None = None) -> bool:
    """The gang is gone, or `leak` says in words what could not be torn down; starting or running -> cancelled."""
    reasons = [{"code": "leak", "message": leak}] if leak else []
    return await move(
        connection,
        validation_id,
        State.CANCELLED,
        EventType.CANCELLED,
        {"attempt": attempt, "reasons": reasons},
        attempt=attempt,
        reasons=reasons,
    )


async def release(connection: Connection, validation_id: str, attempt: int, message: str) -> bool:
    """Give a held validation back to the queue, for a dispatcher that stops in good order and left no gang behind.

    One that somebody wanted cancelled is cancelled instead.
    """
    asked = select(validations.c.cancel_requested_at).where(validations.c.id == validation_id).with_for_update()
    if (await connection.execute(asked)).scalar_one_or_none() is not None:
        return await cancel(connection, validation_id, attempt)
    return await requeue(connection, validation_id, attempt, message, Outcome.HANDED_BACK)


async def requeue(
    connection: Connection, validation_id: str, attempt: int, message: str, outcome: Outcome = Outcome.REQUEUED
) -> bool:
    """Let a held validation wait again, as it was before it was claimed; starting or running -> queued."""
    return await move(
        connection,
        validation_id,
        State.QUEUED,
        EventType.REQUEUED,
        {"attempt": attempt, "message": message},
        attempt=attempt,
        outcome=outcome,
        dispatcher_id=None,
        started_at=None,
        fingerprint=None,
        timings={},
    )


def _lease_end(lease_s: float) -> ColumnElement[datetime]:
    # clock_timestamp and not now(): a transaction that waited for a lock must not hand out an aged lease.
    return func.clock_timestamp() + interval(lease_s)


def interval(seconds: float) -> ColumnElement[Any]:
    """A stretch of time in SQL."""
    return cast(literal(f"{seconds} seconds"), INTERVAL)


def _to_entry(row: Row[Any]) -> dict[str, Any]:
    return {
        "validation_id": row.id,
        "attempt": row.attempt,
        "cluster": row.cluster,
        "dispatcher_id": row.dispatcher_id,
        "num_ranks": row.num_ranks,
    }


def _to_claim(row: Row[Any]) -> Claim:
    return Claim(
        id=row.id,
        attempt=row.attempt,
        request=row.request,
        deadline_s=row.deadline_s,
        num_ranks=row.num_ranks,
        lease_expires_at=row.lease_expires_at,
        created_at=row.created_at,
        traceparent=row.traceparent,
    )
