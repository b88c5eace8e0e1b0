"""Tables that grow with ranks and steps are partitioned by week; what was removed of a week is written down. An attempt
counts its writes.

The rows stay where they are: each old table becomes its successor's default partition. Whoever migrated moves them into
weeks afterwards, one short transaction each (`service.storage.partitions`).
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

KEYS = {
    "events": "validation_id, seq",
    "rank_steps": "validation_id, trial_index, step, world_rank",
    "divergence": 'validation_id, trial_index, step, world_rank, "end"',
    "trace": 'validation_id, trial_index, step, phase, world_rank, "end", shard',
}

PARTITION = """
ALTER TABLE {table} RENAME TO {table}_default;
ALTER TABLE {table}_default RENAME CONSTRAINT pk_{table} TO {table}_default_pkey;
CREATE TABLE {table} (LIKE {table}_default INCLUDING DEFAULTS) PARTITION BY RANGE (validation_id);
ALTER TABLE {table} ADD {keys};
ALTER TABLE {table} ATTACH PARTITION {table}_default DEFAULT
"""

GATHER = """
ALTER TABLE {table} RENAME TO {table}_by_week;
CREATE TABLE {table} (LIKE {table}_by_week INCLUDING DEFAULTS);
INSERT INTO {table} SELECT * FROM {table}_by_week;
DROP TABLE {table}_by_week;
ALTER TABLE {table} ADD {keys}
"""

KEYS_OF = (
    "CONSTRAINT pk_{table} PRIMARY KEY ({key}), "
    "ADD CONSTRAINT fk_{table}_validation_id FOREIGN KEY (validation_id) REFERENCES validations (id) ON DELETE CASCADE"
)

REMOVED_WEEKS = """
CREATE TABLE removed_weeks (
    first_id TEXT COLLATE "C" NOT NULL,
    end_id TEXT COLLATE "C" NOT NULL,
    removed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    retention_days INTEGER NOT NULL,
    CONSTRAINT pk_removed_weeks PRIMARY KEY (first_id),
    CONSTRAINT ck_removed_weeks_order CHECK (first_id < end_id)
)
"""


def upgrade() -> None:
    for table, key in KEYS.items():
        _execute(PARTITION, table, key)
    op.execute(REMOVED_WEEKS)
    op.execute("ALTER TABLE attempts ADD COLUMN num_writes INTEGER DEFAULT 0 NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE attempts DROP COLUMN num_writes")
    # What retention removed is gone; which weeks it were is forgotten, too.
    op.execute("DROP TABLE removed_weeks")
    for table, key in KEYS.items():
        _execute(GATHER, table, key)


def _execute(statements: str, table: str, key: str) -> None:
    for statement in statements.split(";\n"):
        op.execute(statement.format(table=table, keys=KEYS_OF.format(table=table, key=key)))
