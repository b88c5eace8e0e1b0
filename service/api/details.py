"""What lies behind a verdict may have been removed by retention: the 410 that says so."""

from __future__ import annotations

from service.api.problems import DETAILS_EXPIRED, Problem
from service.storage import removals
from service.storage.session import Connection
from workers.encoding import plain


async def require_details(connection: Connection, validation_id: str) -> None:
    """Raise Problem 410 where a validation's events and per-rank rows have been removed."""
    removal = await removals.of_validation(connection, validation_id)
    if removal is None:
        return
    detail = (
        f"events and per-rank rows of {validation_id} were removed on {removal.removed_at:%Y-%m-%d}: "
        f"GRADGATE_RETENTION_DAYS was {removal.retention_days}; its verdict and its reasons stay"
    )
    extra = {"removed_at": plain(removal.removed_at), "retention_days": removal.retention_days}
    raise Problem(DETAILS_EXPIRED, detail, extra=extra)
