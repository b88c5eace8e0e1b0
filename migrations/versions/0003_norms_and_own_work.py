"""Global gradient norms, each rank's own work, and observations that decide nothing.

Columns of validations that are already there stay empty: what was not measured is not made up.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = (
    ("validations", "observations JSONB DEFAULT '[]' NOT NULL"),
    ("trials", "grad_norm DOUBLE PRECISION"),
    ("trials", "grad_norm_max_error DOUBLE PRECISION"),
    ("rank_steps", "grad_norm DOUBLE PRECISION"),
    ("rank_steps", "grad_norm_reference DOUBLE PRECISION"),
    ("rank_steps", "grad_norm_allowed_error DOUBLE PRECISION"),
    ("rank_steps", "compute_seconds JSONB DEFAULT '{}' NOT NULL"),
)


def upgrade() -> None:
    for table, column in COLUMNS:
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


def downgrade() -> None:
    for table, column in reversed(COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column.split()[0]}")
