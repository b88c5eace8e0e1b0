"""A slice of tests/bench/false_alarms.py: no clean run alarms, and one that is not clean would."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from bench.false_alarms import Case, alarms_of, matrix, run_cases

from workers.contract import StepReport
from workers.virtual import VirtualSession

CASES_A_MESH = 20


def some(world: str, num_cases: int) -> list[Case]:
    return list(islice(matrix([world]), num_cases))


def test_no_clean_run_on_virtual_ranks_alarms() -> None:
    ran: list[int] = []
    assert run_cases(some("virtual", 2 * CASES_A_MESH), lambda _, alarms: ran.append(alarms)) == []
    assert ran == [0] * 2 * CASES_A_MESH


def test_no_clean_run_on_live_ranks_alarms() -> None:
    ran: list[int] = []
    assert run_cases(some("live", CASES_A_MESH), lambda _, alarms: ran.append(alarms)) == []
    assert ran == [0] * CASES_A_MESH


def test_the_matrix_is_as_large_as_it_says() -> None:
    for world in ("live", "virtual"):
        cases = list(matrix([world]))
        assert len({case.key for case in cases}) == len(cases) == 1000
        # The exact probe has one dtype: no two cases may be the same run.
        assert len({case.trials() for case in cases}) == 1000


def test_one_wrong_element_would_have_alarmed() -> None:
    case = some("virtual", 1)[0]
    specs = case.trials()
    reports = list(VirtualSession().run(specs))
    assert alarms_of(specs, reports) == []
    spoiled = [spoil(report) if report.trial_index == 1 and report.world_rank == 3 else report for report in reports]
    assert [reason.code for reason in alarms_of(specs, spoiled)] == ["subject_diverged"]


def spoil(report: StepReport) -> StepReport:
    (row,) = report.divergence
    return replace(report, divergence=(replace(row, diverged_elements=1, unexpected_elements=1),))
