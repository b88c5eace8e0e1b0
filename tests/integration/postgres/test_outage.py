"""Postgres stops and comes back: the leader stays leader, results are kept and written, leases are renewed first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from service.domain.validation import FailureDetail, State, new_validation_id
from service.execution.leadership import lead
from service.execution.measures import Measures
from service.execution.messages import Failed, WorkKey
from service.execution.record import Record
from service.execution.supervisor import Supervisor
from service.settings import Settings
from service.storage import ledger, queue, validations
from service.storage.events import EventHub
from service.storage.session import DATABASE_AWAY, Database
from tests.stoppable import Server, stoppable
from workers.contract import Judgement, StepReport

PATIENCE_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Migrated and running."""
    with stoppable() as server:
        yield server


@pytest.fixture
async def away(server: Server) -> AsyncIterator[Database]:
    """A pool on the server that may go away."""
    database = Database(server.url, timeout_s=2)
    yield database
    await database.close()


async def test_a_result_is_kept_while_the_database_is_away_and_written_once(server: Server, away: Database) -> None:
    claim = await _claim(away, "kept")
    key = WorkKey(claim.id, claim.attempt)
    record = Record(away, key, 0.0, Measures())
    await asyncio.to_thread(server.stop)
    record.hear(Failed(key, FailureDetail("rank_died", "rank 1 was killed")))
    writing = asyncio.create_task(record.run())
    await asyncio.sleep(0.5)
    assert not writing.done()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(PATIENCE_S):
        await writing
    assert not record.lost
    async with away.read() as connection:
        stored = await validations.get(connection, claim.id)
        (entry,) = await ledger.of_validation(connection, claim.id)
    assert stored is not None
    assert stored.state is State.FAILED
    assert stored.error == FailureDetail("rank_died", "rank 1 was killed")
    assert entry.outcome == "failed"


async def test_a_leader_goes_on_leading_when_the_database_is_back(server: Server) -> None:
    leadership = await lead(server.url, "stays", 0.1)
    first = leadership._connection
    await asyncio.to_thread(server.stop)
    await _until(lambda: first.closed)
    await asyncio.to_thread(server.start)
    await _until(lambda: leadership._connection is not first)
    assert not leadership.lost.is_set()
    waiting = asyncio.create_task(lead(server.url, "stays", 0.05))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await leadership.close()
    async with asyncio.timeout(PATIENCE_S):
        await (await waiting).close()


async def test_a_leader_that_another_one_followed_says_that_it_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.execution.leadership._REFUSED_S", 0.0)
    leadership = await lead(server.url, "followed", 2.0)
    standby = asyncio.create_task(lead(server.url, "followed", 0.01))
    database = Database(server.url)
    async with database.transaction() as connection:
        pid = leadership._connection.info.backend_pid
        await connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    async with asyncio.timeout(PATIENCE_S):
        successor = await standby
        await leadership.lost.wait()
    await successor.close()
    await leadership.close()
    await database.close()


async def test_listeners_hear_again_after_a_restart(server: Server) -> None:
    async with EventHub(server.url) as hub, hub.subscribe_queue("again") as subscription:
        await _until(lambda: hub.connected)
        await asyncio.to_thread(server.stop)
        await _until(lambda: not hub.connected)
        await asyncio.to_thread(server.start)
        await _until(lambda: hub.connected)
        assert await subscription.wait(PATIENCE_S)


async def test_a_connection_that_breaks_within_a_copy_counts_as_the_database_being_away(
    server: Server, away: Database, judgement: Judgement, reports: tuple[StepReport, ...]
) -> None:
    claim = await _claim(away, "copy")
    killer = Database(server.url)
    async with away.transaction() as connection:
        assert await queue.mark_running(connection, claim.id, 1, [], {})
    with pytest.raises(DATABASE_AWAY):
        await _break_within_a_copy(away, killer)
    async with away.transaction() as connection:
        assert await queue.complete(connection, claim.id, 1, judgement, reports, [], {})
    await killer.close()


class _Lookout(Supervisor):
    """Says when a round of renewals has got through to the database."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.renewed = asyncio.Event()

    async def _renew(self) -> None:
        await super()._renew()
        self.renewed.set()


async def test_after_an_outage_every_holder_renews_before_anything_is_reaped(
    server: Server, away: Database, tmp_path: Path
) -> None:
    claim = await _claim(away, "gate", lease_s=0.1)  # by another dispatcher, which will renew later than this one
    settings = Settings(home=tmp_path, database_url=server.url, cluster="gate", dispatcher_id="d9", lease_s=9)
    supervisor = _Lookout(settings, away, EventHub(server.url), Measures())
    await asyncio.to_thread(server.stop)
    leading = asyncio.create_task(supervisor._lease_loop())
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.renewed.wait()
    await asyncio.sleep(0.5)  # for the rest of that round
    async with away.transaction() as connection:
        found = await queue.extend(connection, dispatcher_id="d1", held=[(claim.id, 1)], lease_s=0.1)
    assert found.still_held == {(claim.id, 1)}
    # Who never renews is reaped all the same, once the time of grace is over.
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with away.read() as connection:
                stored = await validations.get(connection, claim.id)
            if stored is not None and stored.state is State.QUEUED:
                break
            await asyncio.sleep(0.1)
    leading.cancel()


async def _break_within_a_copy(database: Database, killer: Database) -> None:
    async with database.transaction() as connection:
        pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        async with raw.cursor() as cursor, cursor.copy("COPY trace FROM STDIN"), killer.transaction() as other:
            await other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})


async def _claim(database: Database, cluster: str, lease_s: float = 60) -> queue.Claim:
    async with database.transaction() as connection:
        await validations.insert(
            connection,
            validation_id=new_validation_id(),
            cluster=cluster,
            request={},
            labels={},
            num_ranks=2,
            deadline_s=60,
        )
        (claim,) = await queue.claim(connection, cluster=cluster, dispatcher_id="d1", lease_s=lease_s, limit=1)
    return claim


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
