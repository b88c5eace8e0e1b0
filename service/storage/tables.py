"""The tables. What the migrations build is compared with this file by a test; nothing here runs a query.

Enums are text with the API's strings, so that a person with psql reads what the API says. The CHECK
constraints repeat the rules of `service.domain.validation`: a bug above must not be able to store a crash as a
result.
"""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


# Ids sort by their time of making only when compared as bytes, whatever the database's locale is.
_BYTES_ORDER = Text(collation="C")

_BY_TIME = "RANGE (validation_id)"
"""How tables that grow with ranks and steps are partitioned: a range of ids is a range of time, and every key of theirs
begins with the id. `service.storage.partitions` makes the partitions; what has none yet goes into the default one."""


def _validation_id() -> Column[str]:
    return Column("validation_id", _BYTES_ORDER, ForeignKey("validations.id", ondelete="CASCADE"), nullable=False)


def _moment(name: str, *, nullable: bool = True) -> Column[object]:
    default = None if nullable else func.now()
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=default)


def _count(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _real(name: str, *, nullable: bool = False) -> Column[float]:
    return Column(name, Double, nullable=nullable)


def _text(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text, nullable=nullable)


def _small(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False)


validations = Table(
    "validations",
    metadata,
    Column("id", _BYTES_ORDER, primary_key=True),
    _text("cluster"),
    Column("state", Text, nullable=False, server_default=text("'queued'")),
    _text("verdict", nullable=True),
    _text("cause", nullable=True),
    Column("reasons", JSONB, nullable=False, server_default=text("'[]'")),
    Column("request", JSONB, nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    _small("num_ranks"),
    _real("deadline_s"),
    Column("drill", Boolean, nullable=False, server_default=text("false")),
    Column("error", JSONB(none_as_null=True), nullable=True),
    Column("fingerprint", JSONB(none_as_null=True), nullable=True),
    Column("timings", JSONB, nullable=False, server_default=text("'{}'")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    _moment("created_at", nullable=False),
    _moment("started_at"),
    _moment("finished_at"),
    _moment("cancel_requested_at"),
    _text("dispatcher_id", nullable=True),
    _moment("lease_expires_at"),
    _text("idempotency_key", nullable=True),
    _text("request_hash", nullable=True),
    _small("schema_version"),
    _small("verdict_rules_version"),
    Column("last_event_seq", Integer, nullable=False, server_default=text("0")),
    Column("revision", Integer, nullable=False, server_default=text("1")),
    Column("observations", JSONB, nullable=False, server_default=text("'[]'")),
    Column("collectives", JSONB, nullable=False, server_default=text("'[]'")),
    # The API key's id; empty where no keys are configured.
    Column("created_by", _BYTES_ORDER, nullable=False, server_default=text("''")),
    _text("traceparent", nullable=True),
    UniqueConstraint("created_by", "idempotency_key"),
    CheckConstraint(
        "state IN ('queued', 'starting', 'running', 'completed', 'failed', 'cancelled')",
        name="state",
    ),
    CheckConstraint("verdict IN ('pass', 'fail', 'inconclusive')", name="verdict"),
    CheckConstraint("cause IN ('software', 'hardware', 'unknown')", name="cause"),
    CheckConstraint("(state = 'completed') = (verdict IS NOT NULL)", name="completed_has_verdict"),
    CheckConstraint("(state = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
    CheckConstraint(
        "(state IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
        name="final_has_end",
    ),
    CheckConstraint(
        "(state IN ('starting', 'running')) = (lease_expires_at IS NOT NULL)",
        name="held_has_lease",
    ),
    CheckConstraint("(state <> 'queued') OR (cancel_requested_at IS NULL)", name="wish_ends_waiting"),
    CheckConstraint("(lease_expires_at IS NULL) OR (dispatcher_id IS NOT NULL)", name="lease_has_holder"),
    CheckConstraint("(idempotency_key IS NULL) = (request_hash IS NULL)", name="key_has_hash"),
    CheckConstraint("num_ranks > 0", name="num_ranks"),
    Index(
        "ix_validations_active",
        "created_by",
        postgresql_where=text("state IN ('queued', 'starting', 'running')"),
    ),
    Index("ix_validations_queue", "cluster", "created_at", "id", postgresql_where=text("state = 'queued'")),
    Index(
        "ix_validations_lease",
        "cluster",
        "lease_expires_at",
        postgresql_where=text("state IN ('starting', 'running')"),
    ),
    Index("ix_validations_cluster_id", "cluster", "id"),
    Index("ix_validations_state_id", "state", "id"),
    Index("ix_validations_verdict_id", "verdict", "id", postgresql_where=text("verdict IS NOT NULL")),
    Index("ix_validations_labels", "labels", postgresql_using="gin", postgresql_ops={"labels": "jsonb_path_ops"}),
)

events = Table(
    "events",
    metadata,
    _validation_id(),
    _small("seq"),
    _text("type"),
    Column("data", JSONB, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    PrimaryKeyConstraint("validation_id", "seq"),
    postgresql_partition_by=_BY_TIME,
)

attempts = Table(
    "attempts",
    metadata,
    _validation_id(),
    _small("attempt"),
    _text("cluster"),
    _text("dispatcher_id"),
    _small("num_ranks"),
    Column("nodes", JSONB, nullable=False, server_default=text("'[]'")),
    Column("claimed_at", DateTime(timezone=True), nullable=False),
    _moment("reserved_at"),
    _moment("ended_at"),
    _text("outcome", nullable=True),
    Column("num_writes", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("validation_id", "attempt"),
    CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="ended_has_outcome"),
    CheckConstraint("ended_at >= claimed_at", name="ends_after_claim"),
    CheckConstraint("outcome IN ('requeued', 'handed_back', 'completed', 'failed', 'cancelled')", name="outcome"),
    Index("uq_attempts_open", "validation_id", unique=True, postgresql_where=text("ended_at IS NULL")),
)
"""Who held what, from when to when. An exclusion constraint on the intervals would need the extension btree_gist; that
only one entry of a validation is open at a time, and that an ended one never changes, needs none and says the same."""

trials = Table(
    "trials",
    metadata,
    _validation_id(),
    _small("trial"),
    _text("probe"),
    _text("ordering"),
    _text("role"),
    _count("misowned_elements"),
    _count("predicted_diverged_elements"),
    _count("diverged_elements"),
    _count("missed_elements"),
    _count("unexpected_elements"),
    _count("compared_elements"),
    _count("nonfinite_elements"),
    _count("reference_exceeded_elements"),
    _count("tied_unequal_elements"),
    _count("tied_exceeded_elements"),
    _real("tied_max_abs"),
    _real("reference_max_abs", nullable=True),
    _real("max_abs_error"),
    _real("weights_max_abs"),
    Column("replicas_agree", Boolean, nullable=False),
    Column("missing_reports", JSONB, nullable=False),
    Column("ok", Boolean, nullable=False),
    _real("grad_norm", nullable=True),
    _real("grad_norm_max_error", nullable=True),
    PrimaryKeyConstraint("validation_id", "trial"),
)


def _report_columns() -> list[Column[int] | Column[str]]:
    """Where in the experiment a row was measured: the same first columns in every per-rank table."""
    return [
        _validation_id(),
        _small("trial_index"),
        _text("probe"),
        _text("ordering"),
        _small("repeat"),
        _small("step"),
        _small("world_rank"),
        _small("dp_rank"),
        _small("pp_rank"),
        _small("tp_rank"),
    ]


rank_steps = Table(
    "rank_steps",
    metadata,
    *_report_columns(),
    _real("loss", nullable=True),
    Column("seconds", JSONB, nullable=False),
    _text("initial_weights_digest"),
    _text("weights_digest"),
    _count("tied_num_elements", nullable=True),
    _count("tied_unequal_elements", nullable=True),
    _real("tied_max_abs_difference", nullable=True),
    _count("tied_exceeded_elements", nullable=True),
    _real("weights_max_abs_difference", nullable=True),
    _count("weights_num_elements", nullable=True),
    _real("grad_norm", nullable=True),
    _real("grad_norm_reference", nullable=True),
    _real("grad_norm_allowed_error", nullable=True),
    Column("compute_seconds", JSONB, nullable=False, server_default=text("'{}'")),
    PrimaryKeyConstraint("validation_id", "trial_index", "step", "world_rank"),
    postgresql_partition_by=_BY_TIME,
)

divergence = Table(
    "divergence",
    metadata,
    *_report_columns(),
    _text("end"),
    _count("owned_elements"),
    _count("diverged_elements"),
    _count("predicted_elements"),
    _count("missed_elements"),
    _count("unexpected_elements"),
    _count("nonfinite_elements"),
    _count("first_diverged", nullable=True),
    _count("last_diverged", nullable=True),
    _real("max_abs_error"),
    _real("relative_l2_error"),
    _real("max_error_over_bound"),
    _real("ratio_to_expected"),
    _real("reference_max_abs_error", nullable=True),
    _count("reference_exceeded_elements"),
    _real("min_detectable_share"),
    _real("sum"),
    _real("l2"),
    _text("digest"),
    Column("deviations", JSONB, nullable=False, server_default=text("'[]'")),
    PrimaryKeyConstraint("validation_id", "trial_index", "step", "world_rank", "end"),
    postgresql_partition_by=_BY_TIME,
)

trace = Table(
    "trace",
    metadata,
    *_report_columns(),
    _text("phase"),
    _text("end"),
    _small("shard"),
    _count("num_elements"),
    _real("sum"),
    _real("l2"),
    _text("digest"),
    PrimaryKeyConstraint("validation_id", "trial_index", "step", "phase", "world_rank", "end", "shard"),
    postgresql_partition_by=_BY_TIME,
)

PARTITIONED = (events, rank_steps, divergence, trace)
"""The tables whose rows retention removes."""

removed_weeks = Table(
    "removed_weeks",
    metadata,
    Column("first_id", _BYTES_ORDER, primary_key=True),
    Column("end_id", _BYTES_ORDER, nullable=False),
    _moment("removed_at", nullable=False),
    _small("retention_days"),
    CheckConstraint("first_id < end_id", name="order"),
)
"""Weeks of validations, from the first id to before the end id, whose rows in PARTITIONED retention has removed."""

capacity_snapshots = Table(
    "capacity_snapshots",
    metadata,
    _text("cluster"),
    _text("dispatcher_id"),
    Column("observed_at", DateTime(timezone=True), nullable=False),
    _moment("stored_at", nullable=False),
    _small("num_nodes"),
    _real("num_cpus"),
    _real("num_gpus"),
    Column("nodes", JSONB, nullable=False),
    Column("stacks", JSONB, server_default=text("'[\"reference\"]'"), nullable=False),
    PrimaryKeyConstraint("cluster", "dispatcher_id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _BYTES_ORDER, primary_key=True),
    _text("name"),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("clusters", ARRAY(Text), nullable=True),
    _moment("created_at", nullable=False),
    _moment("expires_at"),
    _moment("last_used_at"),
    _moment("revoked_at"),
    UniqueConstraint("name"),
    UniqueConstraint("secret_hash"),
    CheckConstraint("cardinality(scopes) > 0 AND scopes <@ ARRAY['read', 'validate', 'drill', 'admin']", name="scopes"),
    CheckConstraint("clusters IS NULL OR cardinality(clusters) > 0", name="clusters"),
)

_REFUSE_CHANGE = """
CREATE FUNCTION gradgate_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'integrity_constraint_violation',
        MESSAGE = 'a row of ' || TG_TABLE_NAME || ' has ended and cannot change; it can only be deleted';
END
$$
"""

_FINAL_VALIDATION = """
CREATE TRIGGER validations_final BEFORE UPDATE ON validations FOR EACH ROW
WHEN (OLD.state IN ('completed', 'failed', 'cancelled'))
EXECUTE FUNCTION gradgate_refuse_change()
"""

_ENDED_ATTEMPT = """
CREATE TRIGGER attempts_ended BEFORE UPDATE ON attempts FOR EACH ROW
WHEN (OLD.ended_at IS NOT NULL)
EXECUTE FUNCTION gradgate_refuse_change()
"""

for _table in PARTITIONED:
    event.listen(_table, "after_create", DDL("CREATE TABLE %(table)s_default PARTITION OF %(table)s DEFAULT"))  # type: ignore[no-untyped-call]

for _moment_of_making, _statement in (
    ("before_create", _REFUSE_CHANGE),
    ("after_create", _FINAL_VALIDATION),
    ("after_create", _ENDED_ATTEMPT),
):
    event.listen(metadata, _moment_of_making, DDL(_statement))  # type: ignore[no-untyped-call]
