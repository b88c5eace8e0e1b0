"""For migrations of data: rows that have ended refuse every UPDATE, and a new column may need filling in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import op

_TRIGGERS = (("validations", "validations_final"), ("attempts", "attempts_ended"))


@contextmanager
def ended_rows_may_change() -> Iterator[None]:
    """Within this block a migration may UPDATE validations and attempts that have ended.

    Nobody else may: disabling a trigger locks its table against every writer until the migration commits, and takes its
    owner. A setting that the trigger asks for would be open to any session. When the block raises, the whole migration
    is rolled back, and the triggers are as they were.
    """
    for table, trigger in _TRIGGERS:
        op.execute(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}")
    yield
    for table, trigger in _TRIGGERS:
        op.execute(f"ALTER TABLE {table} ENABLE TRIGGER {trigger}")
