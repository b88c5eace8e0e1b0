"""Brings a database to this version's tables, from the migrations that ship in the same wheel.

Synchronous, for a command or a start-up step; an API process only asks `is_current`. Never migrates by itself.
"""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection as SyncConnection

from service.domain.errors import NewerSchemaError
from service.storage import partitions
from service.storage.session import DATABASE_AWAY, Connection

_log = logging.getLogger(__name__)


def upgrade(url: str, revision: str = "head") -> None:
    """Migrate up, and cut tables into weeks. Safe to call from several processes at once, and with nothing to do."""
    command.upgrade(_config(url), revision)
    if revision == "head":
        try:
            partitions.arrange_now(url)
        except DATABASE_AWAY as error:
            _log.warning("the weeks' partitions wait for a dispatcher to make them", extra={"reason": str(error)})


def downgrade(url: str, revision: str) -> None:
    """Migrate down to `revision`; `base` drops everything, data included."""
    command.downgrade(_config(url), revision)


async def is_current(connection: Connection) -> bool:
    """Whether the database has exactly the tables that this version expects."""
    return await connection.run_sync(_revisions) == {head()}


def refuse_newer(connection: SyncConnection) -> None:
    """Raise NewerSchemaError where a newer version has migrated the database."""
    known = {script.revision for script in ScriptDirectory.from_config(_config(None)).walk_revisions()}
    if unknown := _revisions(connection) - known:
        raise NewerSchemaError(
            f"the database's schema is at revision {', '.join(sorted(unknown))}, which this version does not know; it "
            f"knows up to {head()}. A newer version migrated it: run that version, or downgrade the database with it"
        )


def head() -> str:
    """The newest revision in the wheel."""
    newest = ScriptDirectory.from_config(_config(None)).get_current_head()
    assert newest is not None
    return newest


def _revisions(connection: SyncConnection) -> set[str]:
    return set(MigrationContext.configure(connection).get_current_heads())


def _config(url: str | None) -> Config:
    config = Config(Path(str(resources.files("migrations"))) / "alembic.ini")
    config.attributes["url"] = url
    return config
