"""Everything on one machine: embedded Postgres, a local Ray, serve and dispatch, as processes of one keeper.

`run_stack` brings them up and takes them down again, whatever happens in between. A database or a Ray that the
settings name is used as it is and left running. Must import neither ray nor torch: Ray runs in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from service import processes
from service.home import StackError, StackHome, choose_free_port, require_free_port
from service.keeper import ChildSpec, StackState
from service.owner import STOP_TIMEOUT_S, KeeperLink, child_env, gradgate
from service.settings import Settings

POSTGRES_TIMEOUT_S = 120.0
RAY_TIMEOUT_S = 120.0
SERVER_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_TAIL_LINES = 12
RAY_OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Statistics cross Ray, never gradients, so little more than the least that Ray accepts is plenty."""

Found = TypeVar("Found")
_POSTGRES_READY = "postgres.json"


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """Where a running stack answers, and where its data is."""

    api_url: str
    database_url: str
    ray_address: str
    home: Path
    logs_dir: Path


class Stack:
    """The processes of one home. Use `run_stack`."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self.settings = settings
        self.home = StackHome(settings.home)
        self._report = report
        self._lock: int | None = None
        self._link: KeeperLink | None = None
        self._scratch = Path()
        self._env = {"GRADGATE_HOME": str(settings.home), "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self) -> StackAddresses:
        """Bring everything up. Raises StackError naming what failed and the end of its log."""
        settings = self.settings
        self._lock = self.home.claim()
        port = require_free_port(settings.host, settings.port)
        api_url = url_of(settings.host, port)
        self._start_keeper(api_url)

        ready_path = self._scratch / _POSTGRES_READY
        if settings.database_url is None:
            self._run("postgres", gradgate("postgres", "--ready-file", str(ready_path)), stage=0, grace_s=15)
        if settings.ray_address is None:
            self._start_ray()
        database_url = settings.database_url or self._await_postgres(ready_path)
        env = {
            "GRADGATE_DATABASE_URL": database_url,
            "GRADGATE_LISTEN_URL": settings.listen_url or "" if settings.database_url else "",
            "GRADGATE_HOST": settings.host,
            "GRADGATE_PORT": str(port),
        }
        self._migrate(database_url)
        self._run("serve", gradgate("serve"), stage=1, grace_s=5, **env)
        ray_address = settings.ray_address or self._await_ray()
        self._run("dispatch", gradgate("dispatch"), stage=1, grace_s=15, GRADGATE_RAY_ADDRESS=ray_address, **env)
        self._await_server(api_url)
        return StackAddresses(api_url, database_url, ray_address, self.home.path, self.home.logs_dir)

    def stop(self) -> None:
        """Stop everything that `start` has started, however far it came. Idempotent."""
        if self._link is not None:
            link, self._link = self._link, None
            if not link.stop():
                self._report(f"the stack did not stop within {STOP_TIMEOUT_S:g} s; the next start ends what is left")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def raise_if_broken(self) -> None:
        """Raise StackError where a process of the stack has exited although nobody stopped it."""
        assert self._link is not None
        with contextlib.suppress(queue.Empty):
            news = self._link.exits.get_nowait()
            name, code, message = news["name"], news["code"], news["message"]
            how = message or (f"exited with code {code}" if code is not None else "died")
            raise StackError(f"{name} {how}; {self._describe_log(name)}")

    def wait(self) -> None:
        """Stay until a process breaks (StackError) or a signal interrupts."""
        while True:
            self.raise_if_broken()
            time.sleep(0.2)

    def _start_keeper(self, api_url: str) -> None:
        assert self._lock is not None
        owner = processes.identify(os.getpid())
        assert owner is not None
        self._scratch, keep = self.home.make_scratch_dir()
        StackState(owner, owner, str(self._scratch), keep, {}, api_url).write(self.home.state_path)
        self._link = KeeperLink(self.home.state_path, self._log_path("keeper"), self._lock)

    def _start_ray(self) -> None:
        self._report(f"starting a local Ray with {self.settings.local_ray_cpus} logical CPUs")
        token_path = self.home.ensure_ray_token()
        # Set, not inherited: a token or address meant for another Ray must not reach this one.
        self._env |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_path),
            "RAY_AUTH_TOKEN": "",
            "RAY_ADDRESS": "",
        }
        options = {
            "node-ip-address": "127.0.0.1",
            "port": choose_free_port("127.0.0.1"),
            "dashboard-port": choose_free_port("127.0.0.1"),
            "dashboard-agent-listen-port": choose_free_port("127.0.0.1"),
            "temp-dir": self._scratch / "ray",  # below a private folder: Ray lets everybody write to its own
            "num-cpus": self.settings.local_ray_cpus,
            "object-store-memory": RAY_OBJECT_STORE_BYTES,
            "include-dashboard": "false",
            "include-log-monitor": "false",
            "log-style": "record",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
        # Ranks inherit Ray's environment, and need neither the database nor the API.
        secret = {"GRADGATE_DATABASE_URL": "", "GRADGATE_API_KEY": ""}
        self._run("ray", [*argv, "--disable-usage-stats", *flags], stage=0, grace_s=10, **secret)

    def _run(self, name: str, argv: list[str], *, stage: int, grace_s: float, **env: str) -> None:
        assert self._link is not None
        log_path = self._log_path(name)
        log_path.unlink(missing_ok=True)
        full_env = {key: value for key, value in (child_env() | self._env | env).items() if value}
        self._link.start(ChildSpec(name, argv, full_env, str(log_path), stage, grace_s))

    def _migrate(self, database_url: str) -> None:
        self._report("migrating the database")
        from service.storage import migration

        migration.upgrade(database_url)

    def _await_postgres(self, ready_path: Path) -> str:
        self._report("starting Postgres")
        url: str = self._await("postgres", lambda: _read_json(ready_path), POSTGRES_TIMEOUT_S)["url"]
        return url

    def _await_ray(self) -> str:
        # Ray writes this file when the node is up, with the address that drivers must use.
        address_path = self._scratch / "ray" / "ray_current_cluster"
        return self._await("ray", lambda: _read_text(address_path), RAY_TIMEOUT_S)

    def _await_server(self, api_url: str) -> None:
        self._report("starting serve and dispatch")
        self._await("serve", lambda: _is_ready(api_url) or None, SERVER_TIMEOUT_S)

    def _await(self, name: str, probe: Callable[[], Found | None], timeout_s: float) -> Found:
        deadline = time.monotonic() + timeout_s
        while True:
            self.raise_if_broken()
            if (found := probe()) is not None:
                return found
            if time.monotonic() > deadline:
                raise StackError(f"{name} is not ready after {timeout_s:g} s; {self._describe_log(name)}")
            time.sleep(POLL_S)

    def _log_path(self, name: str) -> Path:
        return self.home.logs_dir / f"{name}.log"

    def _describe_log(self, name: str) -> str:
        text = _read_text(self._log_path(name))
        if text is None:
            return f"its log {self._log_path(name)} is empty"
        tail = "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
        return f"its log {self._log_path(name)} ends with:\n{tail}"


@contextlib.contextmanager
def run_stack(settings: Settings, report: Callable[[str], None]) -> Iterator[tuple[Stack, StackAddresses]]:
    """A running stack for the time of the `with` block; nothing of it runs afterwards."""
    stack = Stack(settings, report)
    try:
        yield stack, stack.start()
    finally:
        stack.stop()


def keep_postgres(home: Path, ready_path: Path) -> None:
    """Run the embedded Postgres until a signal interrupts; `ready_path` gets its URL once it answers."""
    from service.storage import embedded

    server = embedded.start(home)
    try:
        temporary = ready_path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"url": server.url}))
        temporary.replace(ready_path)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        server.stop()


def embedded_url(home: StackHome) -> str | None:
    """The URL of the embedded Postgres of the stack that runs in this home; None where none runs."""
    state = StackState.read(home.state_path)
    if state is None or not processes.is_alive(state.owner):
        return None
    found = _read_json(Path(state.scratch_dir) / _POSTGRES_READY)
    return str(found["url"]) if found else None


def url_of(host: str, port: int) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _is_ready(api_url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{api_url}/readyz", timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _read_text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip() or None
    return None


def _read_json(path: Path) -> dict[str, Any] | None:
    text = _read_text(path)
    return json.loads(text) if text else None
