"""Validations as the API sees them: stored once per idempotency key, read, listed, cancelled.

The queue's side of the same rows is `service.storage.queue`; per-rank rows are in `service.storage.reports`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, func, select, true, update
from sqlalchemy.dialects.postgresql import insert as insert_on_conflict

from service.domain import cursor as cursors
from service.domain.cause import Cause
from service.domain.cursor import Page
from service.domain.errors import IdempotencyConflict
from service.domain.validation import LEASED, EventType, FailureDetail, State, Validation
from service.storage.events import QUEUE_CHANNEL, notify, record
from service.storage.moves import move
from service.storage.reports import ranks_page as ranks_page
from service.storage.reports import trace_page as trace_page
from service.storage.session import Connection
from service.storage.tables import trials, validations
from workers.contract import (
    SCHEMA_VERSION,
    CollectiveOp,
    CollectiveSummary,
    Observation,
    Primitive,
    ProbeName,
    Reason,
    Role,
    TrialSummary,
    Verdict,
    trial_ordering,
)
from workers.verdict import VERDICT_RULES_VERSION


async def insert(
    connection: Connection,
    *,
    validation_id: str,
    cluster: str,
    request: Mapping[str, Any],
    labels: Mapping[str, str],
    num_ranks: int,
    deadline_s: float,
    created_by: str = "",
    idempotency_key: str | None = None,
    request_hash: str | None = None,
    traceparent: str | None = None,
) -> tuple[Validation, bool]:
    """Queue a validation, or find the one already stored under `idempotency_key`; True where it is new.

    An Idempotency-Key is one per `created_by`, the id of an API key (empty where no keys are configured).
    Two concurrent calls with one key end with one row. Raises IdempotencyConflict where the key belongs to a
    request with another hash.
    """
    statement = (
        insert_on_conflict(validations)
        .values(
            id=validation_id,
            cluster=cluster,
            request=dict(request),
            labels=dict(labels),
            num_ranks=num_ranks,
            deadline_s=deadline_s,
            drill=request.get("drill") is not None,
            created_by=created_by,
            idempotency_key=idempotency_key,
            request_hash=request_hash if idempotency_key is not None else None,
            schema_version=SCHEMA_VERSION,
            verdict_rules_version=VERDICT_RULES_VERSION,
            traceparent=traceparent,
            last_event_seq=1,
        )
        .on_conflict_do_nothing(index_elements=[validations.c.created_by, validations.c.idempotency_key])
        .returning(validations)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return await _stored_under(connection, created_by, idempotency_key, request_hash), False
    await record(connection, [(validation_id, 1, EventType.QUEUED, {"num_ranks": num_ranks})])
    await notify(connection, QUEUE_CHANNEL, {cluster})
    return _to_validation(row, ()), True


async def lock_active(connection: Connection, created_by: str) -> int:
    """How many validations of one creator have not ended; nobody else's insert under this lock can change it."""
    lock = func.pg_advisory_xact_lock(func.hashtextextended(f"gradgate active {created_by}", 0))
    await connection.execute(select(lock))
    unended = select(func.count()).where(
        validations.c.created_by == created_by, validations.c.state.in_((State.QUEUED, *sorted(LEASED)))
    )
    return int(await connection.scalar(unended) or 0)


async def get(connection: Connection, validation_id: str) -> Validation | None:
    """One validation with its trials, or None."""
    found = await _load(connection, validations.c.id == validation_id)
    return found[0] if found else None


async def cluster_of(connection: Connection, validation_id: str) -> str | None:
    """The cluster of a validation, without the rest of it; None where there is no such id."""
    cluster: str | None = await connection.scalar(
        select(validations.c.cluster).where(validations.c.id == validation_id)
    )
    return cluster


