"""The exact probe on meshes that no test could rent: every width up to 64, and 4,096 ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from measured import every_trial, runs

from workers.contract import DeviationKind, Mesh, OrderingName, ProbeName, StepReport, TrialSpec, Verdict
from workers.experiment import ExperimentSpec, resolve, trials
from workers.intervals import count
from workers.prediction import BLIND_TO_OWNERS, trial_misowned
from workers.verdict import judge
from workers.virtual import VirtualMesh, VirtualSession, compute_local_step

# Every rank judges every element under all_reduce: seconds for each mesh as wide as these. The other needs num_tokens.
LEFT_OUT = (OrderingName.ALL_REDUCE, *BLIND_TO_OWNERS)
SHARDED = tuple(name for name in OrderingName if name not in LEFT_OUT)


def exact_trials(mesh: Mesh, orderings: tuple[OrderingName, ...] = SHARDED, steps: int = 1) -> list[TrialSpec]:
    spec = ExperimentSpec(mesh=mesh, probes=(ProbeName.EXACT,), orderings=orderings, steps=steps)
    return [trial for trial in trials(resolve(spec), every_trial(mesh, 1)[0].device) if runs(trial)]


def wrong_elements(specs: list[TrialSpec], reports: list[StepReport]) -> Iterator[tuple[TrialSpec, int]]:
    for index, spec in enumerate(specs):
        rows = [row for report in reports if report.trial_index == index for row in report.divergence]
        assert sum(row.owned_elements for row in rows) == 2 * spec.model.vocab_size * spec.model.hidden_size
        yield spec, sum(row.diverged_elements for row in rows)


@pytest.mark.parametrize("widths", [range(2, 17), range(17, 33), range(33, 49), range(49, 65)], ids=str)
def test_every_width_measures_as_predicted(widths: range) -> None:
    for dp in widths:
        specs = exact_trials(Mesh(dp, 2))
        reports = list(VirtualSession().run(specs))
        judgement = judge(specs, reports, is_virtual=True)
        assert judgement.verdict is Verdict.PASS, (dp, judgement.reasons)
        for spec, wrong in wrong_elements(specs, reports):
            assert wrong == 2 * count(trial_misowned(spec)), (dp, spec.ordering)


def test_one_replica_owns_everything() -> None:
    specs = exact_trials(Mesh(1, 2))
    reports = list(VirtualSession().run(specs))
    assert [wrong for _, wrong in wrong_elements(specs, reports)] == [0] * len(specs)
    assert judge(specs, reports, is_virtual=True).verdict is Verdict.INCONCLUSIVE


def test_4096_ranks() -> None:
    specs = exact_trials(Mesh(512, 8))
    # 0650d83 stops by itself here.
    assert [spec.ordering for spec in specs] == [OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET]
    reports = list(VirtualSession().run(specs))
    assert len(reports) == 3 * 4096
    judgement = judge(specs, reports, is_virtual=True)
    assert judgement.verdict is Verdict.PASS, judgement.reasons
    wrong = {spec.ordering: number for spec, number in wrong_elements(specs, reports)}
    assert wrong == {OrderingName.BUGGY: 4096, OrderingName.FIXED: 0, OrderingName.OWN_BUCKET: 0}


def test_one_rank_in_256_that_gave_nothing_is_named() -> None:
    (spec,) = exact_trials(Mesh(64, 4), (OrderingName.OWN_BUCKET,))
    local = compute_local_step(spec, 0)
    mesh = VirtualMesh(spec, 0, local.stages)
    guilty = spec.mesh.world_rank(dp_rank=41, pp_rank=3)
    mesh.tied(guilty).zero_()
    mesh.synchronise()
    judged = mesh.judge(local.replay_CP, local.floor_C)
    told = [
        deviation
        for judgement in judged.values()
        for deviation in judgement.divergence.deviations
        if deviation.kind is DeviationKind.DROPPED
    ]
    assert told
    assert {contributor.world_rank for deviation in told for contributor in deviation.contributors} == {guilty}
    missed = torch.tensor([judgement.divergence.diverged_elements for judgement in judged.values()])
    assert int(missed.sum()) == 2 * int(torch.count_nonzero(mesh.local_CP[41 + 64]))
