"""The ledger: which attempt held which cluster, nodes and ranks, from when to when by the database's clock.

Written in the transactions that claim and end an attempt, never on its own, so that it cannot disagree with the
queue. An attempt that was taken over ends here when its lease was taken away; ranks of a dispatcher that died end by
themselves a little later, when they miss its heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum, auto
from typing import Any

from sqlalchemy import and_, func, or_, select, update

from service.domain.validation import Outcome
from service.storage.session import Connection
from service.storage.tables import attempts, validations


class Turn(Enum):
    """What a write of an attempt finds."""

    OPEN = auto()
    """It comes next, and is this transaction's to make."""
    DONE = auto()
    """It was made: whoever made it did not hear that its commit succeeded."""
    LOST = auto()
    """The attempt is not held any more."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """One attempt's entry; `ended_at` and `outcome` are None while it is held."""

    validation_id: str
    attempt: int
    cluster: str
    dispatcher_id: str
    num_ranks: int
    nodes: tuple[str, ...]
    """Where its ranks sit; empty until they are reserved."""
    claimed_at: datetime
    reserved_at: datetime | None
    ended_at: datetime | None
    outcome: str | None
    """`requeued` (lost), `handed_back`, or the validation's final state."""


async def open_entries(connection: Connection, claimed: Sequence[Mapping[str, Any]]) -> None:
    """Enter attempts that this transaction claimed. The database refuses a second open one of a validation."""
    if claimed:
        await connection.execute(attempts.insert().values(claimed_at=func.clock_timestamp()), list(claimed))


async def take_turn(connection: Connection, validation_id: str, attempt: int, number: int) -> Turn:
    """Begin the `number`th write (from 1) of an attempt; ask again with the same number where its fate is unknown.

    A connection may die between COMMIT and its answer. The number is written in the same transaction as the rest, so it
    says which of the two happened; a commit that is still under way is waited for.
    """
    # The validation's row first, as everything that ends an attempt does.
    held = select(validations.c.id).where(validations.c.id == validation_id).with_for_update().cte("held")
    counted = (
        update(attempts)
        .where(
            attempts.c.validation_id == select(held.c.id).scalar_subquery(),
            attempts.c.attempt == attempt,
            attempts.c.ended_at.is_(None),
            attempts.c.num_writes == number - 1,
        )
        .values(num_writes=number)
    )
    if (await connection.execute(counted)).rowcount == 1:
        return Turn.OPEN
    made = select(attempts.c.num_writes).where(attempts.c.validation_id == validation_id, attempts.c.attempt == attempt)
    return Turn.DONE if (await connection.scalar(made) or 0) >= number else Turn.LOST


async def reserve(connection: Connection, validation_id: str, attempt: int, nodes: Sequence[str]) -> bool:
    """The attempt has its nodes; False, and nothing changed, where it has ended."""
    entered = (
        update(attempts)
        .where(attempts.c.validation_id == validation_id, attempts.c.attempt == attempt, attempts.c.ended_at.is_(None))
        .values(nodes=list(nodes), reserved_at=func.clock_timestamp())
    )
    return (await connection.execute(entered)).rowcount == 1


async def close_entry(connection: Connection, validation_id: str, outcome: Outcome) -> None:
    """End what of a validation is open; nothing where it only waited."""
    ended = (
        update(attempts)
        .where(attempts.c.validation_id == validation_id, attempts.c.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=outcome)
    )
    await connection.execute(ended)


async def of_validation(connection: Connection, validation_id: str) -> tuple[Tenure, ...]:
    """All attempts of a validation, oldest first."""
    columns = [attempts.c[field.name] for field in fields(Tenure)]
    query = select(*columns).where(attempts.c.validation_id == validation_id).order_by(attempts.c.attempt)
    return tuple(Tenure(**row | {"nodes": tuple(row["nodes"])}) for row in await _rows(connection, query))


async def overlaps(connection: Connection) -> list[tuple[str, int, int]]:
    """Pairs of attempts of one validation that were held at the same time: id, earlier, later. There must be none."""
    one, other = attempts.alias("one"), attempts.alias("other")
    both = and_(
        one.c.validation_id == other.c.validation_id,
        one.c.attempt < other.c.attempt,
        or_(one.c.ended_at.is_(None), one.c.ended_at > other.c.claimed_at),
        or_(other.c.ended_at.is_(None), other.c.ended_at > one.c.claimed_at),
    )
    query = select(one.c.validation_id, one.c.attempt, other.c.attempt.label("later")).join(other, both)
    rows = (await connection.execute(query.order_by(one.c.validation_id, one.c.attempt, other.c.attempt))).all()
    return [(row.validation_id, row.attempt, row.later) for row in rows]


async def _rows(connection: Connection, query: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in (await connection.execute(query)).mappings()]
