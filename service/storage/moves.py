"""The one statement that changes a validation's state, with its event, under the rules of the state machine.

Every storage function that moves a validation goes through here, so that no path can forget the fencing by
attempt, the event, the notification or the ETag's revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, update

from service.domain.validation import LEASED, TERMINAL, EventType, Outcome, State, sources
from service.storage import ledger
from service.storage.events import QUEUE_CHANNEL, notify, record
from service.storage.session import Connection
from service.storage.tables import validations


async def move(
    connection: Connection,
    validation_id: str,
    target: State,
    event: EventType,
    data: Mapping[str, Any],
    *,
    attempt: int | None = None,
    origin: State | None = None,
    outcome: Outcome | None = None,
    **values: Any,
) -> bool:
    """Bring a validation to `target`; False where it is not in a state that may go there, or in another attempt.

    `outcome` is what the ledger says of an attempt that ends with the move, by default what the event is called.
    """
    allowed = [validations.c.id == validation_id, validations.c.state.in_([origin] if origin else sources(target))]
    if attempt is not None:
        # Held, too: an attempt that was given back keeps its number until the next claim, and is nobody's by then.
        allowed += [validations.c.attempt == attempt, validations.c.state.in_(LEASED)]
    changed = (
        update(validations)
        .where(*allowed)
        .values(state=target, **_consequences(target), **values)
        .returning(validations.c.last_event_seq, validations.c.cluster)
    )
    row = (await connection.execute(changed)).one_or_none()
    if row is None:
        return False
    if target not in LEASED:
        await ledger.close_entry(connection, validation_id, outcome or Outcome(event))
    await record(connection, [(validation_id, row.last_event_seq, event, data)])
    if target is State.QUEUED:
        await notify(connection, QUEUE_CHANNEL, {row.cluster})
    return True


def _consequences(target: State) -> dict[str, Any]:
    values: dict[str, Any] = {
        "last_event_seq": validations.c.last_event_seq + 1,
        "revision": validations.c.revision + 1,
    }
    if target not in LEASED:
        values["lease_expires_at"] = None
    if target in TERMINAL:
        values["finished_at"] = func.clock_timestamp()
    return values
