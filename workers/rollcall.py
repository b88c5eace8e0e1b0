"""How ranks that nobody supervises hear from each other at the end, also where some of them are stuck or dead.

Ranks started by torchrun, srun or by hand share only the rendezvous store. Each posts its last word there; the first
that lives reads them all and posts the exit code. A rank that waits in a collective for a peer that failed cannot
speak for itself: its watching thread does, and ends the process. Runs no collective and judges nothing.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from workers.contract import Fingerprint, Position, RankFailure, StepReport
from workers.errors import CollectiveError

POLL_S = 0.2
GRACE_S = 1.0
"""How long a rank has to raise by itself, once another has failed, before its watcher speaks for it."""
STRAGGLER_S = 4.0
"""How long world_rank 0 waits for last words once a rank has failed; who is silent for longer is dead."""
ERROR_CODE = 3


@dataclass(frozen=True, slots=True)
class Word:
    """The last word of a rank: what it is and all that it found."""

    world_rank: int
    fingerprint: Fingerprint | None
    items: tuple[StepReport | RankFailure, ...]

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """At most one, the last item."""
        return tuple(item for item in self.items if isinstance(item, RankFailure))

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """All other items."""
        return tuple(item for item in self.items if isinstance(item, StepReport))


class RollCall:
    """One rank's end of the roll call. `conclude` turns all words into the exit code, on the first that lives."""

    def __init__(
        self,
        store: dist.Store,
        world_rank: int,
        world_size: int,
        timeout_s: float,
        conclude: Callable[[tuple[Word, ...]], int],
        interrupted: Callable[[str], Word],
    ) -> None:
        """`interrupted(why)` is the word of a rank that cannot speak for itself."""
        self._store = store
        self._world_rank = world_rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._conclude = conclude
        self._interrupted = interrupted
        self._claim = threading.Lock()
        self._claimed = threading.Event()
        self._terminated = threading.Event()
        self._signals, self._signalled = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="roll-call", daemon=True)

    def watch(self) -> None:
        """From now on step in where this rank is stuck. Takes over SIGTERM; call it on the main thread."""
        self._signalled.setblocking(False)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        # While the main thread is blocked in a collective no handler runs: the watcher reads the signal's number.
        signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
        self._watcher.start()

    def collect(self, name: str, value: str) -> tuple[str, ...]:
        """Post a value under `name` and return every rank's, by world_rank. CollectiveError where some never post."""
        self._store.set(f"{name}/{self._world_rank}", value)
        due = [f"{name}/{world_rank}" for world_rank in range(self._world_size)]
        deadline_s = time.monotonic() + self._timeout_s
        while not self._store.check(due):
            if self._has("failed") or time.monotonic() > deadline_s:
                absent = [world_rank for world_rank, key in enumerate(due) if not self._has(key)]
                raise CollectiveError(f"world ranks {absent} did not say their {name}: they failed or never started")
            time.sleep(POLL_S / 10)
        return tuple(self._store.get(key).decode() for key in due)

    def finish(self, word: Word) -> int:
        """Post this rank's word and return the exit code that all agree on. For the main thread."""
        if not self._claim.acquire(blocking=False):
            # The watcher is at it and will end this process.
            threading.Event().wait()
        self._claimed.set()
        if self._watcher.is_alive():
            self._signalled.send(b"\0")
            # A thread inside the store's code while the interpreter ends would abort the process.
            self._watcher.join()
        return self._settle(word)

    def _settle(self, word: Word) -> int:
        try:
            self._post(word)
            code = None if self._world_rank == 0 else self._hear()
            if code is None:
                code = self._conclude(self._gather())
                self._announce(code)
            return code
        except dist.DistError as error:
            message = f"world_rank {self._world_rank} lost the rendezvous store and with it the others: {error}"
            sys.stderr.write(f"gradgate: {message}\n")
            return ERROR_CODE

    def _post(self, word: Word) -> None:
        self._store.set(f"word/{word.world_rank}", pickle.dumps(word).hex())
        if word.failures:
            self._store.set("failed", "1")

    def _gather(self) -> tuple[Word, ...]:
        """Every rank's word; those of dead ranks are missing."""
        due = [f"word/{world_rank}" for world_rank in range(self._world_size)]
        deadline_s = time.monotonic() + self._timeout_s
        alarmed = False
        while time.monotonic() < deadline_s and not self._store.check(due):
            if not alarmed and self._alarmed():
                alarmed, deadline_s = True, time.monotonic() + STRAGGLER_S
            time.sleep(POLL_S / 10)
        # Written by this job's own ranks into this job's own store.
        return tuple(pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in due if self._has(key))

    def _alarmed(self) -> bool:
        return self._terminated.is_set() or self._has("failed")

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _announce(self, code: int) -> None:
        """Post the exit code and stay until the others have it: the store may be this process's own."""
        self._store.set("exit_code", str(code))
        deadline_s = time.monotonic() + STRAGGLER_S / 2
        while time.monotonic() < deadline_s and self._store.add("heard", 0) < self._world_size - 1:
            time.sleep(POLL_S / 10)

    def _hear(self) -> int | None:
        """The exit code, once it is posted; None where no rank before this one is left to post it."""
        deadline_s = time.monotonic() + self._timeout_s + STRAGGLER_S
        before = [f"word/{world_rank}" for world_rank in range(self._world_rank)]
        alarmed = False
        while not self._has("exit_code"):
            late = time.monotonic() > deadline_s
            if late and not any(map(self._has, before)):
                return None
            if late and time.monotonic() > deadline_s + self._timeout_s:
                return ERROR_CODE
            if not alarmed and self._alarmed():
                # Time for every rank before this one to give up on those before it.
                alarmed, deadline_s = True, time.monotonic() + STRAGGLER_S * (1 + self._world_rank)
            time.sleep(POLL_S / 10)
        code = int(self._store.get("exit_code"))
        self._store.add("heard", 1)
        return code

    def _watch(self) -> None:
        why = None
        while why is None and not self._claimed.is_set():
            why = self._alarm()
        if why and not self._claimed.wait(GRACE_S) and self._claim.acquire(blocking=False):
            leave(self._settle(self._interrupted(why)))

    def _alarm(self) -> str | None:
        """Wait a moment for a reason to step in."""
        readable, _, _ = select.select([self._signals], [], [], POLL_S)
        if readable and signal.SIGTERM in self._signals.recv(64):
            return "it was told to terminate"
        try:
            return "another rank failed" if self._has("failed") else None
        except dist.DistError:
            return "the rendezvous store went away"


def waiting(position: Position, node: str, why: str) -> RankFailure:
    """What is said of a rank that is stuck: it is never the first cause."""
    return RankFailure(
        world_rank=position.world_rank,
        node=node,
        phase=position.phase,
        trial_index=position.trial_index,
        step=position.step,
        code="interrupted",
        message=f"world_rank {position.world_rank} was in {position.phase.value} when {why}",
        collateral=True,
    )


def leave(code: int) -> None:
    """End this process now: tearing down groups whose peers are gone could wait for their timeout."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
