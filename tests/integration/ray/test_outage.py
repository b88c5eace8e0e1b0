"""Postgres goes away for longer than a lease, in each phase: the attempt goes on, and its one result is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.domain.validation import State
from service.execution import record
from service.storage import ledger
from tests.stoppable import Server, stoppable

from .conftest import NUM_CPUS, Service, rank_pids, serve

LEASE_S = 1.5
AWAY_S = 2 * LEASE_S
WORK = {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"], "steps": 20, "repeats": 1}


async def test_a_run_outlives_its_database(ray_address: str, tmp_path: Path) -> None:
    with stoppable() as server:
        async with serve(server.url, tmp_path, ray_address, cluster="outage", lease_s=LEASE_S) as service:
            running = await service.submit(WORK)
            waiting = await service.submit(WORK)
            await service.step_reached(running)
            pids = rank_pids(await service.get(running))
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(server.start)
            for validation_id in (running, waiting):
                done = await service.wait(validation_id)
                assert (done.state, done.attempt) == (State.COMPLETED, 1)
                kinds = [event.type for event in await service.history(validation_id)]
                assert (kinds.count("claimed"), kinds.count("step"), kinds.count("completed")) == (1, 20, 1)
                async with service.database.read() as connection:
                    (entry,) = await ledger.of_validation(connection, validation_id)
                assert entry.outcome == "completed"
            assert rank_pids(await service.get(running)) == pids


Phase = Callable[[Server, Service, pytest.MonkeyPatch], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def _reserving(server: Server, service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Gone when the attempt is claimed, and everything it needs is somebody else's until it is back."""
    import ray

    others = ray.util.placement_group([{"CPU": NUM_CPUS}])
    await asyncio.to_thread(ray.get, others.ready())
    validation_id = await service.submit(WORK)
    await service.happened(validation_id, "claimed")
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(AWAY_S)
    ray.util.remove_placement_group(others)
    yield validation_id


@asynccontextmanager
async def _forming(server: Server, service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Gone when the attempt has its room; cold ranks take seconds to start."""
    validation_id = await service.submit(WORK)
    await service.happened(validation_id, "reserved")
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(AWAY_S)
    yield validation_id


@asynccontextmanager
async def _storing(server: Server, service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Gone when every rank has said everything, before the verdict is stored."""
    judge, gone = record.judge, asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_and_judge(*arguments: Any) -> Any:
        server.stop()
        loop.call_soon_threadsafe(gone.set)
        return judge(*arguments)

    monkeypatch.setattr(record, "judge", stop_and_judge)
    validation_id = await service.submit(WORK)
    async with asyncio.timeout(120):
        await gone.wait()
    await asyncio.sleep(AWAY_S)
    yield validation_id


@pytest.mark.parametrize("phase", [_reserving, _forming, _storing])
async def test_an_attempt_outlives_its_database_in_every_phase(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    cluster = f"outage{phase.__name__}"
    with stoppable() as server:
        async with serve(server.url, tmp_path, ray_address, cluster=cluster, lease_s=LEASE_S) as service:
            async with phase(server, service, monkeypatch) as validation_id:
                await asyncio.to_thread(server.start)
            done = await service.wait(validation_id)
            assert (done.state, done.attempt, done.verdict) == (State.COMPLETED, 1, "inconclusive")
            kinds = [event.type for event in await service.history(validation_id)]
            once = ("claimed", "reserved", "formed", "trial_started", "trial_finished", "completed")
            assert {kind: kinds.count(kind) for kind in once} == dict.fromkeys(once, 1)
            assert (kinds.count("step"), kinds.count("requeued")) == (20, 0)
            async with service.database.read() as connection:
                (entry,) = await ledger.of_validation(connection, validation_id)
                assert await ledger.overlaps(connection) == []
            assert (entry.outcome, len(entry.nodes)) == ("completed", 1)
