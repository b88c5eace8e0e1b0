"""The embedded server: adopted or restarted after every kind of sudden death, and never without its data."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from service.domain.errors import EmbeddedPostgresError
from service.storage import embedded, programs

ROOT_DIR = Path(__file__).parents[3]
NOBODY_UID = 65534
# Tests kill processes, not machines: what the kernel has taken over is safe without a sync.
FAST = {"fsync": "off"}
OWNER = """
import sys
from pathlib import Path
from service.storage import embedded
server = embedded.start(Path(sys.argv[1]), options={"fsync": "off"})
print(server.url, flush=True)
sys.stdin.read()
server.stop()
print("stopped", flush=True)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of its own; whatever still serves it afterwards is ended."""
    folder = Path(tempfile.mkdtemp(prefix="gradgate-test-"))
    folder.chmod(0o711)
    yield folder
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "postgres" and folder in Path(_cwd(process)).parents:
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def made(postgres_home: Path) -> Iterator[Path]:
    """A data folder that was shut down properly; tests copy it, which is faster than making one each."""
    folder = Path(tempfile.mkdtemp(prefix="gradgate-test-"))
    folder.chmod(0o711)
    with embedded.start(folder, options=FAST) as server:
        _write(server.url, "made")
    yield folder / "postgres"
    shutil.rmtree(folder)


@pytest.fixture
def filled(home: Path, made: Path) -> Path:
    """A home with data in it and no server."""
    _copy(made, home / "postgres")
    return home


def test_the_first_start_makes_a_database_and_the_last_stop_ends_the_server(home: Path) -> None:
    server = embedded.start(home, options=FAST)
    assert server.pgdata == home / "postgres"
    _write(server.url, "first")
    with psycopg.connect(server.url) as connection:
        row = connection.execute(
            "SELECT current_database(), current_setting('server_version_num')::int / 10000"
        ).fetchone()
        assert row == ("gradgate", 18)
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
    server.stop()
    server.stop()
    assert _server_pids(home) == set()
    with embedded.start(home, options=FAST) as again:
        assert _read(again.url) == ["first"]


def test_nobody_else_can_reach_the_socket(filled: Path) -> None:
    with embedded.start(filled, options=FAST) as server:
        assert stat.S_IMODE(server.pgdata.stat().st_mode) == 0o700
        (socket,) = server.pgdata.glob(".s.PGSQL.*[0-9]")
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700


def test_a_killed_owner_leaves_a_server_that_the_next_start_adopts(filled: Path) -> None:
    owner, url = _start_owner(filled)
    _write(url, "before the kill")
    postmaster = _postmaster_pid(filled)
    owner.kill()
    owner.wait()
    assert _postmaster_pid(filled) == postmaster
    server = embedded.start(filled, options=FAST)
    assert _postmaster_pid(filled) == postmaster
    assert _read(server.url) == ["made", "before the kill"]
    server.stop()
    assert _server_pids(filled) == set()


def test_a_killed_owner_and_a_killed_server_lose_nothing(filled: Path) -> None:
    owner, url = _start_owner(filled)
    _write(url, "before the kill")
    postmaster = _postmaster_pid(filled)
    for pid in (owner.pid, postmaster):
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    with embedded.start(filled, options=FAST) as server:
        assert _postmaster_pid(filled) != postmaster
        assert _read(server.url) == ["made", "before the kill"]


def test_a_process_id_that_was_given_to_someone_else_is_no_server(filled: Path) -> None:
    postmaster_file = filled / "postgres" / "postmaster.pid"
    lines = [str(os.getpid()), str(filled / "postgres"), "1", "5432", str(filled / "postgres"), "", "1 1", "ready   "]
    postmaster_file.write_text("\n".join(lines) + "\n")
    (filled / "postgres" / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n")
    with embedded.start(filled, options=FAST) as server:
        assert _read(server.url) == ["made"]
        assert _postmaster_pid(filled) != os.getpid()


def test_a_truncated_pid_file_is_no_obstacle(filled: Path) -> None:
    (filled / "postgres" / "postmaster.pid").write_text("12")
    with embedded.start(filled, options=FAST) as server:
        assert _read(server.url) == ["made"]


def test_the_server_stays_until_its_last_holder_lets_go(filled: Path) -> None:
    first = embedded.start(filled, options=FAST)
    owner, url = _start_owner(filled)
    assert url == first.url
    first.stop()
    assert _read(url) == ["made"]
    out, _ = owner.communicate("")
    assert out.strip() == "stopped"
    assert _server_pids(filled) == set()


def test_starts_at_the_same_time_share_one_server(home: Path) -> None:
    with ThreadPoolExecutor() as pool:
        servers = list(pool.map(lambda _: embedded.start(home, options=FAST), range(4)))
    assert len({server.url for server in servers}) == 1
    postmaster = _postmaster_pid(home)
    for server in servers[:-1]:
        server.stop()
        assert _postmaster_pid(home) == postmaster
        assert _server_pids(home)
    servers[-1].stop()
    assert _server_pids(home) == set()


def test_a_signal_for_the_owners_terminal_does_not_reach_the_server(filled: Path) -> None:
    with embedded.start(filled, options=FAST):
        assert os.getpgid(_postmaster_pid(filled)) != os.getpgid(0)
        assert os.getsid(_postmaster_pid(filled)) != os.getsid(0)


def test_an_interrupted_first_start_is_done_again(home: Path) -> None:
    leftover = home / "postgres.new"
    leftover.mkdir()
    (leftover / "PG_VERSION").write_text("18\n")
    with embedded.start(home, options=FAST) as server:
        _write(server.url, "x")
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["with space 'quote' %41,comma\"", "long-" + "x" * 120])
def test_any_path_will_do(home: Path, made: Path, name: str) -> None:
    inner = home / name
    inner.mkdir(mode=0o711)
    _copy(made, inner / "postgres")
    with embedded.start(inner, options=FAST) as server, embedded.start(inner, options=FAST) as again:
        assert _read(again.url) == ["made"]
        assert server.url == again.url
    assert _server_pids(inner) == set()


def test_the_callers_environment_stays_outside(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "6000", "PGDATA": "/nonexistent", "LC_ALL": "xx_XX", "PGHOST": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    with embedded.start(filled, options=FAST) as server:
        assert _read(server.url) == ["made"]


def test_data_of_another_version_is_refused_and_left_alone(filled: Path) -> None:
    version = filled / "postgres" / "PG_VERSION"
    version.write_text("17\n")
    with pytest.raises(EmbeddedPostgresError, match="made by Postgres 17, this is 18"):
        embedded.start(filled, options=FAST)
    assert version.read_text() == "17\n"


def test_a_folder_with_something_else_in_it_is_refused(home: Path) -> None:
    (home / "postgres").mkdir()
    (home / "postgres" / "thesis.tex").write_text("precious")
    with pytest.raises(EmbeddedPostgresError, match="no database"):
        embedded.start(home, options=FAST)
    assert (home / "postgres" / "thesis.tex").read_text() == "precious"


def test_a_server_that_cannot_start_says_why(filled: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="shared_buffers"):
        embedded.start(filled, options={"shared_buffers": "nonsense"})
    with embedded.start(filled, options=FAST) as server:
        assert _read(server.url) == ["made"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_root_is_told_about_a_home_that_the_account_cannot_enter(home: Path) -> None:
    closed = home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match=rf"may not pass through {closed}"):
        embedded.start(closed / "home")
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_a_home_directory_is_never_opened_to_the_account(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.chmod(0o700)
    someone = pwd.struct_passwd(("someone", "x", 1, 1, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [someone])
    with pytest.raises(EmbeddedPostgresError, match=f"{home} is a home directory"):
        embedded.start(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_others_pass_through_a_home_only_where_the_server_is_another_user_and_read_nothing(home: Path) -> None:
    made = home / "made"
    with embedded.start(made, options=FAST):
        found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (made, *made.iterdir())}
    assert found.pop("made") == (0o701 if os.geteuid() == 0 else 0o700)
    assert set(found) >= {"postgres", "postgres.start.lock", "postgres.holders.lock"}
    assert {name for name, mode in found.items() if mode & 0o077} <= {
        name for name in found if name.startswith("postgres-programs-")
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_programs_that_the_account_cannot_read_are_copied(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_is_usable", lambda folder, account: False)
    with embedded.start(home, options=FAST) as server:
        _write(server.url, "x")
        (copy,) = home.glob("postgres-programs-*")
        (postmaster,) = [p for p in _processes(home) if p.pid == _postmaster_pid(home)]
        assert Path(postmaster.exe()).is_relative_to(copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user, which only root can; others run as one anyway")
def test_a_user_who_is_not_root_runs_it_as_himself(home: Path) -> None:
    os.chown(home, NOBODY_UID, NOBODY_UID)
    python = _interpreter_for(NOBODY_UID)
    if python is None:
        pytest.skip(f"user {NOBODY_UID} cannot run Python with the packages of {sys.executable} in {ROOT_DIR}")
    home.chmod(0o700)
    owner, url = _start_owner(home, python, user=NOBODY_UID)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    _write(url, "x")
    assert _users(home) == {NOBODY_UID}
    out, _ = owner.communicate("")
    assert out.strip() == "stopped"
    assert _server_pids(home) == set()
    with pytest.raises(EmbeddedPostgresError, match=f"belongs to user {NOBODY_UID}"):
        embedded.start(home, options=FAST)


def _interpreter_for(uid: int) -> str | None:
    """A Python of this version that this user may run with our packages; ours may lie in root's home."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            command = [python, "-c", "import service.storage.embedded"]
            if subprocess.run(command, **_like_us(uid), capture_output=True, check=False).returncode == 0:
                return python
        except OSError:
            continue
    return None


