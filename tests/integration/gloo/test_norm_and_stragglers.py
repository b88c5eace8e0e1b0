"""Live ranks: one gradient norm on all of them and right; a slow rank is named and its victims are not."""

from __future__ import annotations

import time
from typing import Any

from gloo_world import run_world
from measured import every_trial

from workers.contract import Mesh, OrderingName, ProbeName, Role, StepReport, TrialSpec, Verdict
from workers.orderings import ORDERINGS
from workers.verdict import judge

MESH = Mesh(2, 2)
SLOW_RANK = 2
DELAY_S = 0.3


def run_three_times(session: Any, specs: list[TrialSpec]) -> list[list[StepReport]]:
    """As it should be; with a rank late before its backward; with the tied weight counted on both stages."""
    clean = list(session.run(specs))
    slow, careless = [], []
    for index, spec in enumerate(specs):
        trial = session.trial(spec, index)
        for step in range(spec.steps):
            if session.world_rank == SLOW_RANK:
                trial._pipeline.before_backward(late_once(trial._pipeline))
            slow.append(trial.run_step(step))
    for index, spec in enumerate(specs):
        trial = session.trial(spec, index)
        if session.world_rank >= MESH.dp:
            trial.norm.uncounted = frozenset()
        careless += trial.run()
    return [clean, slow, careless]


def late_once(pipeline: Any) -> Any:
    def act() -> None:
        pipeline.before_backward(None)
        time.sleep(DELAY_S)

    return act


def test_norms_and_slow_ranks() -> None:
    orderings = (OrderingName.BUGGY, OrderingName.FIXED, OrderingName.ALL_REDUCE)
    specs = [spec for spec in every_trial(MESH, 2) if spec.ordering in orderings]
    results = run_world(MESH.world_size, run_three_times, specs)
    clean, slow, careless = ([report for rank in results for report in rank[kind]] for kind in range(3))

    judgement = judge(specs, clean)
    assert judgement.verdict is Verdict.PASS, judgement.reasons
    for trial in judgement.trials:
        assert trial.grad_norm is not None
        assert trial.grad_norm_max_error is not None
        if trial.probe is ProbeName.EXACT:
            # The bug shows in the norm as well; what is right is right to the last bits.
            assert (trial.grad_norm_max_error < 1e-6) == (trial.role is Role.SUBJECT)

    late = judge(specs, slow)
    assert late.verdict is Verdict.PASS, late.reasons
    named = {(observation.code, observation.world_rank) for observation in late.observations}
    assert ("straggler", SLOW_RANK) in named
    # Its victims' steps are as long as its own, and they are not to blame.
    for report in slow:
        if report.world_rank != SLOW_RANK:
            assert sum(report.seconds.values()) >= DELAY_S
    blamed = [one for one in late.observations if one.world_rank != SLOW_RANK]
    assert not [one for one in blamed if "forward_backward in 12 of 12" in one.message], blamed

    doubled = judge(specs, careless)
    assert doubled.verdict is Verdict.FAIL
    found = {(reason.code, reason.message.split(":")[0]) for reason in doubled.reasons}
    wrong = {f"{p.value}/{o.value}" for p in ProbeName for o in orderings if ORDERINGS[o].role is Role.SUBJECT}
    assert found == {("grad_norm_wrong", title) for title in wrong}