async def list_page(
    connection: Connection,
    *,
    cluster: str | None = None,
    visible: Collection[str] | None = None,
    state: State | None = None,
    verdict: Verdict | None = None,
    labels: Mapping[str, str] | None = None,
    drill: bool | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[Validation]:
    """Validations, newest first, of the clusters in `visible` (None: all). Raises CursorError for another's cursor."""
    conditions: list[ColumnElement[bool]] = []
    if cluster is not None:
        conditions.append(validations.c.cluster == cluster)
    if visible is not None:
        conditions.append(validations.c.cluster.in_(visible))
    if state is not None:
        conditions.append(validations.c.state == state)
    if verdict is not None:
        conditions.append(validations.c.verdict == verdict)
    if drill is not None:
        conditions.append(validations.c.drill == drill)
    if labels:
        conditions.append(validations.c.labels.contains(dict(labels)))
    if cursor is not None:
        (before_id,) = cursors.decode("validations", cursor, (str,))
        conditions.append(validations.c.id < before_id)
    found = await _load(connection, and_(true(), *conditions), limit=limit + 1)
    more = len(found) > limit
    return Page(tuple(found[:limit]), cursors.encode("validations", (found[limit - 1].id,)) if more else None)


async def request_cancel(connection: Connection, validation_id: str) -> Validation | None:
    """Cancel what waits, ask for the end of what runs, leave alone what is final; None where there is no such id."""
    # Locked first: between the two statements the state must not swing from held back to waiting.
    await connection.execute(select(validations.c.id).where(validations.c.id == validation_id).with_for_update())
    await move(
        connection,
        validation_id,
        State.CANCELLED,
        EventType.CANCELLED,
        {"reasons": []},
        origin=State.QUEUED,
        cancel_requested_at=func.now(),
    )
    await _ask_to_cancel(connection, validation_id)
    return await get(connection, validation_id)


async def _ask_to_cancel(connection: Connection, validation_id: str) -> None:
    """Record the wish once, with its event, and wake the dispatcher that holds the validation."""
    wished = (
        update(validations)
        .where(
            validations.c.id == validation_id,
            validations.c.state.in_(LEASED),
            validations.c.cancel_requested_at.is_(None),
        )
        .values(
            cancel_requested_at=func.now(),
            last_event_seq=validations.c.last_event_seq + 1,
            revision=validations.c.revision + 1,
        )
        .returning(validations.c.last_event_seq, validations.c.cluster)
    )
    row = (await connection.execute(wished)).one_or_none()
    if row is not None:
        await record(connection, [(validation_id, row.last_event_seq, EventType.CANCEL_REQUESTED, {})])
        await notify(connection, QUEUE_CHANNEL, {row.cluster})


async def _stored_under(
    connection: Connection, created_by: str, idempotency_key: str | None, request_hash: str | None
) -> Validation:
    stored = (
        await connection.execute(
            select(validations.c.id, validations.c.request_hash).where(
                validations.c.created_by == created_by, validations.c.idempotency_key == idempotency_key
            )
        )
    ).one()
    if stored.request_hash != request_hash:
        raise IdempotencyConflict(
            f"Idempotency-Key {idempotency_key!r} belongs to {stored.id}, whose request differs; "
            "a key repeats one request, use a new key for another"
        )
    (validation,) = await _load(connection, validations.c.id == stored.id)
    return validation


async def _load(connection: Connection, condition: ColumnElement[bool], limit: int | None = None) -> list[Validation]:
    """Validations with their trials, newest first."""
    query = select(validations).where(condition).order_by(validations.c.id.desc()).limit(limit)
    rows = (await connection.execute(query)).all()
    judged = await _trials_of(connection, [row.id for row in rows if row.verdict is not None])
    return [_to_validation(row, judged.get(row.id, ())) for row in rows]


async def _trials_of(connection: Connection, ids: Sequence[str]) -> dict[str, list[TrialSummary]]:
    found: defaultdict[str, list[TrialSummary]] = defaultdict(list)
    if ids:
        query = select(trials).where(trials.c.validation_id.in_(ids)).order_by(trials.c.validation_id, trials.c.trial)
        for row in (await connection.execute(query)).all():
            found[row.validation_id].append(_to_trial(row))
    return found


def _to_trial(row: Row[Any]) -> TrialSummary:
    values = dict(row._mapping)
    del values["validation_id"], values["trial"]
    return TrialSummary(
        **values
        | {
            "probe": ProbeName(row.probe),
            "ordering": trial_ordering(row.ordering),
            "role": Role(row.role),
            "missing_reports": tuple((repeat, step, world_rank) for repeat, step, world_rank in row.missing_reports),
        }
    )


def _to_collective(stored: Mapping[str, Any]) -> CollectiveSummary:
    return CollectiveSummary(
        **dict(stored)
        | {
            "primitive": Primitive(stored["primitive"]),
            "op": stored["op"] and CollectiveOp(stored["op"]),
            "num_elements": tuple(stored["num_elements"]),
        }
    )


def _to_validation(row: Row[Any], judged: Sequence[TrialSummary]) -> Validation:
    values = dict(row._mapping)
    del values["idempotency_key"], values["request_hash"], values["traceparent"]
    return Validation(
        **values
        | {
            "state": State(row.state),
            "verdict": row.verdict and Verdict(row.verdict),
            "cause": row.cause and Cause(row.cause),
            "reasons": tuple(Reason(**reason) for reason in row.reasons),
            "observations": tuple(Observation(**observation) for observation in row.observations),
            "collectives": tuple(map(_to_collective, row.collectives)),
            "error": row.error and FailureDetail(**row.error),
            "trials": tuple(judged),
        }
    )
