"""The trace that a validation belongs to."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE validations ADD COLUMN traceparent TEXT")


def downgrade() -> None:
    op.execute("ALTER TABLE validations DROP COLUMN traceparent")
