"""What a driver that is of no use left on Ray goes without anybody asking: a leader looks when it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from service.domain.validation import new_validation_id
from service.storage import queue, validations
from service.storage.session import Database

from .conftest import NUM_CPUS, ROOT, Service, eventually, free_cpus, serve, until_free

HOLDER = """
import sys, time
import ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
group = placement_group([{"CPU": 1}], name=sys.argv[3])
assert group.wait(30)
print("held", flush=True)
time.sleep(600)
"""
Hold = Callable[[str, str], None]


@pytest.fixture
def hold(ray_address: str) -> Iterator[Hold]:
    """Another driver that reserves a CPU under a namespace and a name, and is stopped."""
    started: list[subprocess.Popen[str]] = []

    def start(namespace: str, name: str) -> None:
        command = [sys.executable, "-c", HOLDER, ray_address, namespace, name]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ))
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)

    yield start
    for holder in started:
        holder.kill()
        holder.wait()


async def test_a_new_leader_removes_what_nobody_holds_and_nothing_else(
    hold: Hold, postgres_url: str, ray_address: str, database: Database, tmp_path: Path
) -> None:
    await until_free()
    held = await _claim(postgres_url, database)
    hold("gradgate-swept", "gradgate:val_left_by_a_stopped_driver:1")
    hold("gradgate-other", "gradgate:val_of_another_cluster:1")
    hold("gradgate-swept", f"gradgate:{held}:1")
    hold("gradgate-swept", "somebody-elses")
    assert free_cpus() == NUM_CPUS - 4
    async with serve(postgres_url, tmp_path, ray_address, cluster="swept", lease_s=2.0) as service:
        await eventually(lambda: free_cpus() == NUM_CPUS - 3, 60)
        await _lapse(service, held)
        await service.wait(held)
        # What its attempt held is gone as well, the warm gang that did it instead is not swept.
        await eventually(lambda: free_cpus() == NUM_CPUS - 4, 10, lambda: f"{free_cpus()} are free")
        names = await _group_names()
        assert "somebody-elses" in names
        assert "gradgate:val_of_another_cluster:1" in names
        assert f"gradgate:{held}:1" not in names


async def _claim(postgres_url: str, database: Database) -> str:
    """A validation that another dispatcher holds."""
    request = {"mesh": {"dp": 2, "pp": 1}, "probes": ["exact"], "orderings": ["fixed"], "steps": 1, "device": "cpu"}
    async with database.transaction() as connection:
        stored, _ = await validations.insert(
            connection,
            validation_id=new_validation_id(),
            cluster="swept",
            request=request,
            labels={},
            num_ranks=2,
            deadline_s=60,
        )
        await queue.claim(connection, cluster="swept", dispatcher_id="another", lease_s=600, limit=1)
    return stored.id


async def _lapse(service: Service, validation_id: str) -> None:
    async with service.database.transaction() as connection:
        lapse = text("UPDATE validations SET lease_expires_at = clock_timestamp() WHERE id = :id")
        await connection.execute(lapse, {"id": validation_id})


async def _group_names() -> set[str]:
    from ray.util.placement_group import placement_group_table

    return {entry["name"] for entry in placement_group_table().values() if entry["state"] == "CREATED"}
