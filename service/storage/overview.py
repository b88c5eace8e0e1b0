"""All clusters at one glance, in three statements: for /metrics, which is asked every few seconds for ever."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import distinct_on

from service.domain.validation import State
from service.storage.session import Connection
from service.storage.tables import capacity_snapshots, validations


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many validations of a cluster are in one state, with one verdict."""

    cluster: str
    state: str
    verdict: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits; a cluster where nothing does has depth 0."""

    cluster: str
    depth: int
    oldest_age_s: float


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The newest capacity snapshot of a cluster."""

    cluster: str
    report_age_s: float
    nodes: int
    gpus: float


@dataclass(frozen=True, slots=True)
class Overview:
    """Every cluster that a validation or a dispatcher ever named."""

    counts: tuple[StateCount, ...]
    queues: tuple[Queue, ...]
    clusters: tuple[ClusterReport, ...]

    def only(self, clusters: frozenset[str] | None) -> Overview:
        """The part of it that concerns these clusters; None: all of it."""
        if clusters is None:
            return self
        return Overview(
            tuple(row for row in self.counts if row.cluster in clusters),
            tuple(row for row in self.queues if row.cluster in clusters),
            tuple(row for row in self.clusters if row.cluster in clusters),
        )


async def survey(connection: Connection) -> Overview:
    """Look once, by the database's clock."""
    counts = select(validations.c.cluster, validations.c.state, validations.c.verdict, func.count()).group_by(
        validations.c.cluster, validations.c.state, validations.c.verdict
    )
    counted = tuple(StateCount(*row) for row in (await connection.execute(counts)).all())
    reports = await _reports(connection)
    named = {row.cluster for row in counted} | {report.cluster for report in reports}
    return Overview(counted, await _queues(connection, named), reports)


async def _queues(connection: Connection, clusters: set[str]) -> tuple[Queue, ...]:
    age = func.extract("epoch", func.clock_timestamp() - func.min(validations.c.created_at))
    waiting = (
        select(validations.c.cluster, func.count(), age)
        .where(validations.c.state == State.QUEUED)
        .group_by(validations.c.cluster)
    )
    found = {row[0]: Queue(row[0], row[1], max(0.0, float(row[2]))) for row in await connection.execute(waiting)}
    return tuple(found.get(cluster, Queue(cluster, 0, 0.0)) for cluster in sorted(clusters))


async def _reports(connection: Connection) -> tuple[ClusterReport, ...]:
    snapshots = capacity_snapshots.c
    newest = (
        select(
            snapshots.cluster,
            func.extract("epoch", func.clock_timestamp() - snapshots.stored_at),
            snapshots.num_nodes,
            snapshots.num_gpus,
        )
        .ext(distinct_on(snapshots.cluster))
        .order_by(snapshots.cluster, snapshots.stored_at.desc())
    )
    rows = (await connection.execute(newest)).all()
    return tuple(ClusterReport(row[0], max(0.0, float(row[1])), row[2], float(row[3])) for row in rows)
