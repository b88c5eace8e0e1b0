"""The live pipeline on real gloo ranks against the single-process replay: equal to the last bit."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from workers.contract import ProbeName
from workers.reference import exact_tied_gradients, replay_tied_gradients

REPOSITORY = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("pipeline_rank.py")
WORLD_SIZE = 4
CPU = torch.device("cpu")


def load_script():
    spec = spec_from_file_location("pipeline_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = load_script().CASES


def describe(index: int) -> str:
    spec = CASES[index]
    mesh = spec.mesh
    shape = f"dp{mesh.dp}-pp{mesh.pp}-vpp{mesh.vpp}"
    return f"{spec.probe}-{spec.dtype}-{shape}-{spec.schedule}-layers{spec.model.num_layers}"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each world rank saved: {case: [step]}."""
    folder = tmp_path_factory.mktemp("pipeline")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(world_rank), str(WORLD_SIZE), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for world_rank in range(WORLD_SIZE)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    return [torch.load(folder / f"rank{world_rank}.pt") for world_rank in range(WORLD_SIZE)]


@pytest.fixture(autouse=True)
def one_thread():
    """The ranks use one thread; how a sum is split over threads may change its bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def live_ends(ranks, index: int, dp_rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    mesh = CASES[index].mesh
    first = ranks[mesh.world_rank(dp_rank, 0)][index][step]["gradient"]
    last = ranks[mesh.world_rank(dp_rank, mesh.pp - 1)][index][step]["gradient"]
    return first, None if mesh.pp == 1 else last


@pytest.mark.parametrize("index", range(len(CASES)), ids=describe)
def test_local_gradients_equal_the_replay_bit_for_bit(ranks, index):
    spec = CASES[index]
    for dp_rank in range(spec.mesh.dp):
        num_steps = len(ranks[dp_rank][index])
        for step in range(num_steps):
            live = live_ends(ranks, index, dp_rank, step)
            replay = replay_tied_gradients(spec, step, dp_rank, CPU)
            assert torch.equal(live[0], replay.wte_P)
            assert live[0].abs().max() > 0
            if replay.lm_head_P is None:
                assert live[1] is None
            else:
                assert live[1] is not None
                assert torch.equal(live[1], replay.lm_head_P)
                assert live[1].abs().max() > 0


@pytest.mark.parametrize(
    "index", [index for index, spec in enumerate(CASES) if spec.probe is ProbeName.EXACT], ids=describe
)
def test_exact_gradients_equal_the_integer_answer_in_every_step(ranks, index):
    spec = CASES[index]
    for dp_rank in range(spec.mesh.dp):
        for step in range(len(ranks[dp_rank][index])):
            for live, expected in zip(
                live_ends(ranks, index, dp_rank, step), exact_tied_gradients(spec, step, dp_rank), strict=True
            ):
                assert (live is None) == (expected is None)
                if live is not None:
                    assert torch.equal(live.double(), expected.double())


@pytest.mark.parametrize("index", range(len(CASES)), ids=describe)
def test_only_the_last_stage_has_a_loss_and_no_gradient_is_left_on_a_parameter(ranks, index):
    mesh = CASES[index].mesh
    for world_rank in range(mesh.world_size):
        is_last = mesh.coordinates(world_rank).pp_rank == mesh.pp - 1
        for result in ranks[world_rank][index]:
            assert (result["loss"] is not None) == is_last
            assert result["leftover"] == []


def test_gpt_starts_at_the_loss_of_a_uniform_guess(ranks):
    for index, spec in enumerate(CASES):
        if spec.probe is ProbeName.GPT:
            last = ranks[spec.mesh.world_rank(0, spec.mesh.pp - 1)][index][0]["loss"]
            assert last == pytest.approx(torch.tensor(float(spec.model.vocab_size)).log().item(), rel=0.02)
