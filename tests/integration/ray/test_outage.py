"""Postgres goes away for longer than a lease while a gang runs: the gang goes on, and its one result is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service.domain.validation import State
from service.storage import ledger
from tests.stoppable import stoppable

from .conftest import rank_pids, serve

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
