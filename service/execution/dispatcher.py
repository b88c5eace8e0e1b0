"""`gradgate dispatch`: the process that leads a cluster, or stands by until it may. Must not import ray:
losing a cluster must never end this process (only its driver child loads Ray).
"""

from __future__ import annotations

import asyncio
import signal

from service.execution.housekeeping import keep_house
from service.execution.leadership import Leadership, lead
from service.execution.measures import Measures
from service.execution.patience import patience
from service.execution.supervisor import Supervisor
from service.settings import Settings
from service.storage import migration
from service.storage.events import EventHub
from service.storage.session import Database
from service.telemetry import configure_logging
from service.tracing import configure_tracing


def run(settings: Settings) -> None:
    """Dispatch until SIGTERM or SIGINT; then requeue what runs, end the driver child and return."""
    configure_logging()
    configure_tracing("gradgate-dispatch")
    asyncio.run(_run_until_signalled(settings))


async def _run_until_signalled(settings: Settings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await dispatch(settings, stopping)


async def dispatch(settings: Settings, stopping: asyncio.Event) -> None:
    """Dispatch until `stopping` is set: stand by, lead, and stand by again when the lead is lost."""
    if settings.database_url is None:
        raise ValueError("GRADGATE_DATABASE_URL is not set; a dispatcher needs the database that `serve` uses")
    measures = Measures()
    if settings.metrics_port:
        measures.expose(settings.metrics_host, settings.metrics_port)
    database = Database(
        settings.database_url, pool_size=settings.database_pool_size, through_pooler=settings.through_pooler
    )
    try:
        async with EventHub(settings.session_url or settings.database_url) as hub:
            while not stopping.is_set():
                await _stand_by_and_lead(settings, database, hub, stopping, measures)
    finally:
        await database.close()


async def _stand_by_and_lead(
    settings: Settings, database: Database, hub: EventHub, stopping: asyncio.Event, measures: Measures
) -> None:
    waiting = asyncio.create_task(_lead(settings, database))
    await first_of(waiting, asyncio.create_task(stopping.wait()))
    if not waiting.done():
        waiting.cancel()
        return
    leadership = waiting.result()
    house = asyncio.create_task(keep_house(database, settings.retention_days))
    try:
        ending = asyncio.create_task(first_of(*map(asyncio.create_task, (stopping.wait(), leadership.lost.wait()))))
        measures.leading.set(1)
        await Supervisor(settings, database, hub, measures).serve(ending)
    finally:
        measures.leading.set(0)
        house.cancel()
        await asyncio.wait([house])
        await leadership.close()


async def _lead(settings: Settings, database: Database) -> Leadership:
    """Wait for the lead. Raises NewerSchemaError: between standing by and leading somebody may have migrated."""
    assert settings.session_url is not None
    # Two thirds of a lease: a standby must have the lead before it may take over what a silent leader held.
    leadership = await lead(settings.session_url, settings.cluster, settings.poll_s, settings.lease_s * 2 / 3)
    try:
        with patience("read the schema's revision"):
            async with database.read() as connection:
                await connection.run_sync(migration.refuse_newer)
    except BaseException:
        await leadership.close()
        raise
    return leadership


async def first_of(*tasks: asyncio.Task[object]) -> None:
    """Wait for the first of several tasks; cancel nothing."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
