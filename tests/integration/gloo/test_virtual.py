"""Virtual ranks report what real gloo ranks report, number by number and bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gloo_world import run_trials
from measured import every_trial

from workers.contract import Mesh, ProbeName, StepReport, TiedRow
from workers.virtual import VirtualSession


@pytest.mark.parametrize("mesh", [Mesh(3, 2), Mesh(2, 3), Mesh(2, 1), Mesh(2, 2, vpp=2)], ids=str)
def test_live_and_virtual_ranks_say_the_same(mesh: Mesh) -> None:
    specs = every_trial(mesh, 1)
    live = {(r.trial_index, r.world_rank): r for reports in run_trials(specs) for r in reports}
    virtual = {(r.trial_index, r.world_rank): r for r in VirtualSession().run(specs)}
    assert live.keys() == virtual.keys()
    assert any(report.divergence for report in virtual.values())
    for place, report in virtual.items():
        assert said(report) == said(live[place]), (specs[place[0]], report.world_rank)


def said(report: StepReport) -> str:
    """All of a report but what only a live step has: trace, times, loss, and weights after the optimizer.

    As text, since a NaN makes equal numbers unequal.
    """
    weights = report.replica.initial_weights_digest if report.step == 0 else None
    return repr((report.divergence, tied(report.tied), weights, report.repeat, report.step, report.nonfinite_elements))


def tied(row: TiedRow | None) -> TiedRow | None:
    return row and replace(row, weights_max_abs_difference=0.0, weights_num_elements=0)


def test_exact_steps_after_the_first_agree_too() -> None:
    specs = [spec for spec in every_trial(Mesh(2, 2), 3) if spec.probe is ProbeName.EXACT]
    live = {(r.trial_index, r.step, r.world_rank): said(r) for reports in run_trials(specs) for r in reports}
    virtual = {(r.trial_index, r.step, r.world_rank): said(r) for r in VirtualSession().run(specs)}
    assert len(virtual) == len(specs) * 3 * 4
    assert virtual == live
