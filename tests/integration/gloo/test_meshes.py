"""Both probes under all five orderings on real gloo ranks, on every small mesh: measured is what prediction says."""

from __future__ import annotations

import dataclasses

import pytest
from gloo_world import run_trials
from measured import assert_as_predicted, every_trial, rows, runs

from workers.contract import BatchSpec, Dtype, Mesh, ModelSpec, OrderingName, ProbeName, Role, Verdict
from workers.orderings import ORDERINGS
from workers.verdict import judge

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (8, 2), (4, 4)]


@pytest.mark.parametrize(("dp", "pp"), MESHES)
def test_every_ordering_measures_as_predicted(dp: int, pp: int) -> None:
    steps = 2 if dp * pp <= 8 else 1
    specs = every_trial(Mesh(dp, pp), steps)
    reports = run_trials(specs)
    for index, spec in enumerate(specs):
        assert_as_predicted(spec, reports, index, steps)
    judgement = judge(specs, [report for rank_reports in reports for report in rank_reports])
    expected = Verdict.PASS if dp > 1 and pp > 1 else Verdict.INCONCLUSIVE
    assert judgement.verdict is expected, judgement.reasons


def test_buggy_gpt_shows_the_seed_s_magnitude_and_own_bucket_its_exactness() -> None:
    specs = every_trial(Mesh(2, 2), 3)
    reports = run_trials(specs)
    tied = {
        spec.ordering: [r.tied for ranks in reports for r in ranks if r.trial_index == index and r.tied is not None]
        for index, spec in enumerate(specs)
        if spec.probe is ProbeName.GPT
    }
    buggy = max(row.max_abs_difference for row in tied[OrderingName.BUGGY])
    assert 5e-3 < buggy < 5e-1
    drift = max(row.weights_max_abs_difference for row in tied[OrderingName.BUGGY])
    assert 1e-3 < drift < 1e-2
    for ordering in (OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE):
        assert max(row.max_abs_difference for row in tied[ordering]) == 0
        assert max(row.weights_max_abs_difference for row in tied[ordering]) == 0


@pytest.mark.parametrize(
    ("dp", "pp", "model"),
    [
        (3, 2, ModelSpec(50257, 6, 2, 3, 8)),
        (4, 2, ModelSpec(2, 2, 1, 1, 4)),
        (8, 2, ModelSpec(1, 4, 1, 2, 3)),
        (2, 3, ModelSpec(7, 3, 3, 1, 5)),
        (2, 4, ModelSpec(11, 10, 4, 5, 2)),
    ],
    ids=["50257x6-dp3", "more-shards-than-elements", "owners-of-nothing", "odd-everywhere", "four-odd-stages"],
)
def test_odd_sizes(dp: int, pp: int, model: ModelSpec) -> None:
    specs = [spec for spec in every_trial(Mesh(dp, pp), 2, model=model, batch=BatchSpec(1, max(2, pp))) if runs(spec)]
    assert len(specs) >= 8
    reports = run_trials(specs)
    for index, spec in enumerate(specs):
        found = [row for _, row in rows(reports, index)]
        assert sum(row.missed_elements + row.unexpected_elements for row in found) == 0, spec
        assert sum(row.reference_exceeded_elements for row in found) == 0, spec
        if ORDERINGS[spec.ordering].role is Role.SUBJECT:
            assert sum(row.diverged_elements for row in found) == 0, spec
    assert judge(specs, [r for ranks in reports for r in ranks]).verdict is not Verdict.FAIL


def test_bfloat16_weights_keep_a_float32_sync() -> None:
    specs = [spec for spec in every_trial(Mesh(2, 2), 1) if spec.probe is ProbeName.GPT]
    specs = [dataclasses.replace(spec, dtype=Dtype.BFLOAT16) for spec in specs]
    judgement = judge(specs, [r for ranks in run_trials(specs) for r in ranks])
    assert judgement.verdict is Verdict.PASS, judgement.reasons
