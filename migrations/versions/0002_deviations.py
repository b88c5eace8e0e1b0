"""What wrong elements consist of, beside each divergence row."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE divergence ADD COLUMN deviations JSONB DEFAULT '[]' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE divergence DROP COLUMN deviations")
