"""Dispatchers as processes: one is killed and its standby takes over, one is told to end and hands its work back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from service.domain.validation import State, Validation
from service.settings import Settings
from service.storage import ledger
from service.storage.events import EventHub
from service.storage.session import Database

from .conftest import ROOT, Service, alive, eventually, rank_pids, until_free

CLUSTER = "takeover"
LEASE_S = 5.0
STOPS_WITHIN_S = 30.0
WORK = {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"], "steps": 60, "repeats": 1}


class Dispatchers:
    """Processes of `gradgate dispatch` by the names they sign with."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start one; it leads or stands by."""
        command = [sys.executable, "-m", "service.cli", "dispatch"]
        environment = self._environment | {"GRADGATE_DISPATCHER_ID": name}
        self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=environment)

    def end(self, name: str, number: signal.Signals) -> int:
        """Signal one and wait for its exit status."""
        self.processes[name].send_signal(number)
        return self.processes[name].wait(STOPS_WITHIN_S)


@pytest.fixture
def dispatchers(postgres_url: str, ray_address: str, tmp_path: Path) -> Iterator[Dispatchers]:
    """None yet; what is left in the end is killed."""
    started = Dispatchers(
        dict(os.environ)
        | {
            "GRADGATE_DATABASE_URL": postgres_url,
            "GRADGATE_RAY_ADDRESS": ray_address,
            "GRADGATE_CLUSTER": CLUSTER,
            "GRADGATE_LEASE_S": str(LEASE_S),
            "GRADGATE_POLL_S": "0.2",
            "GRADGATE_HOME": str(tmp_path),
        }
    )
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


@pytest.fixture
async def client(postgres_url: str, database: Database, tmp_path: Path) -> AsyncIterator[Service]:
    """What a client sees; it has no dispatcher of its own."""
    async with EventHub(postgres_url) as hub:
        yield Service(database, hub, Settings(home=tmp_path, database_url=postgres_url, cluster=CLUSTER))


async def _run_by_one_with_two_behind(dispatchers: Dispatchers, client: Service) -> Validation:
    """A validation at work under dispatcher one, with two as its standby."""
    dispatchers.start("one")
    validation_id = await client.submit(WORK)
    await client.step_reached(validation_id)
    running = await client.get(validation_id)
    assert running.dispatcher_id == "one"
    dispatchers.start("two")
    return running


async def test_a_standby_takes_over_and_a_dispatcher_told_to_end_hands_back(
    dispatchers: Dispatchers, client: Service
) -> None:
    first = await _run_by_one_with_two_behind(dispatchers, client)
    validation_id = first.id

    dispatchers.end("one", signal.SIGKILL)
    killed_s = time.monotonic()
    await client.wait(validation_id, lambda validation: validation.state is State.QUEUED or validation.attempt == 2)
    assert time.monotonic() - killed_s < 2 * LEASE_S
    second = await client.wait(validation_id, lambda validation: _runs(validation, 2))
    assert second.dispatcher_id == "two"
    await eventually(lambda: not any(map(alive, rank_pids(first))), 30)

    assert await asyncio.to_thread(dispatchers.end, "two", signal.SIGTERM) == 0
    waiting = await client.get(validation_id)
    assert (waiting.state, waiting.attempt) == (State.QUEUED, 2)
    assert not any(map(alive, rank_pids(second)))
    await until_free()

    dispatchers.start("three")
    done = await client.wait(validation_id)
    assert (done.state, done.attempt, done.dispatcher_id) == (State.COMPLETED, 3, "three")
    async with client.database.read() as connection:
        tenures = await ledger.of_validation(connection, validation_id)
        assert await ledger.overlaps(connection) == []
    assert [(tenure.dispatcher_id, tenure.outcome) for tenure in tenures] == [
        ("one", "requeued"),
        ("two", "handed_back"),
        ("three", "completed"),
    ]
    assert all(tenure.nodes for tenure in tenures)
    kinds = [event.type for event in await client.history(validation_id)]
    assert (kinds.count("requeued"), kinds.count("completed")) == (2, 1)


async def test_a_leader_that_is_stopped_is_followed_and_then_changes_nothing(
    dispatchers: Dispatchers, client: Service
) -> None:
    first = await _run_by_one_with_two_behind(dispatchers, client)
    validation_id = first.id
    dispatchers.processes["one"].send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    await client.wait(validation_id, lambda validation: validation.dispatcher_id != "one")
    assert time.monotonic() - stopped_s < 2 * LEASE_S
    done = await client.wait(validation_id)
    assert (done.state, done.attempt, done.dispatcher_id) == (State.COMPLETED, 2, "two")
    # Its driver was never told; the successor's took its ranks away.
    assert not any(map(alive, rank_pids(first)))
    dispatchers.processes["one"].send_signal(signal.SIGCONT)
    later = await client.wait(await client.submit(WORK | {"steps": 1}))
    assert (later.state, later.dispatcher_id) == (State.COMPLETED, "two")
    assert await client.get(validation_id) == done
    for name in ("one", "two"):
        assert await asyncio.to_thread(dispatchers.end, name, signal.SIGTERM) == 0
    await until_free()


async def test_a_dispatcher_refuses_a_database_of_a_newer_version(
    dispatchers: Dispatchers, database: Database, capfd: pytest.CaptureFixture[str]
) -> None:
    async with database.transaction() as connection:
        current = await connection.scalar(text("SELECT version_num FROM alembic_version"))
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    try:
        dispatchers.start("old")
        assert await asyncio.to_thread(dispatchers.processes["old"].wait, STOPS_WITHIN_S) not in (0, None)
    finally:
        async with database.transaction() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = :current"), {"current": current})
    said = capfd.readouterr()
    assert "schema is at revision 9999, which this version does not know" in said.err + said.out
    assert "Traceback" not in said.err


def _runs(validation: Validation, attempt: int) -> bool:
    return validation.state is State.RUNNING and validation.attempt == attempt
