"""What the leader does for the database beside its work: weeks get their partitions, old ones go.

In the leader, because there is one a cluster, it runs for as long as there is anything to write, and it writes nearly
all of it. Leaders of several clusters on one database do it in turn. Must never end a dispatcher.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy.exc import ProgrammingError

from service.storage import partitions
from service.storage.session import DATABASE_AWAY, Database

INTERVAL_S = 3600.0
RETRY_S = 60.0
_log = logging.getLogger("gradgate.dispatcher")


async def keep_house(database: Database, retention_days: int | None) -> None:
    """Arrange the partitions now and then every hour, until cancelled."""
    while True:
        wait_s = INTERVAL_S
        try:
            await partitions.arrange(database, retention_days)
        except DATABASE_AWAY as error:
            _log.warning("cannot arrange the tables' weeks now, trying again", extra={"reason": str(error)})
            wait_s = RETRY_S
        except ProgrammingError as error:
            remedy = "let the dispatcher's role own the tables, or run `gradgate migrate` every week; nothing is lost"
            _log.error("cannot arrange the tables' weeks; %s", remedy, extra={"reason": str(error)})
        await asyncio.sleep(wait_s)
