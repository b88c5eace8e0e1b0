"""API keys, and whose key a validation came with: an Idempotency-Key is one per API key."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE api_keys (
            id TEXT COLLATE "C" NOT NULL,
            name TEXT NOT NULL,
            secret_hash BYTEA NOT NULL,
            scopes TEXT[] NOT NULL,
            clusters TEXT[],
            created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
            expires_at TIMESTAMP WITH TIME ZONE,
            last_used_at TIMESTAMP WITH TIME ZONE,
            revoked_at TIMESTAMP WITH TIME ZONE,
            CONSTRAINT pk_api_keys PRIMARY KEY (id),
            CONSTRAINT uq_api_keys_name UNIQUE (name),
            CONSTRAINT uq_api_keys_secret_hash UNIQUE (secret_hash),
            CONSTRAINT ck_api_keys_scopes
                CHECK (cardinality(scopes) > 0 AND scopes <@ ARRAY['read', 'validate', 'drill', 'admin']),
            CONSTRAINT ck_api_keys_clusters CHECK (clusters IS NULL OR cardinality(clusters) > 0)
        )
        """
    )
    op.execute("ALTER TABLE validations ADD COLUMN created_by TEXT COLLATE \"C\" DEFAULT '' NOT NULL")
    op.execute("ALTER TABLE validations DROP CONSTRAINT uq_validations_idempotency_key")
    op.execute(
        "ALTER TABLE validations ADD CONSTRAINT uq_validations_created_by_idempotency_key "
        "UNIQUE (created_by, idempotency_key)"
    )
    op.execute(
        "CREATE INDEX ix_validations_active ON validations (created_by) "
        "WHERE state IN ('queued', 'starting', 'running')"
    )


def downgrade() -> None:
    op.execute("DROP INDEX ix_validations_active")
    # Two keys may have used one Idempotency-Key: the older order, which knew one scope, keeps the first.
    op.execute(
        "UPDATE validations SET idempotency_key = NULL, request_hash = NULL WHERE id IN (SELECT later.id "
        "FROM validations later JOIN validations earlier USING (idempotency_key) WHERE earlier.id < later.id)"
    )
    op.execute("ALTER TABLE validations DROP CONSTRAINT uq_validations_created_by_idempotency_key")
    op.execute("ALTER TABLE validations ADD CONSTRAINT uq_validations_idempotency_key UNIQUE (idempotency_key)")
    op.execute("ALTER TABLE validations DROP COLUMN created_by")
    op.execute("DROP TABLE api_keys")
