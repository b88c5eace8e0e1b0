"""GRADGATE_HOME as a stack uses it: one stack at a time, its files, and what a killed one left behind.

The lock is a flock held by the owner and its keeper together, so that it is free exactly when both are gone. Must
not start anything.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

from service import processes
from service.keeper import StackState

MAX_SCRATCH_PATH = 36
"""Ray puts Unix sockets 67 characters below this folder, and Linux takes 107 in all."""
KEEPER_WAIT_S = 45.0


class StackError(Exception):
    """A stack cannot start or has broken; the message says what to do."""


class StackHome:
    """Paths below the home, and the lock on it."""

    def __init__(self, home: Path) -> None:
        self.path = home
        self.logs_dir = home / "logs"
        self.state_path = home / "stack.json"
        self.token_path = home / "ray-token"
        self._lock_path = home / "stack.lock"

    def claim(self) -> int:
        """Take the lock and end what a killed stack left here. Returns the lock's descriptor.

        Raises StackError where another stack is alive in this home, or the home cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs_dir.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StackError(
                f"cannot use {self.path} ({error.strerror}); set GRADGATE_HOME to a folder you own"
            ) from error
        try:
            self._acquire(lock)
            self._reap()
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _acquire(self, lock: int) -> None:
        deadline = time.monotonic() + KEEPER_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self._raise_if_owned()
                if time.monotonic() > deadline:
                    self._end_keeper()
            time.sleep(0.1)

    def _raise_if_owned(self) -> None:
        state = StackState.read(self.state_path)
        if state and processes.is_alive(state.owner):
            raise StackError(
                f"a stack is already running in {self.path} (process {state.owner.pid}, {state.api_url}); use it by "
                f"`gradgate validate --url {state.api_url}`, stop it, or set another GRADGATE_HOME and GRADGATE_PORT"
            )

    def _end_keeper(self) -> None:
        """A keeper that has outlived its owner for this long hangs; what it kept is reaped afterwards."""
        state = StackState.read(self.state_path)
        if state is None or not processes.is_alive(state.keeper):
            raise StackError(f"{self._lock_path} is held by an unknown process; find it with `fuser {self._lock_path}`")
        processes.end_processes([state.keeper], grace_s=5.0)

    def _reap(self) -> None:
        """End what is left of the stack in the state file, by identity, and forget it."""
        state = StackState.read(self.state_path)
        if state is None:
            return
        folders = [Path(state.scratch_dir), self.path]
        for _ in range(3):  # a dying process may still have started another
            found = [identity for identity in (state.keeper, *state.children.values()) if processes.is_alive(identity)]
            for child in state.children.values():
                found += processes.find_session_members(child, folders)
            found += [below for identity in found for below in processes.find_descendants(identity.pid)]
            if not found:
                break
            processes.end_processes(found, grace_s=10.0)
        shutil.rmtree(state.scratch_dir, ignore_errors=True)
        self.state_path.unlink(missing_ok=True)

    def make_scratch_dir(self) -> tuple[Path, bool]:
        """An empty private folder with a short path for Ray's sockets and logs, and whether to keep it at the end."""
        preferred = self.path / "run"
        if len(str(preferred)) <= MAX_SCRATCH_PATH:
            shutil.rmtree(preferred, ignore_errors=True)
            preferred.mkdir(mode=0o700)
            return preferred, True
        scratch = Path(tempfile.mkdtemp(prefix="gradgate-"))
        if len(str(scratch)) > MAX_SCRATCH_PATH:
            scratch.rmdir()
            raise StackError(
                f"{scratch} and {preferred} are longer than {MAX_SCRATCH_PATH} characters, too long for Ray's sockets; "
                "set GRADGATE_HOME or TMPDIR to a shorter path"
            )
        return scratch, False

    def ensure_ray_token(self) -> Path:
        """The local Ray's authentication token: made once, readable by its owner only."""
        if not self.token_path.exists():
            temporary = self.token_path.with_suffix(f".{os.getpid()}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            temporary.replace(self.token_path)
        return self.token_path


def choose_free_port(host: str) -> int:
    """A port that nothing listens on right now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def require_free_port(host: str, port: int) -> int:
    """`port` where it can be listened on, or a free one for 0. Raises StackError where it is taken."""
    if port == 0:
        return choose_free_port(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            remedy = "set GRADGATE_PORT to a free port, or to 0 to have one chosen (GRADGATE_HOST sets the address)"
            raise StackError(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}") from error
    return port
