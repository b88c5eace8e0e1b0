"""Runs migrations over one connection, all in one transaction, one process at a time.

Executed by Alembic, never imported. The URL comes from `Config.attributes["url"]` or GRADGATE_DATABASE_URL.
"""

from __future__ import annotations

import os
import re

from alembic import context
from alembic.util import CommandError
from sqlalchemy import NullPool, create_engine, text

from service.storage.migration import refuse_newer
from service.storage.session import sqlalchemy_url
from service.storage.tables import metadata

_LOCK_KEY = 0x67726164
"""Advisory lock: two processes that start at once must not both create the tables."""


def _url() -> str:
    url: str | None = context.config.attributes.get("url") or os.environ.get("GRADGATE_DATABASE_URL")
    if not url:
        raise CommandError("no database to migrate; set GRADGATE_DATABASE_URL, or use `gradgate migrate`")
    return url


def _is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Partitions are no tables of the code: `alembic check` must not want to drop them."""
    return kind != "table" or name is None or re.fullmatch(r".*_(default|\d{8})", name) is None


def run() -> None:
    """Migrate as the command asks. Postgres' DDL is transactional: a migration that fails leaves nothing behind."""
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", target_metadata=metadata, literal_binds=True)
        with context.begin_transaction():
            context.run_migrations()
        return
    engine = create_engine(sqlalchemy_url(_url()), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        refuse_newer(connection)
        context.configure(connection=connection, target_metadata=metadata, include_name=_is_ours)
        context.run_migrations()


run()
