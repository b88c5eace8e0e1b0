"""A dispatcher without a Ray address brings a local Ray of its own, and takes it down with itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from service.domain.validation import State
from service.execution.leadership import lead
from service.storage import validations
from service.storage.session import Database

from .conftest import alive, eventually, rank_pids, serve

LONG = {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"], "steps": 100, "repeats": 20}


def processes_of(home: Path) -> list[str]:
    """Command lines of processes that work inside the home."""
    commands = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
    return [command for command in commands if str(home) in command]


async def test_a_stopping_dispatcher_gives_its_work_back_and_leaves_nothing_running(
    ray_environment: None, postgres_url: str, postgres_home: Path, database: Database
) -> None:
    home = postgres_home / "own"  # a short path, so that Ray lives inside it
    async with serve(postgres_url, home, None, local_ray_cpus=2) as service:
        validation_id = await service.submit(LONG)
        await service.step_reached(validation_id)
        running = await service.get(validation_id)
        assert any("raylet" in command for command in processes_of(home))
    async with database.read() as connection:
        validation = await validations.get(connection, validation_id)
    assert validation is not None
    assert (validation.state, validation.attempt) == (State.QUEUED, 1)
    await eventually(lambda: not any(map(alive, rank_pids(running))), 5)
    await eventually(lambda: not processes_of(home), 5, lambda: "\n".join(processes_of(home)))


async def test_a_standby_leads_once_the_leader_is_gone(postgres_url: str) -> None:
    first = await lead(postgres_url, "two", poll_s=0.05)
    waiting = asyncio.create_task(lead(postgres_url, "two", poll_s=0.05))
    await (await lead(postgres_url, "another", poll_s=0.05)).close()  # a cluster has a lock of its own
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await first.close()
    async with asyncio.timeout(5):
        await (await waiting).close()
