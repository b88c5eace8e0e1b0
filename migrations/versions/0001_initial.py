"""The first tables: validations and their queue, events, trials, per-rank rows, capacity.

Plain SQL, so that a database administrator can review it as it runs. A test compares the result with
`service.storage.tables`.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE validations (
    id TEXT COLLATE "C" NOT NULL,
    cluster TEXT NOT NULL,
    state TEXT DEFAULT 'queued' NOT NULL,
    verdict TEXT,
    cause TEXT,
    reasons JSONB DEFAULT '[]' NOT NULL,
    request JSONB NOT NULL,
    labels JSONB DEFAULT '{}' NOT NULL,
    num_ranks INTEGER NOT NULL,
    deadline_s DOUBLE PRECISION NOT NULL,
    drill BOOLEAN DEFAULT false NOT NULL,
    error JSONB,
    fingerprint JSONB,
    timings JSONB DEFAULT '{}' NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE,
    finished_at TIMESTAMP WITH TIME ZONE,
    cancel_requested_at TIMESTAMP WITH TIME ZONE,
    dispatcher_id TEXT,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    idempotency_key TEXT,
    request_hash TEXT,
    schema_version INTEGER NOT NULL,
    verdict_rules_version INTEGER NOT NULL,
    last_event_seq INTEGER DEFAULT 0 NOT NULL,
    revision INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_validations PRIMARY KEY (id),
    CONSTRAINT uq_validations_idempotency_key UNIQUE (idempotency_key),
    CONSTRAINT ck_validations_state
        CHECK (state IN ('queued', 'starting', 'running', 'completed', 'failed', 'cancelled')),
    CONSTRAINT ck_validations_verdict CHECK (verdict IN ('pass', 'fail', 'inconclusive')),
    CONSTRAINT ck_validations_cause CHECK (cause IN ('software', 'hardware', 'unknown')),
    CONSTRAINT ck_validations_completed_has_verdict CHECK ((state = 'completed') = (verdict IS NOT NULL)),
    CONSTRAINT ck_validations_failed_has_error CHECK ((state = 'failed') = (error IS NOT NULL)),
    CONSTRAINT ck_validations_final_has_end
        CHECK ((state IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT ck_validations_held_has_lease
        CHECK ((state IN ('starting', 'running')) = (lease_expires_at IS NOT NULL)),
    CONSTRAINT ck_validations_wish_ends_waiting CHECK ((state <> 'queued') OR (cancel_requested_at IS NULL)),
    CONSTRAINT ck_validations_lease_has_holder CHECK ((lease_expires_at IS NULL) OR (dispatcher_id IS NOT NULL)),
    CONSTRAINT ck_validations_key_has_hash CHECK ((idempotency_key IS NULL) = (request_hash IS NULL)),
    CONSTRAINT ck_validations_num_ranks CHECK (num_ranks > 0)
);

CREATE TABLE events (
    validation_id TEXT COLLATE "C" NOT NULL,
    seq INTEGER NOT NULL,
    type TEXT NOT NULL,
    data JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT pk_events PRIMARY KEY (validation_id, seq),
    CONSTRAINT fk_events_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
);

CREATE TABLE trials (
    validation_id TEXT COLLATE "C" NOT NULL,
    trial INTEGER NOT NULL,
    probe TEXT NOT NULL,
    ordering TEXT NOT NULL,
    role TEXT NOT NULL,
    misowned_elements BIGINT NOT NULL,
    predicted_diverged_elements BIGINT NOT NULL,
    diverged_elements BIGINT NOT NULL,
    missed_elements BIGINT NOT NULL,
    unexpected_elements BIGINT NOT NULL,
    compared_elements BIGINT NOT NULL,
    nonfinite_elements BIGINT NOT NULL,
    reference_exceeded_elements BIGINT NOT NULL,
    tied_unequal_elements BIGINT NOT NULL,
    tied_exceeded_elements BIGINT NOT NULL,
    tied_max_abs DOUBLE PRECISION NOT NULL,
    reference_max_abs DOUBLE PRECISION,
    max_abs_error DOUBLE PRECISION NOT NULL,
    weights_max_abs DOUBLE PRECISION NOT NULL,
    replicas_agree BOOLEAN NOT NULL,
    missing_reports JSONB NOT NULL,
    ok BOOLEAN NOT NULL,
    CONSTRAINT pk_trials PRIMARY KEY (validation_id, trial),
    CONSTRAINT fk_trials_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
);

CREATE TABLE rank_steps (
    validation_id TEXT COLLATE "C" NOT NULL,
    trial_index INTEGER NOT NULL,
    probe TEXT NOT NULL,
    ordering TEXT NOT NULL,
    repeat INTEGER NOT NULL,
    step INTEGER NOT NULL,
    world_rank INTEGER NOT NULL,
    dp_rank INTEGER NOT NULL,
    pp_rank INTEGER NOT NULL,
    tp_rank INTEGER NOT NULL,
    loss DOUBLE PRECISION,
    seconds JSONB NOT NULL,
    initial_weights_digest TEXT NOT NULL,
    weights_digest TEXT NOT NULL,
    tied_num_elements BIGINT,
    tied_unequal_elements BIGINT,
    tied_max_abs_difference DOUBLE PRECISION,
    tied_exceeded_elements BIGINT,
    weights_max_abs_difference DOUBLE PRECISION,
    weights_num_elements BIGINT,
    CONSTRAINT pk_rank_steps PRIMARY KEY (validation_id, trial_index, step, world_rank),
    CONSTRAINT fk_rank_steps_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
);

CREATE TABLE divergence (
    validation_id TEXT COLLATE "C" NOT NULL,
    trial_index INTEGER NOT NULL,
    probe TEXT NOT NULL,
    ordering TEXT NOT NULL,
    repeat INTEGER NOT NULL,
    step INTEGER NOT NULL,
    world_rank INTEGER NOT NULL,
    dp_rank INTEGER NOT NULL,
    pp_rank INTEGER NOT NULL,
    tp_rank INTEGER NOT NULL,
    "end" TEXT NOT NULL,
    owned_elements BIGINT NOT NULL,
    diverged_elements BIGINT NOT NULL,
    predicted_elements BIGINT NOT NULL,
    missed_elements BIGINT NOT NULL,
    unexpected_elements BIGINT NOT NULL,
    nonfinite_elements BIGINT NOT NULL,
    first_diverged BIGINT,
    last_diverged BIGINT,
    max_abs_error DOUBLE PRECISION NOT NULL,
    relative_l2_error DOUBLE PRECISION NOT NULL,
    max_error_over_bound DOUBLE PRECISION NOT NULL,
    ratio_to_expected DOUBLE PRECISION NOT NULL,
    reference_max_abs_error DOUBLE PRECISION,
    reference_exceeded_elements BIGINT NOT NULL,
    min_detectable_share DOUBLE PRECISION NOT NULL,
    sum DOUBLE PRECISION NOT NULL,
    l2 DOUBLE PRECISION NOT NULL,
    digest TEXT NOT NULL,
    CONSTRAINT pk_divergence PRIMARY KEY (validation_id, trial_index, step, world_rank, "end"),
    CONSTRAINT fk_divergence_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
);

CREATE TABLE trace (
    validation_id TEXT COLLATE "C" NOT NULL,
    trial_index INTEGER NOT NULL,
    probe TEXT NOT NULL,
    ordering TEXT NOT NULL,
    repeat INTEGER NOT NULL,
    step INTEGER NOT NULL,
    world_rank INTEGER NOT NULL,
    dp_rank INTEGER NOT NULL,
    pp_rank INTEGER NOT NULL,
    tp_rank INTEGER NOT NULL,
    phase TEXT NOT NULL,
    "end" TEXT NOT NULL,
    shard INTEGER NOT NULL,
    num_elements BIGINT NOT NULL,
    sum DOUBLE PRECISION NOT NULL,
    l2 DOUBLE PRECISION NOT NULL,
    digest TEXT NOT NULL,
    CONSTRAINT pk_trace PRIMARY KEY (validation_id, trial_index, step, phase, world_rank, "end", shard),
    CONSTRAINT fk_trace_validation_id FOREIGN KEY(validation_id) REFERENCES validations (id) ON DELETE CASCADE
);

CREATE TABLE capacity_snapshots (
    cluster TEXT NOT NULL,
    dispatcher_id TEXT NOT NULL,
    observed_at TIMESTAMP WITH TIME ZONE NOT NULL,
    stored_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    num_nodes INTEGER NOT NULL,
    num_cpus DOUBLE PRECISION NOT NULL,
    num_gpus DOUBLE PRECISION NOT NULL,
    nodes JSONB NOT NULL,
    CONSTRAINT pk_capacity_snapshots PRIMARY KEY (cluster, dispatcher_id)
);

CREATE INDEX ix_validations_cluster_id ON validations (cluster, id);

CREATE INDEX ix_validations_labels ON validations USING gin (labels jsonb_path_ops);

CREATE INDEX ix_validations_lease ON validations (cluster, lease_expires_at) WHERE state IN ('starting', 'running');

CREATE INDEX ix_validations_queue ON validations (cluster, created_at, id) WHERE state = 'queued';

CREATE INDEX ix_validations_state_id ON validations (state, id);

CREATE INDEX ix_validations_verdict_id ON validations (verdict, id) WHERE verdict IS NOT NULL;
"""


def upgrade() -> None:
    for statement in TABLES.strip().rstrip(";").split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    for table in ("capacity_snapshots", "trace", "divergence", "rank_steps", "trials", "events", "validations"):
        op.execute(f"DROP TABLE {table}")
