"""Why there are three judges: for each of them a fault on real ranks that it alone sees.

`sync` holds sums against what the ranks gave, `reference` holds what they gave against a single process, `replicas`
holds ranks against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from gloo_world import rank_run, run_world

from workers.contract import Device, Drill, Judgement, JudgeName, Mesh, ProbeName, StepReport, Verdict
from workers.experiment import ExperimentSpec, trials
from workers.faults import FaultName
from workers.verdict import judge


def judged(mesh: Mesh, steps: int, drill: Drill, nodes: Sequence[str]) -> Judgement:
    """The gpt probe under the default orderings; the drill really struck, and nothing was left undone."""
    specs = trials(ExperimentSpec(mesh=mesh, probes=(ProbeName.GPT,), steps=steps, drill=drill), Device.CPU)
    reports = [report for items in run_world(mesh.world_size, rank_run, specs, nodes=nodes) for report in items]
    assert all(isinstance(report, StepReport) for report in reports), reports
    assert any(report.drill_struck for report in reports)
    return judge(specs, reports)


def who_saw(judgement: Judgement) -> set[JudgeName]:
    return {reason.judge for reason in judgement.reasons if reason.judge is not None}


def test_only_sync_sees_a_sum_that_goes_wrong_once_training_has_begun() -> None:
    """Later weights depend on the run itself, so that no single process knows them; replicas gather one owner's."""
    judgement = judged(Mesh(2, 2), 2, Drill(FaultName.BIT_IN_RECEIVE_BUFFER, 1, step=1), ["only"] * 4)
    assert judgement.verdict is Verdict.FAIL
    assert who_saw(judgement) == {JudgeName.SYNC}, judgement.reasons


def test_only_the_reference_sees_what_all_ranks_get_wrong_alike() -> None:
    """Every sum is that of what was given, and all agree; the norm is held against the same single-process run."""
    judgement = judged(Mesh(3, 2), 1, Drill(FaultName.MICROBATCH_LOST, node="every"), ["every"] * 6)
    assert judgement.verdict is Verdict.FAIL
    assert who_saw(judgement) - {JudgeName.NORM} == {JudgeName.REFERENCE}, judgement.reasons


def test_only_replicas_see_a_weight_that_goes_wrong_after_the_update() -> None:
    """No gradient was wrong, and the run ends before one could be."""
    judgement = judged(Mesh(2, 2), 1, Drill(FaultName.BIT_IN_WEIGHT, 1), ["only"] * 4)
    assert judgement.verdict is Verdict.FAIL
    assert who_saw(judgement) == {JudgeName.REPLICAS}, judgement.reasons
