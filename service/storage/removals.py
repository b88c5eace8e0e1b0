"""Which validations have lost their details to retention: `events`, and each rank's rows. Their verdicts stay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from service.storage.session import Connection
from service.storage.tables import removed_weeks


@dataclass(frozen=True, slots=True)
class Removal:
    """When a validation's details were removed, and under which setting."""

    removed_at: datetime
    retention_days: int


async def of_validation(connection: Connection, validation_id: str) -> Removal | None:
    """None while the details are there."""
    query = select(removed_weeks.c.removed_at, removed_weeks.c.retention_days).where(
        removed_weeks.c.first_id <= validation_id, removed_weeks.c.end_id > validation_id
    )
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else Removal(row.removed_at, row.retention_days)
