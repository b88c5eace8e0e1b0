"""One rank's NaN or infinity, in any parameter and any ordering, ends in `fail` and never in silence."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gloo_world import run_world
from measured import every_trial

from workers.contract import Mesh, StepReport, TrialSpec, Verdict
from workers.verdict import judge

MESH = Mesh(2, 3)


def run_with(session: Any, specs: list[TrialSpec], broken_rank: int, name: str, bad: float) -> list[StepReport]:
    """Run trials; on one rank an element of one parameter's gradient turns bad before it is synchronised."""
    from workers.step import RankTrial

    compute = RankTrial._compute_gradients

    def compute_and_break(trial: Any, step: int) -> float | None:
        loss = compute(trial, step)
        if session.world_rank == broken_rank:
            trial._stack.grad(trial._modules[0].get_parameter(name))[3] = bad
        return loss

    RankTrial._compute_gradients = compute_and_break  # type: ignore[method-assign]
    return list(session.run(specs))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("broken_rank", "name"),
    [(1, "embedding.word_embeddings.weight"), (4, "output_layer.weight"), (2, "decoder.layers.0.")],
    ids=["wte", "lm_head", "inner"],
)
def test_it_is_found_in_every_trial(broken_rank: int, name: str, bad: float) -> None:
    specs = list(every_trial(MESH, 1))
    names = {"exact": "bias", "gpt": "mlp.linear_fc1.weight"}
    judged = 0
    for probe, inner in names.items():
        chosen = [spec for spec in specs if spec.probe.value == probe]
        parameter = name + inner if name.endswith(".") else name
        reports = run_world(MESH.world_size, run_with, chosen, broken_rank, parameter, bad)
        judgement = judge(chosen, [report for of_rank in reports for report in of_rank])
        assert judgement.verdict is Verdict.FAIL
        found = [reason.message for reason in judgement.reasons if reason.code == "non_finite"]
        for spec in chosen:
            assert any(f"{probe}/{spec.ordering.value}" in message for message in found), spec
            judged += 1
    assert judged == len(specs)
