"""The ledger of attempts, and what ended stays as it ended, whoever writes."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ATTEMPTS = """
CREATE TABLE attempts (
    validation_id TEXT COLLATE "C" NOT NULL,
    attempt INTEGER NOT NULL,
    cluster TEXT NOT NULL,
    dispatcher_id TEXT NOT NULL,
    num_ranks INTEGER NOT NULL,
    nodes JSONB DEFAULT '[]' NOT NULL,
    claimed_at TIMESTAMP WITH TIME ZONE NOT NULL,
    reserved_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    outcome TEXT,
    CONSTRAINT pk_attempts PRIMARY KEY (validation_id, attempt),
    CONSTRAINT ck_attempts_ended_has_outcome CHECK ((ended_at IS NULL) = (outcome IS NULL)),
    CONSTRAINT ck_attempts_ends_after_claim CHECK (ended_at >= claimed_at),
    CONSTRAINT ck_attempts_outcome CHECK (outcome IN ('requeued', 'completed', 'failed', 'cancelled')),
    CONSTRAINT fk_attempts_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
)
"""

ONE_OPEN = "CREATE UNIQUE INDEX uq_attempts_open ON attempts (validation_id) WHERE ended_at IS NULL"

# Attempts that run during the upgrade: when they were claimed is in their events.
HELD_NOW = """
INSERT INTO attempts (validation_id, attempt, cluster, dispatcher_id, num_ranks, claimed_at)
SELECT id, attempt, cluster, dispatcher_id, num_ranks, COALESCE(
    (SELECT max(events.created_at) FROM events WHERE validation_id = id AND type = 'claimed'),
    validations.created_at
)
FROM validations WHERE state IN ('starting', 'running')
"""

REFUSE_CHANGE = """
CREATE FUNCTION gradgate_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'integrity_constraint_violation',
        MESSAGE = 'a row of ' || TG_TABLE_NAME || ' has ended and cannot change; it can only be deleted';
END
$$
"""

FINAL_VALIDATION = """
CREATE TRIGGER validations_final BEFORE UPDATE ON validations FOR EACH ROW
WHEN (OLD.state IN ('completed', 'failed', 'cancelled'))
EXECUTE FUNCTION gradgate_refuse_change()
"""

ENDED_ATTEMPT = """
CREATE TRIGGER attempts_ended BEFORE UPDATE ON attempts FOR EACH ROW
WHEN (OLD.ended_at IS NOT NULL)
EXECUTE FUNCTION gradgate_refuse_change()
"""


def upgrade() -> None:
    for statement in (ATTEMPTS, ONE_OPEN, HELD_NOW, REFUSE_CHANGE, FINAL_VALIDATION, ENDED_ATTEMPT):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TRIGGER validations_final ON validations")
    op.execute("DROP TABLE attempts")
    op.execute("DROP FUNCTION gradgate_refuse_change()")
