"""The driver child: the one process that holds Ray's driver connection. It knows no database.

It is a child because Ray ends a driver that lost its cluster, uncatchably; results that the supervisor holds must
not die with it. Everything it reserves is owned by it, so that its own death cleans the cluster up. It ends when
the pipe does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import ray

from service.execution.attempt import Attempt, Workplace
from service.execution.beacon import BeaconServer
from service.execution.cluster import connect, read_nodes, to_ship
from service.execution.messages import (
    STOP_TIMEOUT_S,
    Alive,
    Cancel,
    Capacity,
    DriverConfig,
    FromDriver,
    NodeCapacity,
    Ready,
    Start,
    Stop,
    Sweep,
    ToDriver,
    WorkKey,
)
from service.execution.pool import Pool
from service.execution.ray_train import TrainSite
from service.execution.sweep import remove_strangers
from service.keeper import PR_SET_PDEATHSIG, set_process_option
from service.telemetry import configure_logging

_log = logging.getLogger("gradgate.driver")


def main(connection: Connection[FromDriver, ToDriver], config: DriverConfig) -> None:
    """Entry point of the child process: connect to Ray, serve the pipe until it says stop or breaks."""
    configure_logging()
    # A Ctrl-C reaches the whole process group; the supervisor decides what it means for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Killed with the supervisor: a driver that is stopped would never read the pipe's end.
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    connect(config)
    try:
        asyncio.run(Driver(connection, config).serve())
    finally:
        _exit_after(STOP_TIMEOUT_S)
        ray.shutdown()
    os._exit(0)


class Driver:
    """Turns the supervisor's messages into attempts. Everything runs on one event loop."""

    def __init__(self, connection: Connection[FromDriver, ToDriver], config: DriverConfig) -> None:
        self._connection = connection
        self._config = config
        self._pool = Pool(config.pool_max_gangs, config.gang_idle_s, config.gpu_gang_idle_s)
        self._beacons = BeaconServer(ray.util.get_node_ip_address(), config.dead_man_s)
        self._nodes: tuple[NodeCapacity, ...] = ()
        self._attempts: dict[WorkKey, asyncio.Task[None]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[ToDriver] = asyncio.Queue()
        self._workplace = Workplace(
            self._pool, self._beacons, lambda: self._nodes, self._read_nodes, self._send, self._train_site()
        )

    async def serve(self) -> None:
        """Serve until told to stop, or until the supervisor is gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._inbox.put_nowait, Stop())
        threading.Thread(target=self._read_pipe, args=(loop,), name="pipe", daemon=True).start()
        await self._beacons.open()
        self._observe()
        self._send(Ready(ray.__version__, os.getpid()))
        loops = [asyncio.create_task(self._watch_cluster()), asyncio.create_task(self._beat())]
        while not isinstance(message := await self._inbox.get(), Stop):
            self._obey(message)
        for each in loops:
            each.cancel()
        await self._stop()

    def _train_site(self) -> TrainSite:
        address = ray.get_runtime_context().gcs_address
        runtime_env = to_ship(self._config) if self._config.ray_address is not None else None
        return TrainSite(address, self._config.cluster, runtime_env, self._config.storage_path)

    def _obey(self, message: Start | Cancel | Sweep) -> None:
        if isinstance(message, Start):
            task = asyncio.create_task(Attempt(message, self._workplace).run())
            self._attempts[message.key] = task
            task.add_done_callback(lambda _: self._attempts.pop(message.key, None))
        elif isinstance(message, Sweep):
            if self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep(message))
        elif (running := self._attempts.get(message.key)) is not None:
            running.cancel()

    async def _sweep(self, message: Sweep) -> None:
        try:
            removed = await asyncio.to_thread(remove_strangers, message.held)
        except Exception as error:
            _log.warning("cannot look for what other drivers left", extra={"reason": str(error)})
            return
        if removed:
            _log.warning("removed what another driver had left reserved", extra={"groups": removed})

    async def _stop(self) -> None:
        running = list(self._attempts.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._pool.close()
        await self._beacons.close()

    def _read_pipe(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._inbox.put_nowait, self._connection.recv())
        except (EOFError, OSError):
            # The supervisor is gone: nobody would read a result.
            _exit_after(STOP_TIMEOUT_S)
            loop.call_soon_threadsafe(self._inbox.put_nowait, Stop())

    def _send(self, message: FromDriver) -> None:
        try:
            self._connection.send(message)
        except OSError:
            _log.warning("the supervisor is gone; a message is lost", extra={"kind": type(message).__name__})

    async def _beat(self) -> None:
        while True:
            self._send(Alive())
            await asyncio.sleep(self._config.alive_interval_s)

    async def _watch_cluster(self) -> None:
        while True:
            await asyncio.sleep(self._config.snapshot_interval_s)
            try:
                await asyncio.to_thread(self._read_nodes)
            except Exception as error:
                # No snapshot is the sign: the supervisor replaces a driver that stays silent.
                _log.warning("cannot read the cluster's nodes", extra={"reason": str(error)})
                continue
            self._send(Capacity(self._nodes, self._pool.num_idle))
            await self._pool.sweep(self._nodes)

    def _observe(self) -> None:
        self._read_nodes()
        self._send(Capacity(self._nodes, self._pool.num_idle))

    def _read_nodes(self) -> tuple[NodeCapacity, ...]:
        self._nodes = read_nodes(self._config.node_label)
        return self._nodes


def _exit_after(timeout_s: float) -> None:
    """End this process whatever hangs: Ray's shutdown blocks when its cluster is gone."""
    timer = threading.Timer(timeout_s, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    sys.stderr.flush()
