"""A database that is away is waited for by whoever asks again anyway, not died of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from service.storage.session import DATABASE_AWAY

_log = logging.getLogger("gradgate.dispatcher")


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Log that `what` could not be done while the database was away; anything else is raised."""
    try:
        yield
    except DATABASE_AWAY as error:
        _log.warning("the database is away", extra={"could_not": what, "reason": str(error)})
