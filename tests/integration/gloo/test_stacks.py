"""Stacks from outside the package on real ranks: right ones pass, and each wrong one is caught and named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gloo_world import rank_run, run_trials, run_world
from workers.contract import (
    BatchSpec,
    Device,
    Dtype,
    Judgement,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    RankFailure,
    RankPhase,
    StackOrigin,
    StepReport,
    TrialSpec,
    Verdict,
)
from workers.experiment import ExperimentSpec, trials
from workers.session import first_cause
from workers.verdict import judge

MODEL = ModelSpec(vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, seq_len=8)
EXPERIMENT = ExperimentSpec(
    mesh=Mesh(2, 2), model=MODEL, batch=BatchSpec(1, 2), orderings=(OrderingName.BUGGY,), steps=2
)
EXACT = (ProbeName.EXACT,)


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "stacks_of_others"))


def plan(stack: str, **changes: object) -> tuple[TrialSpec, ...]:
    return trials(replace(EXPERIMENT, stack=stack, **changes), Device.CPU)  # type: ignore[arg-type]


def judged(specs: Sequence[TrialSpec]) -> tuple[Judgement, list[StepReport]]:
    reports = [report for of_rank in run_trials(specs) for report in of_rank]
    return judge(specs, reports), reports


@pytest.mark.parametrize("stack", ["acme", "acme-sharded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mesh": Mesh(3, 1)},
        {"mesh": Mesh(2, 2, vpp=2), "model": replace(MODEL, num_layers=4)},
        {"normalization": Normalization.NUM_TOKENS},
        {"dtype": Dtype.BFLOAT16, "probes": (ProbeName.GPT,)},
    ],
    ids=["dp2-pp2", "dp3-pp1", "interleaved", "tokens", "bfloat16"],
)
def test_a_right_stack_is_clean(stack: str, changes: dict[str, object]) -> None:
    judgement, reports = judged(plan(stack, **changes))
    of_stack = [trial for trial in judgement.trials if trial.ordering == "stack"]
    assert all(trial.ok and trial.compared_elements for trial in of_stack), judgement.reasons
    # With one stage no control can be exercised; then nothing is proven, though nothing is wrong.
    expected = Verdict.INCONCLUSIVE if "mesh" in changes and changes["mesh"] == Mesh(3, 1) else Verdict.PASS
    assert judgement.verdict is expected, judgement.reasons
    origins = {report.stack.origin for report in reports if report.stack}
    target = {"acme": "acme_stack.ddp:PlainDdp", "acme-sharded": "acme_stack.sharded:ShardedDdp"}[stack]
    assert origins == {StackOrigin(stack, target, "acme-stack", "1.2")}
    assert sum(report.stack is not None for report in reports) == len(reports) // 2


WRONG = {
    "tie-doubled": ({"subject_diverged"}, "2 times what they should be"),
    "tie-skipped": ({"subject_diverged", "ends_differ"}, "share of each of world_ranks"),
    "parameter-forgotten": ({"stack_gradient_wrong"}, "layers."),
    "stale-gradients": ({"subject_diverged", "stack_gradient_wrong"}, "step 1"),
    "wrong-group": ({"subject_diverged"}, "is missing from"),
    "divided-twice": ({"subject_diverged", "stack_gradient_wrong"}, "0.5 times"),
    "claims-twice": ({"stack_ownership_overlap"}, "dp ranks [0, 1] all claim"),
    "claims-too-little": ({"stack_ownership_gap"}, "1 of"),
    "steps-too-far": ({"stack_update_wrong"}, "the weight before less its gradient"),
    "weights-drift": ({"replicas_disagree", "stack_weights_differ", "stack_update_wrong"}, "world_rank"),
}


@pytest.mark.parametrize("stack", WRONG)
def test_a_wrong_stack_fails_by_name(stack: str) -> None:
    codes, words = WRONG[stack]
    judgement, _ = judged(plan(stack, probes=EXACT))
    assert judgement.verdict is Verdict.FAIL
    of_stack = [reason for reason in judgement.reasons if f"exact/stack {stack}: " in reason.message]
    assert codes <= {reason.code for reason in of_stack}, judgement.reasons
    assert any(words in reason.message for reason in of_stack), judgement.reasons
    # The control, on the reference, is not touched by it.
    assert [trial.ok for trial in judgement.trials] == [True, False]


@pytest.mark.parametrize("stack", [name for name in WRONG if name != "steps-too-far"])
def test_rounding_hides_no_wrong_stack(stack: str) -> None:
    judgement, _ = judged(plan(stack, probes=(ProbeName.GPT,)))
    assert judgement.verdict is Verdict.FAIL, judgement.reasons
    assert any(f"gpt/stack {stack}: " in reason.message for reason in judgement.reasons)


BROKEN = {
    "rescales-weights": ("stack_failed", "changed weights in its factory"),
    "replaces-parameters": ("stack_failed", "put other parameters into the modules in its factory"),
    "raises": ("stack_failed", "raised in finalize: ValueError: bucket 3 is full"),
    "no-stack": ("stack_failed", "without zero_grad, finalize"),
    "short-gradient": ("stack_failed", "`grad` gives all"),
    "missing-module": ("stack_failed", "No module named 'acme_absent'"),
    "nobodys": ("unknown_stack", "there is reference, acme"),
}


@pytest.mark.parametrize("stack", BROKEN)
def test_a_broken_stack_is_an_error_that_names_it(stack: str) -> None:
    code, words = BROKEN[stack]
    items = run_world(4, rank_run, [plan(stack, probes=EXACT)[-1]])
    cause = first_cause([item for of_rank in items for item in of_rank if isinstance(item, RankFailure)])
    assert cause is not None
    assert (cause.code, cause.collateral) == (code, False)
    assert f"stack {stack!r}" in cause.message
    assert words in cause.message
    assert cause.world_rank == (1 if stack == "raises" else 0)
    assert cause.phase is (RankPhase.DP_SYNC if stack == "raises" else cause.phase)
    if stack not in ("nobodys", "missing-module"):
        assert "acme-stack 1.2" in cause.message


def test_the_readmes_stack_works_as_it_is_printed(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    section = (root / "README.md").read_text().split("## Your own stack", 1)[1]
    code, commands = re.findall(r"```(?:python|sh)\n(.*?)```", section, re.DOTALL)[:2]
    (tmp_path / "acme_stack.py").write_text(code)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone"
    commands = commands.replace("PYTHONPATH=$PWD", f"PYTHONPATH={root}:$PWD").replace("torchrun", torchrun)
    ended = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith(("GRADGATE_", "RANK", "WORLD"))},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["verdict"]) == (0, "pass"), report["reasons"]
    assert [trial["ordering"] for trial in report["trials"]].count("stack") == 2
    origin = {"name": "acme", "target": "acme_stack:AcmeStack", "distribution": None, "version": None}
    assert [rank["stack"] for rank in report["fingerprint"]] == [origin] * 4
