"""One rank as a Ray actor: the only file of `workers` that imports ray.

It joins a gang, runs trials and streams their reports. It keeps no truth, knows no database and decides nothing:
the driver does. Two concurrency groups: `work` has one thread, so that thread-local settings (the CUDA device)
hold from `join` to `run`; `control` answers while `run` blocks in a collective.

Every change of position also goes down a socket to the driver's collector, as plain numbers: the kernel delivers
what was written even when the next thing that happens to this process is SIGKILL, so a killed rank still has a
truthful last phase. The same socket carries the driver's heartbeat back; when it stops, the rank ends itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray

from workers.contract import Device, Fingerprint, Position, RankFailure, RankPhase, StepReport, TrialSpec

if TYPE_CHECKING:
    import torch.distributed as dist

    from workers.session import RankSession

TOKEN_BYTES = 16
HELLO = struct.Struct(f"!{TOKEN_BYTES}sI")
"""Token of the gang, world_rank."""
FRAME = struct.Struct("!BiiQ")
"""Index of the phase in RankPhase, trial_index or -1, step or -1, sequence."""
GOODBYE = FRAME.pack(255, -1, -1, 0)
"""The last frame of a rank that leaves in good order: the end of its line is then no death."""
FLUSH_INTERVAL_S = 0.03
"""Reports are streamed at most this often: each item costs about half a millisecond on both sides."""
_PHASES = tuple(RankPhase)
_Call = TypeVar("_Call", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Collector:
    """Where a gang's positions go, and how long a rank lives without hearing from there."""

    host: str
    port: int
    token: bytes
    dead_man_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a rank is before it joins; `store_port` is set by world_rank 0, whose store all others connect to."""

    world_rank: int
    pid: int
    node_id: str
    host: str
    workers_digest: str
    store_port: int | None


def pack_position(position: Position) -> bytes:
    """A position as one frame."""
    trial_index = -1 if position.trial_index is None else position.trial_index
    step = -1 if position.step is None else position.step
    return FRAME.pack(_PHASES.index(position.phase), trial_index, step, position.sequence)


def unpack_position(world_rank: int, frame: bytes) -> Position:
    """The position in a frame. Raises ValueError for a phase that does not exist."""
    phase, trial_index, step, sequence = FRAME.unpack(frame)
    if phase >= len(_PHASES):
        raise ValueError(f"phase {phase} is not one of the {len(_PHASES)} phases; the peer is no rank of this version")
    return Position(
        world_rank, _PHASES[phase], None if trial_index < 0 else trial_index, None if step < 0 else step, sequence
    )


class Beacon:
    """A rank's line to the collector: positions up, heartbeat down. Raises OSError where it cannot connect."""

    def __init__(self, collector: Collector, world_rank: int) -> None:
        self._socket = socket.create_connection((collector.host, collector.port), timeout=collector.dead_man_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(HELLO.pack(collector.token, world_rank))
        self._left = False
        threading.Thread(target=self._watch, name="dead-man", daemon=True).start()

    def send(self, position: Position) -> None:
        """Publish a position; about 10 microseconds. A lost driver is the watcher's business, not the step's."""
        with contextlib.suppress(OSError):
            self._socket.sendall(pack_position(position))

    def leave(self) -> None:
        """Say that this rank has nothing more to do. Its process may then outlive the driver."""
        self._left = True
        with contextlib.suppress(OSError):
            self._socket.sendall(GOODBYE)

    def _watch(self) -> None:
        try:
            while self._socket.recv(64):
                pass
        except OSError:  # includes the timeout: no heartbeat for dead_man_s
            pass
        # No driver: nobody will read a report or kill this process, and its devices are needed elsewhere.
        if not self._left:
            os._exit(1)


def batches(reports: Iterator[StepReport | RankFailure]) -> Iterator[list[StepReport | RankFailure]]:
    """Group what a session yields so that streaming it costs little; a failure never waits."""
    batch: list[StepReport | RankFailure] = []
    flushed_at = time.monotonic()
    for report in reports:
        batch.append(report)
        if isinstance(report, RankFailure) or time.monotonic() - flushed_at >= FLUSH_INTERVAL_S:
            yield batch
            batch = []
            flushed_at = time.monotonic()
    if batch:
        yield batch


def on_thread(group: str) -> Callable[[_Call], _Call]:
    """Run a method of an actor on the one thread of a concurrency group."""
    return cast("Callable[[_Call], _Call]", ray.method(concurrency_group=group))


class RankActor:
    """One rank of a gang. Created with one CPU, and with one GPU where its device is cuda."""

    def __init__(self, world_rank: int, world_size: int, device: Device, collector: Collector) -> None:
        self._world_rank = world_rank
        self._world_size = world_size
        self._device = device
        self._beacon = Beacon(collector, world_rank)
        self._session: RankSession | None = None
        self._store: dist.TCPStore | None = None
        # Torch is the slow part of a cold start: import it here, on all ranks at once, not in the first call.
        import workers.session  # noqa: F401

    @on_thread("work")
    def prepare(self, timeout_s: float) -> Prepared:
        """Say where and what this rank is; world_rank 0 also opens the store that the others meet at."""
        from workers.checks.digest import workers_digest
        from workers.session import host_store

        host, store_port = ray.util.get_node_ip_address(), None
        if self._world_rank == 0:
            self._store, store_port = host_store(host, timeout_s)
        node_id = ray.get_runtime_context().get_node_id()
        return Prepared(self._world_rank, os.getpid(), node_id, host, workers_digest(), store_port)

    @on_thread("work")
    def join(self, host: str, port: int, timeout_s: float, node: str) -> Fingerprint:
        """Join the default process group as a rank on `node`. A collective call: all ranks of the gang, once."""
        from workers.session import RankSession, connect_store

        if self._store is None:
            self._store = connect_store(host, port, timeout_s)
        session = RankSession.join(self._store, self._world_rank, self._world_size, self._device, timeout_s, node)
        session.on_position = self._beacon.send
        self._beacon.send(session.position())
        self._session = session
        return session.fingerprint()

    @on_thread("work")
    def run(self, trials: Sequence[TrialSpec]) -> Iterator[list[StepReport | RankFailure]]:
        """Run trials and stream their reports. A collective call; a failure is the last item."""
        if self._session is None:
            raise RuntimeError(f"world_rank {self._world_rank} was asked to run before it joined")
        yield from batches(self._session.run(trials))

    @on_thread("control")
    def position(self) -> Position:
        """Where this rank is right now; answers while `run` blocks."""
        if self._session is None:
            return Position(self._world_rank, RankPhase.FORMING, None, None, 0)
        return self._session.position()


@dataclass(frozen=True, slots=True)
class Joined:
    """A Ray Train worker's first word: its rank has joined."""

    world_rank: int
    node_id: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class TrainTask:
    """What a Ray Train worker is to do, and the actor that it tells."""

    trials: tuple[TrialSpec, ...]
    device: Device
    collector: Collector
    timeout_s: float
    host: Any
    """Handle of an actor with `tell(list)`."""
    node_names: Mapping[str, str]
    """The operator's name of each Ray node, by its id."""


def train_rank(config: dict[str, TrainTask]) -> None:
    """One rank inside a Ray Train worker, whose process group Train has formed. A collective call.

    Words: one `Joined`, then batches of reports, then the world_rank. Raises RuntimeError after a failure, so that
    Train sees it too.
    """
    from workers.session import RankSession

    task = config["task"]
    node_id = ray.get_runtime_context().get_node_id()
    session = RankSession.adopt(task.device, task.timeout_s, task.node_names.get(node_id))
    beacon = Beacon(task.collector, session.world_rank)
    session.on_position = beacon.send
    beacon.send(session.position())
    tell = task.host.tell.options(concurrency_group="ears").remote
    # Waited for: a rank that is killed in its first step must already have said where it is.
    ray.get(tell([Joined(session.world_rank, node_id, session.fingerprint())]))
    for batch in batches(session.run(task.trials)):
        told = tell(batch)
        if isinstance(batch[-1], RankFailure):
            ray.get(told)
            raise RuntimeError(batch[-1].message)
    ray.get(tell([session.world_rank]))
    beacon.leave()
