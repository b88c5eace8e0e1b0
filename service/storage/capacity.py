"""What dispatchers saw of their clusters, for the API to refuse at once what can never fit. One row a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from service.storage.session import Connection
from service.storage.tables import capacity_snapshots
from workers.contract import REFERENCE_STACK


@dataclass(frozen=True, slots=True)
class CapacitySnapshot:
    """A cluster's total resources, busy or not, at one moment."""

    cluster: str
    observed_at: datetime
    num_nodes: int
    num_cpus: float
    num_gpus: float
    nodes: list[dict[str, Any]]
    stacks: tuple[str, ...] = (REFERENCE_STACK,)
    """Names that a request's `stack` may have there."""


async def store_snapshot(connection: Connection, cluster: str, dispatcher_id: str, snapshot: CapacitySnapshot) -> None:
    """Replace this dispatcher's last snapshot of the cluster."""
    seen = {
        "observed_at": snapshot.observed_at,
        "stored_at": func.clock_timestamp(),
        "num_nodes": snapshot.num_nodes,
        "num_cpus": snapshot.num_cpus,
        "num_gpus": snapshot.num_gpus,
        "nodes": snapshot.nodes,
        "stacks": list(snapshot.stacks),
    }
    statement = insert(capacity_snapshots).values(cluster=cluster, dispatcher_id=dispatcher_id, **seen)
    await connection.execute(statement.on_conflict_do_update(index_elements=["cluster", "dispatcher_id"], set_=seen))


async def latest(connection: Connection, cluster: str, max_age_s: float) -> CapacitySnapshot | None:
    """The newest snapshot that was stored at most `max_age_s` ago by the database's clock, or None."""
    # The age is judged by stored_at: observed_at comes from another machine, whose clock may be off.
    query = (
        select(capacity_snapshots)
        .where(
            capacity_snapshots.c.cluster == cluster,
            capacity_snapshots.c.stored_at >= func.clock_timestamp() - timedelta(seconds=max_age_s),
        )
        .order_by(capacity_snapshots.c.stored_at.desc())
        .limit(1)
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    return CapacitySnapshot(
        cluster=row.cluster,
        observed_at=row.observed_at,
        num_nodes=row.num_nodes,
        num_cpus=row.num_cpus,
        num_gpus=row.num_gpus,
        nodes=row.nodes,
        stacks=tuple(row.stacks),
    )
