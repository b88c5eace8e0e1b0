"""What nobody works on any more, or never did: taken from silent dispatchers, and failed where it waited too long.

Called by the leader at intervals and on its own initiative, never for a request. Times are the database's.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, func, select

from service.domain.validation import LEASED, MAX_ATTEMPTS, EventType, FailureDetail, Outcome, State
from service.storage.moves import move
from service.storage.queue import Attempt, cancel, fail, interval, requeue
from service.storage.session import Connection
from service.storage.tables import attempts, validations


async def requeue_expired(connection: Connection, *, cluster: str) -> list[str]:
    """Take validations from dispatchers that let their lease lapse; returns the ids that wait again.

    One whose attempts are used up fails, one that somebody wanted cancelled is cancelled.
    """
    lapsed = (
        select(validations)
        .where(
            validations.c.cluster == cluster,
            validations.c.state.in_(LEASED),
            validations.c.lease_expires_at < func.clock_timestamp(),
        )
        .order_by(validations.c.id)
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(lapsed)).all()
    return [row.id for row in rows if await _take_over(connection, row)]


async def expire_waiting(connection: Connection, *, cluster: str, wait_s: float) -> list[str]:
    """Fail what nobody has taken up for `wait_s`, counted from when it began to wait the last time; returns the ids."""
    given_back = (
        select(func.max(attempts.c.ended_at)).where(attempts.c.validation_id == validations.c.id).scalar_subquery()
    )
    waiting_since = func.coalesce(given_back, validations.c.created_at)
    overdue = (
        select(validations.c.id)
        .where(
            validations.c.cluster == cluster,
            validations.c.state == State.QUEUED,
            # Implied by the last condition, and the queue's index knows it.
            validations.c.created_at < func.clock_timestamp() - interval(wait_s),
            waiting_since < func.clock_timestamp() - interval(wait_s),
        )
        .order_by(validations.c.id)
        .with_for_update(skip_locked=True)
    )
    message = (
        f"waited {wait_s:g} s in the queue of cluster {cluster!r} without being taken up (GRADGATE_QUEUE_WAIT_S); see "
        "that `gradgate dispatch` runs for this cluster and keeps up with its queue, then validate again"
    )
    detail = FailureDetail("queue_wait_expired", message)
    ids = [row.id for row in (await connection.execute(overdue)).all()]
    return [each for each in ids if await _fail_waiting(connection, each, detail)]


async def held_now(connection: Connection, cluster: str) -> frozenset[Attempt]:
    """The attempts of a cluster that somebody holds, or whose lease has lapsed and that nobody took over yet."""
    held = select(validations.c.id, validations.c.attempt).where(
        validations.c.cluster == cluster, validations.c.state.in_(LEASED)
    )
    return frozenset((row.id, row.attempt) for row in (await connection.execute(held)).all())


async def _fail_waiting(connection: Connection, validation_id: str, detail: FailureDetail) -> bool:
    return await move(
        connection,
        validation_id,
        State.FAILED,
        EventType.FAILED,
        {"error": detail},
        origin=State.QUEUED,
        error=detail,
    )


async def _take_over(connection: Connection, row: Row[Any]) -> bool:
    lost = f"dispatcher {row.dispatcher_id} let its lease on attempt {row.attempt} lapse"
    if row.cancel_requested_at is not None:
        leak = f"{lost}; its workers end by themselves once they miss their driver's heartbeat"
        await cancel(connection, row.id, row.attempt, leak)
        return False
    return await lose(connection, row.id, row.attempt, lost) is State.QUEUED


async def lose(connection: Connection, validation_id: str, attempt: int, why: str) -> State | None:
    """A held attempt came to nothing: it waits again, or fails where that was the last one it may lose.

    Returns the state it is in then; None, and nothing changed, where it is not held in that attempt. Attempts that were
    handed back do not count.
    """
    lost = select(func.count()).where(attempts.c.validation_id == validation_id, attempts.c.outcome == Outcome.REQUEUED)
    if int(await connection.scalar(lost) or 0) + 1 < MAX_ATTEMPTS:
        return State.QUEUED if await requeue(connection, validation_id, attempt, why) else None
    message = f"{why}, the last of {MAX_ATTEMPTS} lost attempts; look at the dispatcher's log, then validate again"
    detail = FailureDetail("attempts_exhausted", message)
    return State.FAILED if await fail(connection, validation_id, attempt, detail) else None
