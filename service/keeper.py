"""The keeper: parent of a stack's processes, which ends them all when the stack's owner goes away.

`gradgate up` and `gradgate demo` talk to it over its standard input and output: one JSON object a line asks for a
process to be started, one comes back when it has started and when it has exited. The end of its input means that the
owner is done or dead (even by kill -9): then the keeper stops what it started, last stage first, and whatever
descended from it. As a child subreaper it inherits orphans, so nothing escapes by daemonizing.

Each child also gets SIGTERM from the kernel when the keeper dies. What survives even that is written down in the
state file, for the next start (`service.stack`). Standard library only; it must not know what it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from service import processes
from service.processes import ProcessIdentity

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run. Higher stages stop before lower ones; a stage stops together."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log_path: str
    stage: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class StackState:
    """What the state file holds: enough to end a stack whose owner and keeper are both gone."""

    owner: ProcessIdentity
    keeper: ProcessIdentity
    scratch_dir: str
    """Holds sockets and logs of this stack's Ray; outside the home it is removed at the end."""
    keep_scratch: bool
    children: dict[str, ProcessIdentity] = field(default_factory=dict)
    api_url: str = ""

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that a reader never sees half of it."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> StackState | None:
        """The stack described there; None where there is no file or not one of ours."""
        try:
            raw = json.loads(path.read_text())
            return cls(
                owner=ProcessIdentity(**raw["owner"]),
                keeper=ProcessIdentity(**raw["keeper"]),
                scratch_dir=raw["scratch_dir"],
                keep_scratch=raw["keep_scratch"],
                children={name: ProcessIdentity(**child) for name, child in raw["children"].items()},
                api_url=raw["api_url"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def set_process_option(option: int, value: int) -> None:
    """prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


class Keeper:
    """The event loop: lines in, processes up, news out; at the end everything down."""

    def __init__(self, state: StackState, state_path: Path) -> None:
        self.state = state
        self.state_path = state_path
        self.specs: dict[int, ChildSpec] = {}
        self.hurry = False
        self._pending = b""

    def run(self) -> None:
        """Serve the owner until its end of the pipe closes, then stop everything."""
        wakeup = self._listen_for_signals()
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while not self.hurry:
                ready = {key.fd for key, _ in selector.select()}
                if wakeup.fileno() in ready:
                    wakeup.recv(4096)
                    self.collect_exits()
                if sys.stdin.fileno() in ready and not self._read_requests():
                    break
        self.stop_all()

    def _listen_for_signals(self) -> socket.socket:
        """SIGCHLD and SIGTERM wake the loop; the terminal's signals are the owner's business."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        return reader

    def _on_terminate(self, *_: object) -> None:
        self.hurry = True

    def _read_requests(self) -> bool:
        chunk = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self.start(ChildSpec(**json.loads(line)))
        return bool(chunk)

    def start(self, spec: ChildSpec) -> None:
        """Start one process in its own session, write it down, and tell the owner."""
        keeper_pid = os.getpid()

        def die_with_keeper() -> None:
            set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
            for inherited in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(inherited, signal.SIG_DFL)
            if os.getppid() != keeper_pid:
                os._exit(1)

        try:
            with open(spec.log_path, "ab") as log:
                child = subprocess.Popen(
                    spec.argv,
                    env=spec.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_keeper,  # noqa: PLW1509 - this process has one thread
                )
        except OSError as error:
            self.tell(event="exited", name=spec.name, code=127, message=str(error))
            return
        child.returncode = 0  # collect_exits waits for it; this keeps Popen from waiting too
        self.specs[child.pid] = spec
        if identity := processes.identify(child.pid):
            self.state.children[spec.name] = identity
            self.state.write(self.state_path)
        self.tell(event="started", name=spec.name, pid=child.pid)

    def collect_exits(self) -> None:
        """Take in everything that has exited, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if spec := self.specs.pop(pid, None):
                self.tell(event="exited", name=spec.name, code=os.waitstatus_to_exitcode(status), message="")

    def tell(self, **news: Any) -> None:
        """One line to the owner, who may be gone."""
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), json.dumps(news).encode() + b"\n")

    def stop_all(self) -> None:
        """Stop stage by stage, then whatever is left below this process, then tidy up."""
        for stage in sorted({spec.stage for spec in self.specs.values()}, reverse=True):
            self._stop_stage(stage)
        self._end_orphans()
        if not self.state.keep_scratch:
            shutil.rmtree(self.state.scratch_dir, ignore_errors=True)
        self.state_path.unlink(missing_ok=True)

    def _stop_stage(self, stage: int) -> None:
        members = {pid: spec for pid, spec in self.specs.items() if spec.stage == stage}
        for pid in members:
            self._signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + max(spec.grace_s for spec in members.values())
        while members.keys() & self.specs.keys() and not self.hurry and time.monotonic() < deadline:
            time.sleep(processes.POLL_S)
            self.collect_exits()
        for pid in members.keys() & self.specs.keys():
            self._signal(pid, signal.SIGKILL)

    def _signal(self, pid: int, signal_number: signal.Signals) -> None:
        """Our own child, not waited for yet: its pid cannot have been given away."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)

    def _end_orphans(self) -> None:
        grace_s = 0.0 if self.hurry else ORPHAN_GRACE_S
        deadline = time.monotonic() + grace_s + 5.0
        while (left := processes.find_descendants(os.getpid())) and time.monotonic() < deadline:
            processes.end_processes(left, grace_s)
            self.collect_exits()


def main() -> None:
    """`python -m service.keeper STATE_FILE`; the state file is there already, with the owner in it."""
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    state_path = Path(sys.argv[1])
    state = StackState.read(state_path)
    if state is None:
        raise SystemExit(f"{state_path}: no stack is described there; the keeper is started by `gradgate up`")
    keeper = processes.identify(os.getpid())
    assert keeper is not None
    state = StackState(state.owner, keeper, state.scratch_dir, state.keep_scratch, {}, state.api_url)
    state.write(state_path)
    Keeper(state, state_path).run()


if __name__ == "__main__":
    main()
