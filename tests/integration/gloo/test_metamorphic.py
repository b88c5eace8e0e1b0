"""What must not matter does not, on real gloo ranks; tests/unit/workers/test_metamorphic.py has many more cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from cut_batches import shared_out, trial, unsigned, whole_answer
from gloo_world import run_trials, run_world
from torch import Tensor

from workers import step
from workers.contract import BatchSpec, Mesh, OrderingName, ProbeName, TrialSpec
from workers.intervals import Intervals

CUTS = [
    (Mesh(4, 1), BatchSpec(2, 3)),
    (Mesh(2, 2), BatchSpec(1, 12)),
    (Mesh(2, 2), BatchSpec(4, 3)),
    (Mesh(1, 4), BatchSpec(3, 8)),
]
BUCKET_SIZES = (None, 1, 100, 700, 10**6)
CLEAN = (OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE)

Parts = list[tuple[Intervals, Tensor]]
"""For each trial what one rank owns of the tied weight after the sync; nothing between the ends."""


def test_the_exact_gradient_is_the_same_however_four_ranks_share_the_batch() -> None:
    specs = [trial(ProbeName.EXACT, cut, ordering) for cut in CUTS for ordering in (*CLEAN, OrderingName.FIXED)]
    assert_whole_answer(specs, run_world(4, synced_parts, specs))


def test_the_exact_gradient_is_the_same_with_any_bucket_size() -> None:
    """`fixed` is not clean with overlap."""
    plain = [trial(ProbeName.EXACT, CUTS[2], ordering) for ordering in CLEAN]
    specs = [replace(spec, overlap=True, bucket_size=size) for spec in plain for size in BUCKET_SIZES]
    assert_whole_answer(specs, run_world(4, synced_parts, specs))


def test_repeats_give_the_same_bits() -> None:
    spec = trial(ProbeName.GPT, (Mesh(2, 2), BatchSpec(1, 2)), OrderingName.OWN_BUCKET)
    specs = [replace(spec, repeat=repeat, steps=2) for repeat in range(3)]
    for reports in run_trials(specs):
        digests = {
            (report.step, row.digest, report.replica.weights_digest) for report in reports for row in report.divergence
        }
        assert len(reports) == 3 * 2
        assert len(digests) == 2


def assert_whole_answer(specs: Sequence[TrialSpec], by_rank: Sequence[Parts]) -> None:
    for index, spec in enumerate(specs):
        ends = range(2 if spec.mesh.pp > 1 else 1)
        for end in ends:
            ranks = [spec.mesh.world_rank(dp_rank, end * (spec.mesh.pp - 1)) for dp_rank in range(spec.mesh.dp)]
            whole_P = torch.full_like(whole_answer(), -(2**40))
            for rank in ranks:
                intervals, values_n = by_rank[rank][index]
                integers = unsigned(spec, values_n)
                for part in intervals:
                    size = part.stop - part.start
                    whole_P[part.start : part.stop], integers = integers[:size], integers[size:]
            assert torch.equal(whole_P, whole_answer()), (spec, end)


def synced_parts(session: Any, specs: Sequence[TrialSpec]) -> Parts:
    """On one rank: every trial's step on its part of the global batch."""
    step.microbatches = shared_out()  # type: ignore[assignment]
    return [synced_part(session.trial(spec), spec, session.world_rank) for spec in specs]


def synced_part(rank: Any, spec: TrialSpec, world_rank: int) -> tuple[Intervals, Tensor]:
    rank.run_bare_step(0)
    expectation = rank._expectation
    if world_rank not in expectation.members:
        return (), torch.empty(0)
    owned = expectation.owned[expectation.members.index(world_rank)]
    grad_P = rank._stack.grad(rank._tied)
    return owned, torch.cat([grad_P[part.start : part.stop] for part in owned]) if owned else grad_P[:0].clone()
