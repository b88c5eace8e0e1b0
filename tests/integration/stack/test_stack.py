"""`gradgate up` as a whole: it comes up, refuses a second one, and never leaves anything running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from service import processes
from service.keeper import StackState
from service.owner import child_env, gradgate

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 40.0

StartUp = Callable[[], "Up"]


class Up:
    """A running `gradgate up`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.output = home.with_suffix(".out")
        with open(self.output, "wb") as output:
            self.owner = subprocess.Popen(
                gradgate("up"), env=environment(home), stdout=output, stderr=output, start_new_session=True
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_until_up(self) -> str:
        """The API's URL."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if match := re.search(r"Gradgate is up: +(\S+)", self.text()):
                return match[1]
            assert self.owner.poll() is None, self.text()
            time.sleep(0.1)
        raise AssertionError(f"not up after {START_TIMEOUT_S} s: {self.text()}")

    def state(self) -> StackState:
        state = StackState.read(self.home / "stack.json")
        assert state is not None
        return state


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in child_env().items() if not name.startswith(("GRADGATE_", "RAY_"))}
    return kept | {"GRADGATE_HOME": str(home), "GRADGATE_PORT": "0", "GRADGATE_LOCAL_RAY_CPUS": "4"}


def find_leftovers(home: Path) -> list[str]:
    """Every process that was started for this home or works in it."""
    found = []
    for pid in processes.list_processes():
        try:
            environ = (processes.PROC / str(pid) / "environ").read_bytes()
            folder = (processes.PROC / str(pid) / "cwd").readlink()
            command = (processes.PROC / str(pid) / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        ours = f"GRADGATE_HOME={home}\0".encode() in environ or home in (folder, *folder.parents)
        if ours or processes.uses_folder(pid, [home]):
            found.append(f"{pid} {command}")
    return found


def wait_until_nothing_is_left(home: Path) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := find_leftovers(home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.fixture
def home() -> Iterator[Path]:
    # Not pytest's own folder: the database's account cannot enter it, and its path is too long for sockets.
    base = Path(tempfile.mkdtemp(prefix="gg-"))
    base.chmod(0o711)
    yield base / "home"
    wait_until_nothing_is_left(base / "home")
    shutil.rmtree(base)


@pytest.fixture
def start_up(home: Path) -> Iterator[StartUp]:
    started: list[Up] = []

    def start() -> Up:
        started.append(Up(home))
        return started[-1]

    yield start
    for up in started:
        if up.owner.poll() is None:
            up.owner.kill()
            up.owner.wait()


def test_it_comes_up_alone_in_its_home_and_ends_on_ctrl_c(start_up: StartUp) -> None:
    up = start_up()
    url = up.wait_until_up()
    assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    assert {"postgres", "ray", "serve", "dispatch"} <= up.state().children.keys()
    # What is found now is what must be gone later: the search sees every part.
    everything = "\n".join(find_leftovers(up.home))
    for part in (
        "service.keeper",
        "gcs_server",
        "raylet",
        "cli\0serve",
        "cli\0dispatch",
        "cli\0postgres",
        "checkpointer",
    ):
        assert part in everything, part

    second = subprocess.run(gradgate("up"), env=environment(up.home), capture_output=True, text=True, timeout=60)
    assert second.returncode == 3
    assert f"already running in {up.home}" in second.stderr
    assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200

    up.owner.send_signal(signal.SIGINT)
    assert up.owner.wait(END_TIMEOUT_S) == 0
    assert find_leftovers(up.home) == []
    assert not (up.home / "stack.json").exists()
    assert "nothing is left running" in up.text()


def test_validate_follows_a_run_and_ends_with_its_exit_code(start_up: StartUp) -> None:
    up = start_up()
    url = up.wait_until_up()

    def validate(*options: str) -> subprocess.CompletedProcess[str]:
        command = gradgate("validate", "--url", url, *options)
        return subprocess.run(command, env=environment(up.home), capture_output=True, text=True, timeout=180)

    passed = validate("--json", "--steps", "1", "--label", "team=a")
    assert passed.returncode == 0, passed.stderr
    validation = json.loads(passed.stdout)
    assert validation["verdict"] == "pass"
    assert validation["request"]["labels"] == {"team": "a"}
    assert re.search(r"\d s  formed", passed.stderr)
    assert re.search(r"exact/buggy step 0: (\S+) of 4,096 diverged, \1 predicted", passed.stderr)

    without_control = validate("--probe", "exact", "--ordering", "fixed", "--steps", "1")
    assert without_control.returncode == 2, without_control.stdout
    assert "verdict: INCONCLUSIVE" in without_control.stdout

    drilled = validate("--probe", "exact", "--steps", "1", "--drill", "raise_in_collective:1")
    assert drilled.returncode == 3, drilled.stdout
    assert "no verdict: the validation is failed" in drilled.stdout
    assert "world_rank 1" in drilled.stdout

    refused = validate("--steps", "0", "--dp", "-1")
    assert refused.returncode == 3
    assert "mesh.dp = -1: " in refused.stderr
    assert "steps = 0: " in refused.stderr


def test_demo_shows_everything_and_leaves_nothing(home: Path) -> None:
    demo = subprocess.run(gradgate("demo"), env=environment(home), capture_output=True, text=True, timeout=300)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    shown = demo.stdout
    for ordering in ("buggy", "fixed", "own_bucket"):
        _, _, part = shown.partition(f"{ordering}: gradient of the tied weight, probe gpt, step 0")
        titles = ["local, before any sync", "after the DP phase (DP reduce-scatter)", "after the tie (tie all-reduce)"]
        assert all(re.search(re.escape(title) + r"\s+rank +end +shard 0 sum", part) for title in titles)
        assert re.search(r"exact +3 \(1, 1\) +lm_head ", part)
        assert re.search(r"gpt +0 \(0, 0\) +wte ", part)
    assert "verdict: PASS" in shown
    assert f"is stored in {home}/postgres" in shown
    assert find_leftovers(home) == []


def test_kill_9_of_the_owner_ends_it_within_seconds(start_up: StartUp) -> None:
    up = start_up()
    up.wait_until_up()
    up.owner.kill()
    up.owner.wait()
    wait_until_nothing_is_left(up.home)


def test_kill_9_of_owner_and_keeper_is_cleaned_up_by_the_next_start(start_up: StartUp) -> None:
    first = start_up()
    first.wait_until_up()
    state = first.state()
    processes.send_signal(state.children["postgres"], signal.SIGKILL)
    processes.send_signal(state.children["ray"], signal.SIGKILL)
    processes.send_signal(state.keeper, signal.SIGKILL)
    first.owner.kill()
    first.owner.wait()

    second = start_up()
    second.wait_until_up()
    old = [identity for identity in (state.keeper, *state.children.values()) if processes.is_alive(identity)]
    assert old == []
    assert sum("gcs_server" in line for line in find_leftovers(second.home)) == 1
    second.owner.terminate()
    assert second.owner.wait(END_TIMEOUT_S) == 0
    assert find_leftovers(second.home) == []


def test_a_part_that_dies_ends_the_stack_with_its_log(start_up: StartUp) -> None:
    up = start_up()
    up.wait_until_up()
    processes.send_signal(up.state().children["serve"], signal.SIGKILL)
    assert up.owner.wait(END_TIMEOUT_S) == 3
    assert "serve exited with code -9; its log" in up.text()
    assert find_leftovers(up.home) == []


def test_ctrl_c_while_it_starts(start_up: StartUp) -> None:
    up = start_up()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ((up.home / "run").is_dir() and find_leftovers(up.home)) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(up.owner.pid, signal.SIGINT)
    assert up.owner.wait(END_TIMEOUT_S) == 0
    assert find_leftovers(up.home) == []
