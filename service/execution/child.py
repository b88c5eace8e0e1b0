"""The supervisor's handle on its driver child: a spawned process, a pipe, and a thread that reads it.

Knows nothing of the database. A child that died is not restarted here; the supervisor decides.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from service.execution.messages import STOP_TIMEOUT_S, DriverConfig, FromDriver, Stop, ToDriver

JOIN_TIMEOUT_S = STOP_TIMEOUT_S + 2.0


def drive(connection: Connection[FromDriver, ToDriver], config: DriverConfig) -> None:
    """What the child process runs. Imported there, so that the supervisor itself never loads ray."""
    from service.execution import driver

    driver.main(connection, config)


class DriverChild:
    """One driver process. Messages and the end arrive as callbacks on the event loop that started it."""

    def __init__(self, config: DriverConfig, on_message: Callable[[FromDriver], None]) -> None:
        # Spawned, never forked: Ray and torch do not survive a fork of a process with threads.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Daemonic: an exit of this process that skips `stop` must not wait for the child, which ends by itself.
        self._process = context.Process(target=drive, args=(theirs, config), name="driver", daemon=True)
        self._process.start()
        theirs.close()
        self._on_message = on_message
        self._heard_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the child's end of the pipe is closed, that is, when it is dead or dying."""
        threading.Thread(target=self._read, args=(self._connection,), name="driver pipe", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard_s

    def send(self, message: ToDriver) -> None:
        """Give an order. A child that is gone loses it; `ended` tells."""
        try:
            self._connection.send(message)
        except OSError:
            self.ended.set()

    async def stop(self) -> None:
        """Let it kill its gangs and leave Ray; end it the hard way when that takes too long."""
        self.send(Stop())
        await asyncio.to_thread(self._process.join, JOIN_TIMEOUT_S)
        await self.kill()

    async def kill(self) -> None:
        """End it now. Its gangs die with it: Ray removes what a dead driver owned."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    def _read(self, connection: Connection[ToDriver, FromDriver]) -> None:
        try:
            while True:
                self._loop.call_soon_threadsafe(self._hear, connection.recv())
        except (EOFError, OSError):
            self._loop.call_soon_threadsafe(self.ended.set)
        except RuntimeError:
            pass  # the event loop closed before the child did

    def _hear(self, message: FromDriver) -> None:
        self._heard_s = time.monotonic()
        self._on_message(message)
