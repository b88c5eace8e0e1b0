"""Ranks as processes of this machine, joined once over gloo and warm from then on: a gang without a cluster.

For self-tests. Must not judge; the service's gangs are Ray's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

import torch

from workers.contract import Device, RankFailure, StepReport, TrialSpec
from workers.session import RankSession, connect_store, host_store

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["workers.session", "torch.distributed.pipelining"])
_GRACE_S = 5.0
"""How long the others may take to notice that a rank has failed or gone."""

Item = StepReport | RankFailure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a gang said of some trials."""

    items: tuple[Item, ...]
    absent: tuple[int, ...]
    """World ranks that said nothing: first those that ended, in the order of their ends, then those that were stuck."""

    @property
    def failures(self) -> list[RankFailure]:
        """At most one a rank."""
        return [item for item in self.items if isinstance(item, RankFailure)]

    @property
    def reports(self) -> list[StepReport]:
        """All other items."""
        return [item for item in self.items if isinstance(item, StepReport)]


class LocalGang:
    """One process a rank. A context manager; whatever happens, no process outlives it."""

    def __init__(self, nodes: Sequence[str], timeout_s: float = 60.0) -> None:
        """`nodes` names each rank's node, by world rank. `timeout_s` limits each collective and each `run`."""
        self._nodes = tuple(nodes)
        self._timeout_s = timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, trials: Sequence[TrialSpec]) -> Outcome:
        """Run trials on all ranks; starts them where they do not run. After a failure the gang is started anew."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(tuple(trials))
        found, ended = self._listen()
        stuck = set(range(len(self._nodes))) - set(found) - set(ended)
        absent = (*ended, *sorted(stuck))
        outcome = Outcome(tuple(item for rank in sorted(found) for item in found[rank]), absent)
        if absent or outcome.failures:
            self.close()
        return outcome

    def close(self) -> None:
        """End every process. Idle ranks leave by themselves; one that does not is killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_GRACE_S)
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        self._store, port = host_store("127.0.0.1", self._timeout_s)
        for world_rank, node in enumerate(self._nodes):
            mine, theirs = _CONTEXT.Pipe()
            place = (port, world_rank, len(self._nodes), node, self._timeout_s)
            process = _CONTEXT.Process(target=_serve, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _listen(self) -> tuple[dict[int, tuple[Item, ...]], list[int]]:
        """Every rank's items, and who ended without any. Stops early once one has failed."""
        found: dict[int, tuple[Item, ...]] = {}
        ended: list[int] = []
        waiting = {pipe: world_rank for world_rank, pipe in enumerate(self._pipes)}
        timeout_s = self._timeout_s
        while waiting and (ready := wait(list(waiting), timeout_s)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                world_rank = waiting.pop(pipe)
                try:
                    found[world_rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    ended.append(world_rank)
                    timeout_s = _GRACE_S
                else:
                    if any(isinstance(item, RankFailure) for item in found[world_rank]):
                        timeout_s = _GRACE_S
        for world_rank, process in enumerate(self._processes):
            if world_rank not in found and process.is_alive():
                process.kill()
        return found, ended


def _serve(pipe: Connection, port: int, world_rank: int, world_size: int, node: str, timeout_s: float) -> None:
    """One rank's process: runs what it is sent until the pipe is closed."""
    torch.set_num_threads(1)
    store = connect_store("127.0.0.1", port, timeout_s)
    session = RankSession.join(store, world_rank, world_size, Device.CPU, timeout_s, node)
    try:
        while True:
            pipe.send(tuple(session.run(pipe.recv())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Not `close`: with a dead peer the backend may wait for it.
        os._exit(0)
