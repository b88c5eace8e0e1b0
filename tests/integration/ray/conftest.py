"""A local Ray for the whole session, watched from the test process, and a dispatcher that works on it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.domain.validation import Event, Validation, new_validation_id
from service.execution.dispatcher import dispatch
from service.settings import Settings
from service.storage import events, validations
from service.storage.events import EventHub
from service.storage.session import Database

NUM_CPUS = 6
FREED_WITHIN_S = 5.0
ROOT = Path(__file__).resolve().parents[3]
STACKS_OF_OTHERS = ROOT / "tests" / "stacks_of_others"


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[None]:
    """What Ray and its workers inherit; set before Ray is imported, since it reads some of it only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join(filter(None, [str(ROOT), str(STACKS_OF_OTHERS), os.environ.get("PYTHONPATH")])),
        )
        yield


@pytest.fixture(scope="session")
def ray_address(ray_environment: None) -> Iterator[str]:
    """The address of a local Ray to which this process is connected, too, as an observer."""
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@contextmanager
def cluster_of(num_cpus: Mapping[str, int]) -> Iterator[Any]:
    """A Ray of several nodes on this machine, by their operator's names; the first is the head."""
    from ray.cluster_utils import Cluster

    (head, head_cpus), *others = num_cpus.items()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head_cpus, "labels": {"gradgate.node": head}})
    try:
        for name, cpus in others:
            cluster.add_node(num_cpus=cpus, labels={"gradgate.node": name})
        yield cluster
    finally:
        cluster.shutdown()


@dataclass(slots=True)
class Service:
    """A running dispatcher with its database: what a client of the API could do, without HTTP."""

    database: Database
    hub: EventHub
    settings: Settings

    async def submit(self, request: dict[str, Any]) -> str:
        """Queue a validation."""
        mesh = {"dp": 2, "pp": 2} | request.get("mesh", {})
        async with self.database.transaction() as connection:
            validation, _ = await validations.insert(
                connection,
                validation_id=new_validation_id(),
                cluster=self.settings.cluster,
                request={"device": "cpu"} | request,
                labels={},
                num_ranks=mesh["dp"] * mesh["pp"],
                deadline_s=request.get("deadline_s", 120),
            )
        return validation.id

    async def get(self, validation_id: str) -> Validation:
        """The validation as stored."""
        async with self.database.read() as connection:
            validation = await validations.get(connection, validation_id)
        assert validation is not None
        return validation

    async def history(self, validation_id: str) -> tuple[Event, ...]:
        """All its events."""
        async with self.database.read() as connection:
            return await events.read(connection, validation_id)

    async def wait(
        self,
        validation_id: str,
        until: Callable[[Validation], bool] = lambda v: v.state.terminal,
        timeout_s: float = 120,
    ) -> Validation:
        """Wait for the validation to end, or for something else to become true of it."""
        async with asyncio.timeout(timeout_s), self.hub.subscribe(validation_id) as subscription:
            while not until(validation := await self.get(validation_id)):
                await subscription.wait(1.0)
        return validation

    async def validate(self, request: dict[str, Any]) -> Validation:
        """Queue a validation and wait for its end."""
        return await self.wait(await self.submit(request))

    async def step_reached(self, validation_id: str, num_steps: int = 1) -> None:
        """Wait until the gang is at work."""
        await self.happened(validation_id, "step", num_steps)

    async def happened(self, validation_id: str, kind: str, num_times: int = 1) -> None:
        """Wait until an event of this kind is stored, or so many."""
        async with asyncio.timeout(120), self.hub.subscribe(validation_id) as subscription:
            while sum(event.type == kind for event in await self.history(validation_id)) < num_times:
                await subscription.wait(1.0)


@asynccontextmanager
async def serve(postgres_url: str, home: Path, ray_address: str | None, **overrides: Any) -> AsyncIterator[Service]:
    """A dispatcher for the time of a block."""
    values = {"cluster": "test", "lease_s": 6.0, "gang_idle_s": 600.0} | overrides
    settings = Settings(home=home, database_url=postgres_url, ray_address=ray_address, **values)
    stopping = asyncio.Event()
    database = Database(postgres_url)
    async with EventHub(postgres_url) as hub:
        working = asyncio.create_task(dispatch(settings, stopping))
        try:
            yield Service(database, hub, settings)
        finally:
            stopping.set()
            await working
            await database.close()


@pytest.fixture(scope="module")
async def service(
    postgres_url: str, ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    """This module's dispatcher, on the session's Ray."""
    async with serve(postgres_url, tmp_path_factory.mktemp("home"), ray_address) as running:
        yield running


def free_cpus() -> float:
    """CPUs that nobody holds, as the cluster sees it."""
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


async def until_free(num_cpus: float = NUM_CPUS, timeout_s: float = FREED_WITHIN_S) -> None:
    """Fail unless this many CPUs are free within the time that a failed gang may take to vanish."""
    await eventually(lambda: free_cpus() >= num_cpus, timeout_s, lambda: f"{free_cpus()} of {num_cpus} CPUs are free")


async def eventually(
    condition: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str] = lambda: "it never came true"
) -> None:
    """Wait for something that no event announces."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, otherwise()
        await asyncio.sleep(0.05)


def rank_pids(validation: Validation) -> list[int]:
    """Process ids of the ranks, by world_rank."""
    return [rank["pid"] for rank in validation.fingerprint]


def alive(pid: int) -> bool:
    """Whether a process still holds anything; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def driver_process() -> psutil.Process:
    """The dispatcher's driver child."""
    [driver] = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    return driver
