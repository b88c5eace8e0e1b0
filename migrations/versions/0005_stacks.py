"""Which stacks a cluster's dispatcher knows, beside its capacity."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE capacity_snapshots ADD COLUMN stacks JSONB DEFAULT '[\"reference\"]' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE capacity_snapshots DROP COLUMN stacks")
