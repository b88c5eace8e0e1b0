"""What `gradgate selftest` reads and prints."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from service.options import UsageFault
from service.proving import plain_finding, print_finding, print_summary, read_faults, read_mesh, read_world_ranks
from workers.contract import JudgeName, Mesh, RankPhase
from workers.faults import FaultName, Outcome
from workers.selftest import Attribution, Finding

NAMED = Attribution((JudgeName.EXACT, JudgeName.SYNC), 3, "node-1", None, RankPhase.DP_SYNC)
CAUGHT = Finding("stale_view", 3, "fail", NAMED, Outcome.FAIL, NAMED, ())


def printed(finding: Finding) -> str:
    stream = io.StringIO()
    print_finding(finding, Console(file=stream, width=80))
    return stream.getvalue()


def test_choices_are_read_and_mistakes_are_told() -> None:
    assert read_mesh("3x2") == Mesh(3, 2)
    assert read_mesh("1x2x4") == Mesh(1, 2, 4)
    assert read_faults(None) == list(FaultName)
    assert read_faults("tf32,slow") == [FaultName.TF32, FaultName.SLOW]
    assert read_world_ranks(None, Mesh(2, 2)) == [0, 1, 2, 3]
    assert read_world_ranks("3,0", Mesh(2, 2)) == [3, 0]
    for read in (lambda: read_mesh("2"), lambda: read_faults("rust"), lambda: read_world_ranks("4", Mesh(2, 2))):
        with pytest.raises(UsageFault, match="--"):
            read()


def test_a_caught_fault_is_one_line_and_a_missed_one_says_what_is_missing() -> None:
    line = printed(CAUGHT)
    assert line.split() == [
        "stale_view",
        "3",
        "caught",
        "exact,",
        "sync",
        "3",
        "node-1",
        "dp_sync",
        "3",
        "node-1",
        "dp_sync",
    ]
    missed = replace(CAUGHT, outcome="pass", found=Attribution((), None, None, None, None), mismatches=("x is y",))
    assert "MISSED (pass)" in printed(missed)
    assert "nobody" in printed(missed)
    assert "not as expected: x is y" in printed(missed)


def test_the_summary_counts_what_is_not_as_expected_and_what_was_not_there() -> None:
    stream = io.StringIO()
    findings = [CAUGHT, replace(CAUGHT, mismatches=("z",)), replace(CAUGHT, is_exercised=False)]
    print_summary(findings, Console(file=stream, width=120))
    assert stream.getvalue() == "1 of 2 exercises are as expected; 1 have nothing to strike on their rank.\n"


def test_a_finding_in_json_says_whether_it_is_as_expected() -> None:
    document = plain_finding(CAUGHT)
    assert (document["title"], document["ok"], document["found"]["phase"]) == ("stale_view", True, "dp_sync")