def _like_us(uid: int | None) -> dict[str, Any]:
    """Where, with which packages and as whom to run a Python process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"cwd": ROOT_DIR, "env": env, "user": uid, "group": uid}


def _start_owner(
    home: Path, python: str = sys.executable, user: int | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Another process that starts the server; returns once it runs."""
    command = [python, "-c", OWNER, str(home)]
    owner = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_like_us(user))
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        owner = source.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
    target.chmod(0o700)


def _write(url: str, word: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS words (id int GENERATED ALWAYS AS IDENTITY, word text)")
        connection.execute("INSERT INTO words (word) VALUES (%s)", [word])


def _read(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [word for (word,) in connection.execute("SELECT word FROM words ORDER BY id").fetchall()]


def _postmaster_pid(home: Path) -> int:
    return int((home / "postgres" / "postmaster.pid").read_text().splitlines()[0])


def _processes(home: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["name"])
        if process.info["name"] == "postgres" and _cwd(process) == str(home / "postgres")
    ]


def _users(home: Path) -> set[int]:
    """Whose processes serve `home`; a backend that ends meanwhile is nobody's."""
    users = set()
    for process in _processes(home):
        with contextlib.suppress(psutil.NoSuchProcess):
            users.add(process.uids().real)
    return users


def _server_pids(home: Path) -> set[int]:
    """Processes that serve `home`; those that are just ending get a moment."""
    deadline = time.monotonic() + 2
    while pids := {process.pid for process in _processes(home)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return pids


def _cwd(process: psutil.Process) -> str:
    try:
        return str(process.cwd())
    except psutil.Error:
        return ""
