"""The keeper and what the next start does, with real processes that try to get away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service import processes
from service.home import StackError, StackHome
from service.keeper import StackState
from service.owner import child_env

# Starts a keeper with one child that has a child of its own and one in another session, then waits.
OWNER = """
import os, sys, time
from pathlib import Path
from service import processes
from service.home import StackHome
from service.keeper import ChildSpec, StackState
from service.owner import KeeperLink

home = StackHome(Path(sys.argv[1]))
lock = home.claim()
scratch, keep = home.make_scratch_dir()
me = processes.identify(os.getpid())
StackState(me, me, str(scratch), keep, {}, "http://127.0.0.1:1").write(home.state_path)
link = KeeperLink(home.state_path, home.logs_dir / "keeper.log", lock)
script = sys.argv[2].replace("SCRATCH", str(scratch))
link.start(ChildSpec("child", ["sh", "-c", script], dict(os.environ), str(home.logs_dir / "child.log"), 0, 1.0))
print("started", flush=True)
mode = sys.argv[3]
if mode == "wait":
    time.sleep(600)
elif mode == "exits":
    print(link.exits.get(timeout=20), flush=True)
print(link.stop(), flush=True)
"""
FAMILY = "sleep 601 & setsid sleep 602 & echo $$ > SCRATCH/pid; wait"


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path / "home")


@pytest.fixture
def start_owner(home: StackHome) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(script: str = FAMILY, mode: str = "wait") -> subprocess.Popen[str]:
        code = textwrap.dedent(OWNER)
        command = [sys.executable, "-c", code, str(home.path), script, mode]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_env())
        started.append(owner)
        return owner

    yield start
    for owner in started:
        owner.kill()
        owner.wait()


def read_family(home: StackHome, size: int) -> list[processes.ProcessIdentity]:
    """The keeper and all below it, once they are `size` processes."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = StackState.read(home.state_path)
        if state and state.children:
            family = [state.keeper, *processes.find_descendants(state.keeper.pid)]
            if len(family) >= size:
                return family
        time.sleep(0.05)
    raise AssertionError(f"no family of {size} came up")


def test_kill_of_the_owner_ends_everything(home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]) -> None:
    owner = start_owner()
    family = read_family(home, 4)
    owner.send_signal(signal.SIGKILL)
    assert processes.wait_for_end(family, 10.0) == []
    assert not home.state_path.exists()


def test_a_child_that_ignores_sigterm_is_killed(
    home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]
) -> None:
    owner = start_owner("trap '' TERM; sleep 601 & while :; do sleep 1; done")
    family = read_family(home, 3)
    owner.kill()
    assert processes.wait_for_end(family, 15.0) == []


def test_an_orphan_in_another_session_does_not_escape(
    home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]
) -> None:
    # The middle process exits at once, so that the sleeper's parent is gone; only a subreaper still finds it.
    owner = start_owner("(setsid sh -c 'trap \"\" TERM HUP; sleep 603' &) ; sleep 601")
    family = read_family(home, 4)
    owner.kill()
    assert processes.wait_for_end(family, 15.0) == []


def test_stop_waits_for_the_end(home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]) -> None:
    owner = start_owner(mode="stop")
    output, _ = owner.communicate(timeout=30)
    assert output.splitlines() == ["started", "True"]
    assert not home.state_path.exists()


def test_an_exit_is_told_with_its_code(home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]) -> None:
    owner = start_owner("exit 7", mode="exits")
    output, _ = owner.communicate(timeout=30)
    news = output.splitlines()[1]
    assert "'name': 'child'" in news
    assert "'code': 7" in news


def test_the_next_start_ends_what_a_killed_keeper_left(
    home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]
) -> None:
    # The child survives the SIGTERM that the kernel sends when the keeper dies, and so does its own child, which the
    # next start can know only by its session and the file it has open.
    owner = start_owner(
        "trap '' TERM; sh -c 'trap \"\" TERM; exec 9>SCRATCH/open; sleep 601' & while :; do sleep 1; done"
    )
    family = read_family(home, 4)
    keeper = family[0]
    processes.send_signal(keeper, signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert processes.wait_for_end([keeper], 5.0) == []
    state = StackState.read(home.state_path)
    assert state is not None
    assert processes.is_alive(state.children["child"])

    os.close(home.claim())

    # `sleep 1` of the loop comes and goes; everything that stays is gone.
    assert processes.wait_for_end(family, 5.0) == []
    assert not home.state_path.exists()


def test_a_leader_that_died_leaves_its_session_findable(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script = f"exec 9>{folder}/open; sleep 601 & exec 9>&-; sleep 602 & echo $!; wait"
    leader = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    other_pid = int(leader.stdout.readline())
    identity = processes.identify(leader.pid)
    assert identity is not None
    leader.kill()
    leader.wait()
    try:
        found = processes.find_session_members(identity, [folder])
        assert len(found) == 1  # the one with the file open, and not the one without
        assert found[0].pid != other_pid
    finally:
        os.killpg(identity.pid, signal.SIGKILL)


def test_a_pid_given_away_is_left_alone(home: StackHome) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        real = processes.identify(bystander.pid)
        assert real is not None
        stale = processes.ProcessIdentity(real.pid, real.start_ticks - 1, real.boot_id)
        earlier_boot = processes.ProcessIdentity(real.pid, real.start_ticks, "another-boot")
        os.close(home.claim())
        children = {"one": stale, "two": earlier_boot}
        StackState(stale, earlier_boot, str(home.path / "run"), True, children, "").write(home.state_path)

        os.close(home.claim())

        assert bystander.poll() is None
        assert processes.is_alive(real)
        assert not processes.send_signal(stale, signal.SIGKILL)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_second_stack_in_one_home_is_refused(
    home: StackHome, start_owner: Callable[..., subprocess.Popen[str]]
) -> None:
    owner = start_owner()
    read_family(home, 4)
    with pytest.raises(StackError, match=rf"already running in .*process {owner.pid}, http://127.0.0.1:1"):
        home.claim()


def test_a_state_file_that_is_not_ours_is_ignored(home: StackHome) -> None:
    os.close(home.claim())
    for text in ("", "{", "[]", json.dumps({"owner": 1}), json.dumps({"owner": {"pid": 1}})):
        home.state_path.write_text(text)
        os.close(home.claim())
