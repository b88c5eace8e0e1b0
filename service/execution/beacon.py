"""The driver's end of the ranks' position lines: who is where, and whose line broke.

One listening socket per driver; a gang gets a token of its own, and whoever does not say it is dropped. Frames are
plain numbers, never pickles, so a stranger on the port can at worst be ignored. The heartbeat that keeps ranks
alive goes down the same lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.contract import Position
from workers.rank_actor import FRAME, GOODBYE, HELLO, TOKEN_BYTES, Collector, unpack_position

HELLO_TIMEOUT_S = 5.0
_log = logging.getLogger("gradgate.beacon")


@dataclass(slots=True)
class Watch:
    """What is known of one gang's ranks: last positions, and lines that broke."""

    token: bytes
    positions: dict[int, Position] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)
    """Ranks whose line ever came up; of the others only Ray knows whether they run."""
    on_loss: Callable[[int], None] | None = None
    """Called once per rank whose line broke; the kernel closes a dead process's line within milliseconds."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a line comes up or breaks; whoever waits clears it."""
    _writers: dict[int, asyncio.StreamWriter] = field(default_factory=dict)

    async def wait_until_gone(self, timeout_s: float) -> bool:
        """Whether every line broke within `timeout_s`, that is, whether every rank that was heard ended."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.connected:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def beat(self) -> None:
        """Tell every rank that its driver lives."""
        for writer in self._writers.values():
            writer.write(b".")

    def close(self) -> None:
        """Drop the lines; ranks still alive end themselves."""
        self.on_loss = None
        for writer in self._writers.values():
            writer.close()


class BeaconServer:
    """Accepts the lines of every gang of one driver."""

    def __init__(self, host: str, dead_man_s: float) -> None:
        self._host = host
        self._port = 0
        self._dead_man_s = dead_man_s
        self._watches: dict[bytes, Watch] = {}
        self._server: asyncio.Server | None = None
        self._heart: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen on the node's address, on a port chosen by the system."""
        self._server = await asyncio.start_server(self._serve_line, self._host, 0)
        self._port = self._server.sockets[0].getsockname()[1]
        self._heart = asyncio.create_task(self._beat())

    def watch(self) -> tuple[Watch, Collector]:
        """A new gang's watch, and the address that its ranks need."""
        watch = Watch(secrets.token_bytes(TOKEN_BYTES))
        self._watches[watch.token] = watch
        return watch, Collector(self._host, self._port, watch.token, self._dead_man_s)

    def forget(self, watch: Watch) -> None:
        """The gang is gone."""
        self._watches.pop(watch.token, None)
        watch.close()

    async def close(self) -> None:
        """Stop listening and drop every line."""
        if self._heart is not None:
            self._heart.cancel()
        for watch in list(self._watches.values()):
            self.forget(watch)
        if self._server is not None:
            self._server.close()

    async def _beat(self) -> None:
        while True:
            for watch in self._watches.values():
                watch.beat()
            await asyncio.sleep(self._dead_man_s / 6)

    async def _serve_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                token, world_rank = HELLO.unpack(await reader.readexactly(HELLO.size))
            if (watch := self._watches.get(token)) is not None:
                await _follow(watch, world_rank, reader, writer)
            else:
                _log.warning("refused a position line with an unknown token")
        writer.close()


async def _follow(watch: Watch, world_rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    watch._writers[world_rank] = writer
    watch.connected.add(world_rank)
    watch.heard.add(world_rank)
    watch.changed.set()
    try:
        while (frame := await reader.readexactly(FRAME.size)) != GOODBYE:
            watch.positions[world_rank] = unpack_position(world_rank, frame)
        lost = False
    except (asyncio.IncompleteReadError, OSError, ValueError):
        lost = True
    watch.connected.discard(world_rank)
    watch._writers.pop(world_rank, None)
    watch.changed.set()
    if lost and watch.on_loss is not None:
        watch.on_loss(world_rank)
