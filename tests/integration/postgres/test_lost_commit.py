"""A connection dies around a COMMIT, so that the dispatcher cannot know whether it was made: all is written once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from service.domain.validation import FailureDetail, State
from service.execution.measures import Measures
from service.execution.messages import Failed, Formed, Reserved, WorkKey
from service.execution.order import to_start
from service.execution.record import Record
from service.storage import events, ledger, queue, validations
from service.storage.ledger import Turn
from service.storage.session import Database
from workers.contract import Device

Hold = Callable[..., Awaitable[queue.Claim]]
PATIENCE_S = 60
WRITES = ("reserved", "formed", "failed")


class Wire:
    """Stands between a client and the server, and cuts one connection at a COMMIT."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self.num_commits_until_cut = -1
        self.made_first = True
        """Whether the server gets the COMMIT that is cut off, and makes it; only its answer is lost then."""
        self.num_cut = 0

    async def carry(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        server_in, server_out = await asyncio.open_unix_connection(str(self._server))
        back = asyncio.create_task(_pump(server_in, client_out))
        with contextlib.suppress(OSError):
            while data := await client_in.read(2**16):
                if b"COMMIT\0" in data and self._cuts_now():
                    back.cancel()
                    await asyncio.wait([back])
                    if self.made_first:
                        server_out.write(data)
                        assert b"COMMIT\0" in await server_in.read(2**16)
                    break
                server_out.write(data)
                await server_out.drain()
        for end in (client_out, server_out):
            end.close()
        back.cancel()

    def _cuts_now(self) -> bool:
        self.num_commits_until_cut -= 1
        if self.num_commits_until_cut != 0:
            return False
        self.num_cut += 1
        return True


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
    target.close()


@pytest.fixture
async def wire(postgres_url: str) -> AsyncIterator[tuple[Wire, Database]]:
    """The wire, and a pool on the other end of it."""
    url = make_url(postgres_url)
    folder, name = Path(tempfile.mkdtemp(prefix="gradgate-test-")), f".s.PGSQL.{url.query['port']}"
    wire = Wire(Path(str(url.query["host"])) / name)
    listening = await asyncio.start_unix_server(wire.carry, str(folder / name))
    database = Database(url.update_query_dict({"host": str(folder)}).render_as_string(hide_password=False))
    yield wire, database
    await database.close()
    listening.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("made_first", [True, False])
@pytest.mark.parametrize("cut", range(len(WRITES)), ids=WRITES)
async def test_each_write_of_an_attempt_is_made_once_whatever_became_of_its_commit(
    wire: tuple[Wire, Database], database: Database, hold: Hold, cut: int, made_first: bool
) -> None:
    line, far = wire
    line.made_first, line.num_commits_until_cut = made_first, cut + 1
    claim = await hold(f"commit-{cut}-{made_first}")
    key = WorkKey(claim.id, claim.attempt)
    record = Record(far, key, 0.0, Measures())
    record.begin(to_start(key, {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"]}, 60))
    writing = asyncio.create_task(record.run())
    messages = (
        Reserved(key, Device.CPU, ("n1",), False, 0.1),
        Formed(key, (), 0.2),
        Failed(key, FailureDetail("rank_died", "rank 1 was killed")),
    )
    for message, written in zip(messages, WRITES, strict=True):
        record.hear(message)
        await _until_written(database, claim.id, written)
    async with asyncio.timeout(PATIENCE_S):
        await writing
    assert line.num_cut == 1
    assert not record.lost
    async with database.read() as connection:
        kinds = [event.type for event in await events.read(connection, claim.id)]
        stored = await validations.get(connection, claim.id)
        (entry,) = await ledger.of_validation(connection, claim.id)
    assert kinds == ["queued", "claimed", "reserved", "formed", "trial_started", "failed"]
    assert stored is not None
    assert (stored.state, stored.attempt, entry.nodes, entry.outcome) == (State.FAILED, 1, ("n1",), "failed")


async def test_a_turn_is_taken_once_in_order_and_only_by_who_holds_the_attempt(database: Database, hold: Hold) -> None:
    claim = await hold("turns")
    asked = [(1, Turn.OPEN), (1, Turn.DONE), (3, Turn.LOST), (2, Turn.OPEN), (1, Turn.DONE)]
    for number, found in asked:
        async with database.transaction() as connection:
            assert await ledger.take_turn(connection, claim.id, 1, number) is found
    async with database.transaction() as connection:
        assert await queue.release(connection, claim.id, 1, "stops")
    async with database.transaction() as connection:
        assert await ledger.take_turn(connection, claim.id, 1, 3) is Turn.LOST
        assert await ledger.take_turn(connection, claim.id, 2, 1) is Turn.LOST


async def _until_written(database: Database, validation_id: str, kind: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with database.read() as connection:
                if kind in [event.type for event in await events.read(connection, validation_id)]:
                    return
            await asyncio.sleep(0.02)
