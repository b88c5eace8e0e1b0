"""A slice of tests/bench/false_alarms.py: no clean run alarms, and one that is not clean would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from bench.false_alarms import COMPOSITIONS, PLAIN, Case, alarms_of, matrix, run_cases

from workers.contract import StepReport
from workers.virtual import VirtualSession

CASES_A_MESH = 20
KINDS = (PLAIN, "composed")


def run_quietly(cases: Iterable[Case]) -> int:
    """The number of cases that ran, none of which alarmed."""
    trials: list[int] = []

    def ran(case: Case, num_trials: int, alarms: object) -> None:
        assert not alarms, (case.key, alarms)
        trials.append(num_trials)

    run_cases(cases, ran)
    assert all(num_trials >= 2 for num_trials in trials)
    return len(trials)


def test_no_clean_run_on_virtual_ranks_alarms() -> None:
    assert run_quietly(islice(matrix(["virtual"]), 2 * CASES_A_MESH)) == 2 * CASES_A_MESH


def test_no_clean_run_on_live_ranks_alarms() -> None:
    assert run_quietly(islice(matrix(["live"]), CASES_A_MESH)) == CASES_A_MESH


def test_no_clean_composition_alarms_on_virtual_ranks() -> None:
    first = [case for case in matrix(["virtual"], ["composed"]) if case.seed == 0]
    assert run_quietly(first) == len(first) == 8 * sum("virtual" in c.worlds for c in COMPOSITIONS.values())


def test_the_matrix_is_as_large_as_it_says() -> None:
    for world in ("live", "virtual"):
        cases = list(matrix([world]))
        assert len({case.key for case in cases}) == len(cases) == 1000
        # The exact probe has one dtype: no two cases may be the same run.
        assert len({case.trials() for case in matrix([world], KINDS)}) == len(list(matrix([world], KINDS)))
        assert [Case.of_key(case.key) for case in cases] == cases


def test_one_wrong_element_would_have_alarmed() -> None:
    specs = next(matrix(["virtual"])).trials()
    reports = list(VirtualSession().run(specs))
    assert alarms_of(specs, reports, is_virtual=True) == []
    spoiled = [spoil(report) if report.trial_index == 1 and report.world_rank == 3 else report for report in reports]
    assert [reason.code for reason in alarms_of(specs, spoiled, is_virtual=True)] == ["subject_diverged"]


def spoil(report: StepReport) -> StepReport:
    (row,) = report.divergence
    return replace(report, divergence=(replace(row, diverged_elements=1, unexpected_elements=1),))
