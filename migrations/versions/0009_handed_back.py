"""An attempt that was handed back in good order is no lost one, and the ledger says so."""

from __future__ import annotations

from alembic import op

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
    # What has ended refuses to change; the rule must yield while the older version's word is put in.
    op.execute(DROP)
    op.execute("ALTER TABLE attempts DISABLE TRIGGER attempts_ended")
    op.execute("UPDATE attempts SET outcome = 'requeued' WHERE outcome = 'handed_back'")
    op.execute("ALTER TABLE attempts ENABLE TRIGGER attempts_ended")
    op.execute(CHECK.format(BEFORE))
