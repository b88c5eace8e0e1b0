"""Capacity snapshots against a real Postgres."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import text

from service.storage import capacity
from service.storage.capacity import CapacitySnapshot
from service.storage.session import Database


def _snapshot(cluster: str, num_nodes: int) -> CapacitySnapshot:
    # A dispatcher whose clock is a year off must still count as fresh.
    observed_at = datetime.now(UTC) - timedelta(days=365)
    return CapacitySnapshot(
        cluster,
        observed_at,
        num_nodes,
        2.5,
        8.0,
        [{"node": f"n{i}"} for i in range(num_nodes)],
        ("reference", f"s{num_nodes}"),
    )


async def test_the_newest_snapshot_of_a_cluster_counts(database: Database) -> None:
    async with database.transaction() as connection:
        await capacity.store_snapshot(connection, "c1", "d1", _snapshot("c1", 1))
        await capacity.store_snapshot(connection, "c1", "d2", _snapshot("c1", 2))
        newest = _snapshot("c1", 3)
        await capacity.store_snapshot(connection, "c1", "d1", newest)
    async with database.read() as connection:
        assert await capacity.latest(connection, "c1", 60) == newest
        assert await capacity.latest(connection, "c2", 60) is None


async def test_an_old_snapshot_decides_nothing(database: Database) -> None:
    async with database.transaction() as connection:
        await capacity.store_snapshot(connection, "old", "d1", _snapshot("old", 1))
        await connection.execute(
            text("UPDATE capacity_snapshots SET stored_at = now() - interval '31 seconds' WHERE cluster = 'old'")
        )
    async with database.read() as connection:
        assert await capacity.latest(connection, "old", 30) is None
        assert await capacity.latest(connection, "old", 32) is not None
