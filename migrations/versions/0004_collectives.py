"""The self-test of the collectives, beside each validation; empty where none was run."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE validations ADD COLUMN collectives JSONB DEFAULT '[]' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE validations DROP COLUMN collectives")
