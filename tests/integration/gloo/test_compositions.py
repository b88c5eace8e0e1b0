"""Features put together on real gloo ranks, both probes under every ordering: measured is what prediction says.

Meshes of one size share their ranks, so that a launch serves many compositions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from gloo_world import run_trials
from measured import assert_as_predicted, every_trial, runs

from workers.contract import Dtype, Mesh, ModelSpec, Normalization, Schedule, Verdict
from workers.verdict import judge

BF16 = Dtype.BFLOAT16
DEEP = ModelSpec(vocab_size=24, hidden_size=12, num_layers=6, num_heads=3, seq_len=8)
"""As many tokens a step as ids at pp=3, so that the exact probe touches every element."""


@dataclass(frozen=True)
class Composition:
    mesh: Mesh
    changes: Mapping[str, object] = field(default_factory=dict)
    verdict: Verdict = Verdict.PASS


COMPOSITIONS: dict[int, list[Composition]] = {
    2: [
        # Means of means show without a pipeline, too.
        Composition(Mesh(2, 1), {"normalization": Normalization.NUM_TOKENS}),
        Composition(Mesh(1, 2), {"normalization": Normalization.NUM_TOKENS}, Verdict.INCONCLUSIVE),
        Composition(Mesh(1, 2, vpp=2), verdict=Verdict.INCONCLUSIVE),
        Composition(Mesh(2, 1), {"schedule": Schedule.GPIPE}, Verdict.INCONCLUSIVE),
        Composition(Mesh(2, 1), {"overlap": True, "bucket_size": 3000}, Verdict.INCONCLUSIVE),
        Composition(Mesh(1, 2), {"overlap": True, "bucket_size": 3000}, Verdict.INCONCLUSIVE),
    ],
    4: [
        Composition(Mesh(2, 2, vpp=2)),
        Composition(Mesh(2, 2), {"schedule": Schedule.GPIPE}),
        Composition(Mesh(2, 2), {"overlap": True}),
        Composition(Mesh(2, 2), {"overlap": True, "bucket_size": 500}),
        Composition(Mesh(2, 2, vpp=2), {"overlap": True, "bucket_size": 3000}),
        Composition(Mesh(2, 2), {"normalization": Normalization.NUM_TOKENS}),
        Composition(Mesh(2, 2), {"normalization": Normalization.NUM_TOKENS, "overlap": True, "bucket_size": 500}),
        Composition(Mesh(2, 2), {"average_in_collective": True, "overlap": True, "bucket_size": 500}),
        Composition(Mesh(2, 2), {"grad_reduce_dtype": BF16}),
        Composition(Mesh(2, 2), {"grad_reduce_dtype": BF16, "dtype": BF16, "overlap": True, "bucket_size": 500}),
        Composition(Mesh(2, 1, 2)),
        Composition(Mesh(2, 1, 2), {"grad_reduce_dtype": BF16, "dtype": BF16}),
        # Without dp nothing of the tied weight can be wrong, and layernorms still can; 31 ids are padded to 32.
        Composition(Mesh(1, 2, 2), {"model": replace(DEEP, vocab_size=31, num_heads=2)}),
    ],
    6: [
        Composition(Mesh(3, 2, vpp=2)),
        Composition(Mesh(2, 3, vpp=2), {"model": DEEP}),
        Composition(Mesh(2, 3), {"schedule": Schedule.GPIPE}),
        Composition(Mesh(3, 2), {"overlap": True, "bucket_size": 3000}),
        Composition(Mesh(2, 3), {"overlap": True, "bucket_size": 1}),
        Composition(Mesh(3, 2), {"average_in_collective": True}),
        Composition(Mesh(3, 2), {"grad_reduce_dtype": BF16, "average_in_collective": True}),
        Composition(Mesh(3, 2), {"normalization": Normalization.NUM_TOKENS}),
    ],
    8: [
        Composition(Mesh(4, 2), {"grad_reduce_dtype": BF16, "dtype": BF16}),
        Composition(Mesh(2, 2, 2)),
        Composition(Mesh(2, 2, 2), {"grad_reduce_dtype": BF16, "overlap": True, "bucket_size": 500}),
        Composition(Mesh(2, 2, 2, vpp=2), {"overlap": True, "bucket_size": 1000}),
        Composition(Mesh(2, 2, 2), {"normalization": Normalization.NUM_TOKENS}),
    ],
}


@pytest.mark.parametrize("world_size", COMPOSITIONS)
def test_every_composition_measures_as_predicted(world_size: int) -> None:
    steps = 2
    compositions = COMPOSITIONS[world_size]
    planned = [[spec for spec in every_trial(each.mesh, steps, **each.changes) if runs(spec)] for each in compositions]
    reports = run_trials([spec for specs in planned for spec in specs])
    first = 0
    for composition, specs in zip(compositions, planned, strict=True):
        assert len(specs) >= 8, composition
        own = [
            [
                replace(report, trial_index=report.trial_index - first)
                for report in ranks
                if first <= report.trial_index < first + len(specs)
            ]
            for ranks in reports
        ]
        for index, spec in enumerate(specs):
            assert_as_predicted(spec, own, index, steps)
        judgement = judge(specs, [report for ranks in own for report in ranks])
        assert judgement.verdict is composition.verdict, (composition, judgement.reasons)
        first += len(specs)
