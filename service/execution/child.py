"""The supervisor's handle on its driver child: a spawned process, a pipe, and a thread that reads it.

Knows nothing of the database. A child that died is not restarted here; the supervisor decides.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from service.execution.messages import STOP_TIMEOUT_S, DriverConfig, FromDriver, Stop, ToDriver
from service.settings import Settings

JOIN_TIMEOUT_S = STOP_TIMEOUT_S + 2.0
MAX_LOCAL_RAY_DIR = 40
"""Longest folder under which Ray's socket paths still fit into the 107 characters that Linux allows."""


def driver_config(settings: Settings) -> DriverConfig:
    """What of the settings the driver child needs."""
    ray_dir = str(settings.home / "ray")
    return DriverConfig(
        cluster=settings.cluster,
        ray_address=settings.ray_address,
        local_num_cpus=settings.local_ray_cpus,
        local_ray_dir=ray_dir if len(ray_dir) <= MAX_LOCAL_RAY_DIR else None,
        node_label=settings.node_label,
        storage_path=str(Path(settings.home) / "ray-train"),
        pool_max_gangs=settings.pool_max_gangs,
        gang_idle_s=settings.gang_idle_s,
        gpu_gang_idle_s=settings.gpu_gang_idle_s,
        stacks=settings.stacks,
    )


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
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the child's end of the pipe is closed, that is, when it is dead or dying."""
        threading.Thread(target=self._read, args=(self._connection,), name="driver pipe", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

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

    def strike(self) -> None:
        """End it now; `ended` follows. Its gangs die with it: Ray removes what a dead driver owned."""
        self._process.kill()

    async def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self.strike()
        await asyncio.to_thread(self._process.join)

    def _read(self, connection: Connection[ToDriver, FromDriver]) -> None:
        try:
            while True:
                self._loop.call_soon_threadsafe(self._on_message, connection.recv())
        except (EOFError, OSError):
            self._loop.call_soon_threadsafe(self.ended.set)
        except RuntimeError:
            pass  # the event loop closed before the child did
