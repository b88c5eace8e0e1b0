"""An attempt that was handed back in good order is no lost one, and the ledger says so."""

from __future__ import annotations

from alembic import op

from migrations.ended import ended_rows_may_change

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

CHECK = "ALTER TABLE attempts ADD CONSTRAINT ck_attempts_outcome CHECK (outcome IN ({}))"
DROP = "ALTER TABLE attempts DROP CONSTRAINT ck_attempts_outcome"
BEFORE = "'requeued', 'completed', 'failed', 'cancelled'"
AFTER = "'requeued', 'handed_back', 'completed', 'failed', 'cancelled'"


def upgrade() -> None:
    op.execute(DROP)
    op.execute(CHECK.format(AFTER))


def downgrade() -> None:
    op.execute(DROP)
    with ended_rows_may_change():
        op.execute("UPDATE attempts SET outcome = 'requeued' WHERE outcome = 'handed_back'")
    op.execute(CHECK.format(BEFORE))
