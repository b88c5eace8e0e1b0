"""Position lines over real sockets: what a killed process said last is known, and strangers are refused."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from service.execution.beacon import BeaconServer
from workers.contract import RankPhase
from workers.rank_actor import HELLO

TALK_THEN_DIE = """
import os, signal, sys
from workers.contract import Position, RankPhase
from workers.rank_actor import Beacon, Collector
host, port, token = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
beacon = Beacon(Collector(host, port, token, dead_man_s=float(sys.argv[4])), 3)
for sequence in range(1, 101):
    beacon.send(Position(3, RankPhase.TIE if sequence == 100 else RankPhase.DP_SYNC, 1, 0, sequence))
if sys.argv[5] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[5] == "leave":
    beacon.leave()
signal.pause()
"""


@pytest.fixture
async def server() -> AsyncIterator[BeaconServer]:
    server = BeaconServer("127.0.0.1", dead_man_s=1.2)
    await server.open()
    yield server
    await server.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def start_rank(port: int, token: bytes, then: str, dead_man_s: float = 1.2) -> subprocess.Popen[bytes]:
    arguments = ["127.0.0.1", str(port), token.hex(), str(dead_man_s), then]
    return subprocess.Popen([sys.executable, "-c", TALK_THEN_DIE, *arguments])


async def test_the_last_word_of_a_killed_process_arrives(server: BeaconServer) -> None:
    watch, collector = server.watch()
    lost: list[int] = []
    watch.on_loss = lost.append
    rank = start_rank(collector.port, collector.token, "die")
    await eventually(lambda: lost == [3])
    assert rank.wait() == -9
    assert (watch.positions[3].phase, watch.positions[3].sequence) == (RankPhase.TIE, 100)
    assert await watch.wait_until_gone(1.0)


async def test_a_rank_that_takes_its_leave_is_not_lost(server: BeaconServer) -> None:
    watch, collector = server.watch()
    lost: list[int] = []
    watch.on_loss = lost.append
    rank = start_rank(collector.port, collector.token, "leave")
    await eventually(lambda: 3 in watch.positions and not watch.connected)
    assert rank.poll() is None  # no driver needs to watch it any more
    rank.kill()
    rank.wait()
    assert lost == []


async def test_heartbeats_keep_a_rank_alive_and_their_end_ends_it(server: BeaconServer) -> None:
    watch, collector = server.watch()
    rank = start_rank(collector.port, collector.token, "wait")
    await eventually(lambda: watch.connected == {3})
    await asyncio.sleep(2.0)
    assert rank.poll() is None
    assert not await watch.wait_until_gone(0.05)
    server.forget(watch)
    assert await asyncio.to_thread(rank.wait, 10) == 1


async def test_a_driver_that_hangs_is_as_good_as_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rank = start_rank(silent.getsockname()[1], b"x" * 16, "wait", dead_man_s=0.5)
        assert await asyncio.to_thread(rank.wait, 30) == 1


async def test_a_stranger_is_refused(server: BeaconServer) -> None:
    watch, collector = server.watch()
    reader, writer = await asyncio.open_connection("127.0.0.1", collector.port)
    writer.write(HELLO.pack(b"guess" + bytes(11), 0))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert not watch.connected
    writer.close()
