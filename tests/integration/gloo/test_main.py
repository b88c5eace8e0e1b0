"""`python -m workers` as people start it: under torchrun, and with the variables set by hand; codes, report, errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 180.0
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "TORCHELASTIC_", "GRADGATE_")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        def refuse(token: str) -> object:
            raise AssertionError(f"{token} is not JSON")

        document: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return document


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | extra


def torchrun(num_ranks: int, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    ended = subprocess.run(
        [*command, "-m", "workers", *arguments],
        env=environment(GRADGATE_NODE_NAME="node-a"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def direct(num_ranks: int, *arguments: str, started: int | None = None) -> list[Ended]:
    """Ranks started by hand, `started` of them (all, by default)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "workers", *arguments],
            env=environment(RANK=str(rank), GRADGATE_NODE_NAME=f"node-{rank}", **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks if started is None else started)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]


def codes(ended: Sequence[Ended]) -> list[int]:
    return [rank.code for rank in ended]


def test_torchrun_prints_one_report_and_passes() -> None:
    ended = torchrun(4, "--dp", "2", "--pp", "2")
    assert ended.code == 0, ended.err
    report = ended.report
    assert (report["verdict"], report["exit_code"], report["error"]) == ("pass", 0, None)
    assert [trial["ok"] for trial in report["trials"]] == [True] * 6
    assert [fingerprint["world_rank"] for fingerprint in report["fingerprint"]] == [0, 1, 2, 3]
    assert {fingerprint["node"] for fingerprint in report["fingerprint"]} == {"node-a"}
    assert "ranks" not in report
    assert "Traceback" not in ended.err
    assert "arning" not in ended.err


def test_torchrun_flattens_inconclusive_but_the_report_keeps_it() -> None:
    ended = torchrun(2, "--dp", "1", "--pp", "2", "--probes", "exact", "--steps", "1", "--ranks")
    assert ended.code == 1
    report = ended.report
    assert (report["verdict"], report["exit_code"]) == ("inconclusive", 2)
    assert "control_not_applicable" in {reason["code"] for reason in report["reasons"]}
    assert {rank["world_rank"] for rank in report["ranks"]} == {0, 1}


def test_direct_ranks_all_exit_with_the_verdict_s_code() -> None:
    ended = direct(2, "--dp", "1", "--pp", "2", "--probes", "exact", "--steps", "1")
    assert codes(ended) == [2, 2], ended
    assert ended[0].report["verdict"] == "inconclusive"
    assert ended[1].out == ""
    assert [rank.err for rank in ended] == ["", ""]


def test_a_rank_that_raises_is_named_with_its_node_and_phase() -> None:
    ended = direct(4, "--probes", "exact", "--drill", "raise_in_collective:1")
    assert codes(ended) == [3, 3, 3, 3], ended
    report = ended[0].report
    assert (report["verdict"], report["exit_code"]) == (None, 3)
    error = report["error"]
    assert (error["code"], error["world_rank"], error["node"], error["phase"]) == (
        "drill_fault",
        1,
        "node-1",
        "dp_sync",
    )
    assert "told to break" in error["message"]
    assert all("Traceback" not in rank.err for rank in ended)
    assert len(ended[0].err.splitlines()) == 1


def test_torchrun_reports_a_rank_that_raises_before_it_kills_the_others() -> None:
    ended = torchrun(4, "--probes", "exact", "--drill", "raise_before_collective:2:1")
    assert ended.code == 1
    error = ended.report["error"]
    assert (error["code"], error["world_rank"], error["node"], error["phase"]) == (
        "drill_fault",
        2,
        "node-a",
        "dp_sync",
    )
    # The only traceback is torchrun's own.
    assert ended.err.count("Traceback") == 1
    assert "ChildFailedError" in ended.err


def test_a_killed_rank_is_missed_by_name_and_nobody_hangs() -> None:
    ended = direct(4, "--probes", "exact", "--drill", "kill_in_collective:3")
    assert codes(ended) == [3, 3, 3, -signal.SIGKILL], ended
    error = ended[0].report["error"]
    assert (error["code"], error["world_rank"]) == ("rank_lost", 3)
    assert "[3] are gone" in error["message"]


def test_torchrun_ends_when_its_first_rank_is_killed() -> None:
    ended = torchrun(2, "--dp", "2", "--pp", "1", "--probes", "exact", "--drill", "kill_before_collective:0")
    assert ended.code != 0
    error = ended.report["error"]
    assert (error["code"], error["world_rank"]) == ("rank_lost", 0)


def test_what_cannot_run_exits_with_3_and_says_why_once() -> None:
    ended = direct(2, "--dp", "1", "--orderings", "buggy", "sideways")
    assert codes(ended) == [3, 3]
    assert "'sideways' is unknown; name one of buggy, fixed" in ended[0].err
    assert len(ended[0].err.splitlines()) == 1
    assert (ended[1].err, ended[0].out, ended[1].out) == ("", "", "")


def test_a_rank_that_never_starts_is_an_error_within_the_limit() -> None:
    ended = direct(2, "--dp", "2", "--pp", "1", "--timeout-s", "3", started=1)
    assert codes(ended) == [3]
    assert "[1]" in ended[0].report["error"]["message"]
