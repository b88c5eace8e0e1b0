"""The owner's end of a keeper (`service.keeper`): ask for processes, hear of their exits, have them all stopped."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.home import StackError
from service.keeper import ChildSpec

STOP_TIMEOUT_S = 60.0


class KeeperLink:
    """A running keeper. When this process dies, by whatever, the keeper stops everything."""

    def __init__(self, state_path: Path, log_path: Path, lock: int) -> None:
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "service.keeper", str(state_path)],
                env=child_env(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for the owner alone
                pass_fds=(lock,),
            )
        self.exits: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            if news["event"] == "exited":
                self.exits.put(news)
        self.exits.put({"name": "keeper", "code": None, "message": ""})

    def start(self, spec: ChildSpec) -> None:
        """Ask for a process; that it has died is heard through `exits`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise StackError("the stack's keeper process has died; start again") from error

    def stop(self) -> bool:
        """Have everything stopped and wait for it; a second Ctrl-C meanwhile kills instead. False: it hung."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._wait()
        except KeyboardInterrupt:
            self._process.terminate()
            return self._wait()

    def _wait(self) -> bool:
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


def gradgate(*arguments: str) -> list[str]:
    """The command line of a gradgate command in this very installation."""
    return [sys.executable, "-P", "-m", "service.cli", *arguments]


def child_env() -> dict[str, str]:
    """Our environment, with `service` and `workers` importable where they are not installed."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    root = Path(__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), env.get("PYTHONPATH"))))
    return env
