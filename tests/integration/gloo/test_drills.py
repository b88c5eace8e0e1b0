"""Drills on real ranks: a fault that is really there is found, on the ranks that it strikes and on no other."""

from __future__ import annotations

import dataclasses

from gloo_world import rank_run, run_world
from measured import every_trial

from workers.contract import Drill, Mesh, OrderingName, ProbeName, StepReport, TrialSpec, Verdict
from workers.faults import FaultName, is_struck
from workers.verdict import judge

NODES = ("node-a", "node-b", "node-b", "node-a")


def struck(spec: TrialSpec) -> list[int]:
    return [world_rank for world_rank, node in enumerate(NODES) if is_struck(spec, world_rank, node)]


def test_a_drill_bound_to_a_node_strikes_wherever_its_ranks_are() -> None:
    drill = Drill(FaultName.BIT_IN_RECEIVE_BUFFER, step=1, node="node-b")
    specs = [
        dataclasses.replace(spec, drill=drill)
        for spec in every_trial(Mesh(2, 2), 2)
        if spec.ordering is OrderingName.FIXED and spec.probe is ProbeName.EXACT
    ]
    found = run_world(4, rank_run, specs, nodes=NODES)
    reports = [report for of_rank in found for report in of_rank]
    assert all(isinstance(report, StepReport) for report in reports)
    assert judge(specs, reports).verdict is Verdict.FAIL
    for index, spec in enumerate(specs):
        assert struck(spec) == [1, 2]
        wrong = {
            (report.world_rank, report.step)
            for report in reports
            if report.trial_index == index and any(row.diverged_elements for row in report.divergence)
        }
        assert wrong == {(1, 1), (2, 1)}
