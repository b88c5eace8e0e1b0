"""Reports of single ranks become steps and trials, told once and in order."""

from __future__ import annotations

import math
from dataclasses import replace

from service.execution.chronicle import Chronicle, largest
from workers.contract import (
    Device,
    DivergenceRow,
    End,
    OrderingName,
    ProbeName,
    ReplicaRow,
    StepReport,
    TiedRow,
    TrialSpec,
)
from workers.plan import ExperimentSpec, trials

PLAN = trials(ExperimentSpec(probes=(ProbeName.EXACT,), orderings=(OrderingName.BUGGY, OrderingName.FIXED)), Device.CPU)
ROW = DivergenceRow(
    end=End.WTE,
    owned_elements=100,
    diverged_elements=3,
    predicted_elements=4,
    missed_elements=0,
    unexpected_elements=0,
    nonfinite_elements=0,
    first_diverged=None,
    last_diverged=None,
    max_abs_error=0.5,
    relative_l2_error=0.0,
    max_error_over_bound=0.0,
    ratio_to_expected=1.0,
    reference_max_abs_error=None,
    reference_exceeded_elements=0,
    min_detectable_share=0.0,
    sum=0.0,
    l2=0.0,
    digest="d",
)


def report(
    trial_index: int, step: int, world_rank: int, *, error: float = 0.5, tied: float | None = None
) -> StepReport:
    trial: TrialSpec = PLAN[trial_index]
    return StepReport(
        trial_index=trial_index,
        probe=trial.probe,
        ordering=trial.ordering,
        repeat=0,
        step=step,
        world_rank=world_rank,
        dp_rank=world_rank % 2,
        pp_rank=world_rank // 2,
        tp_rank=0,
        divergence=(replace(ROW, max_abs_error=error),),
        trace=(),
        tied=None if tied is None else TiedRow(1, 0, tied, 0, 0.0, 0),
        replica=ReplicaRow("a", "b"),
        loss=None,
        seconds={"tie": 0.25, "dp_sync": 0.5 + world_rank},
    )


def test_a_step_is_told_when_its_last_rank_reports() -> None:
    chronicle = Chronicle(PLAN)
    assert chronicle.hear([report(0, 0, r) for r in range(3)]) == []
    [(kind, data)] = chronicle.hear([report(0, 0, 3, error=2.0, tied=1.5)])
    assert kind == "step"
    assert (data["probe"], data["ordering"], data["trial_index"], data["step"]) == ("exact", "buggy", 0, 0)
    assert (data["diverged_elements"], data["predicted_elements"], data["compared_elements"]) == (12, 16, 400)
    assert (data["max_abs_error"], data["tied_max_abs"], data["seconds"]) == (2.0, 1.5, 3.75)


def test_a_trial_ends_with_its_last_step_and_the_next_begins() -> None:
    chronicle = Chronicle(PLAN)
    entries = chronicle.open() + chronicle.hear(report(t, s, r) for t in (0, 1) for s in (0, 1) for r in range(4))
    kinds = [kind for kind, _ in entries]
    per_trial = ["trial_started", "step", "step", "trial_finished"]
    assert kinds == per_trial * 2
    assert [data["ordering"] for _, data in entries] == ["buggy"] * 4 + ["fixed"] * 4
    assert entries[3][1]["diverged_elements"] == 24


def test_a_rank_that_is_a_step_ahead_does_not_mix_steps() -> None:
    chronicle = Chronicle(PLAN)
    ahead = chronicle.hear([report(0, 0, 0), report(0, 1, 0), report(0, 0, 1), report(0, 0, 2), report(0, 0, 3)])
    assert [data["step"] for _, data in ahead] == [0]


def test_time_by_phase_is_the_mean_over_ranks() -> None:
    chronicle = Chronicle(PLAN)
    chronicle.hear(report(0, step, r) for step in (0, 1) for r in range(4))
    assert chronicle.seconds_by_phase() == {"dp_sync": 4.0, "tie": 0.5}


def test_a_nan_survives_the_maximum_wherever_it_stands() -> None:
    assert math.isnan(largest([math.nan, 1.0]) or 0)
    assert math.isnan(largest([1.0, math.nan]) or 0)
    assert largest([1.0, None, math.inf]) == math.inf
    assert largest([None]) is None
