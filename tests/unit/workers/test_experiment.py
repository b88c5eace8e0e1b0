from __future__ import annotations

import pytest

from workers.contract import (
    TINY,
    BatchSpec,
    Device,
    Dtype,
    Mesh,
    ModelSpec,
    OrderingName,
    ProbeName,
)
from workers.errors import SpecError
from workers.experiment import ExperimentSpec, resolve, trials

SIZES = ModelSpec(vocab_size=128, hidden_size=12, num_layers=6, num_heads=3, seq_len=8)


def test_the_default_experiment() -> None:
    planned = trials(ExperimentSpec(), Device.CPU)
    assert [(t.probe.value, t.ordering.value) for t in planned] == [
        ("exact", "buggy"),
        ("exact", "fixed"),
        ("exact", "own_bucket"),
        ("gpt", "buggy"),
        ("gpt", "fixed"),
        ("gpt", "own_bucket"),
    ]
    assert all(t.mesh == Mesh(2, 2) and t.steps == 2 and t.device is Device.CPU for t in planned)


def test_repeats_come_first_and_move_the_seed() -> None:
    spec = ExperimentSpec(orderings=(OrderingName.FIXED, OrderingName.BUGGY), repeats=3, seed=10)
    planned = trials(spec, Device.CUDA)
    assert [(t.repeat, t.seed) for t in planned] == [(r, 10 + r) for r in range(3) for _ in range(4)]
    assert [t.ordering for t in planned[:2]] == [OrderingName.FIXED, OrderingName.BUGGY]


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 2), (2, 2), (3, 3), (16, 16)])
def test_the_default_batch_fills_the_pipeline(pp: int, num_microbatches: int) -> None:
    resolved = resolve(ExperimentSpec(mesh=Mesh(2, pp)))
    assert resolved.batch == BatchSpec(1, num_microbatches)
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(("pp", "exact", "gpt"), [(2, 4, 2), (3, 6, 3), (4, 4, 4), (5, 5, 5)])
def test_interleaved_chunks_get_a_multiple_of_pp_microbatches_and_a_layer_each(pp: int, exact: int, gpt: int) -> None:
    spec = resolve(ExperimentSpec(mesh=Mesh(2, pp, vpp=3)))
    by_probe = {trial.probe: trial for trial in trials(spec, Device.CPU)}
    assert by_probe[ProbeName.GPT].batch == BatchSpec(1, gpt)
    assert by_probe[ProbeName.EXACT].batch == BatchSpec(1, exact)
    assert by_probe[ProbeName.EXACT].model.num_layers == 3 * pp


def test_a_batch_that_was_asked_for_is_kept() -> None:
    spec = ExperimentSpec(batch=BatchSpec(3, 7))
    assert resolve(spec) is spec


@pytest.mark.parametrize(("pp", "size"), [(1, 4), (4, 4), (8, 8)])
def test_with_a_named_model_exact_keeps_its_own_sizes(pp: int, size: int) -> None:
    exact, gpt = trials(
        ExperimentSpec(mesh=Mesh(2, pp), batch=BatchSpec(2, 9), orderings=(OrderingName.FIXED,)), Device.CPU
    )
    assert (exact.model, exact.batch) == (ModelSpec(64, 32, size, 4, 16), BatchSpec(1, size))
    assert (gpt.model, gpt.batch) == (TINY, BatchSpec(2, 9))


def test_sizes_apply_to_both_probes() -> None:
    for trial in trials(ExperimentSpec(model=SIZES, batch=BatchSpec(2, 5)), Device.CPU):
        assert (trial.model, trial.batch) == (SIZES, BatchSpec(2, 5))
    assert all(trial.batch == BatchSpec(1, 2) for trial in trials(ExperimentSpec(model=SIZES), Device.CPU))


def test_exact_stays_in_float32() -> None:
    planned = trials(ExperimentSpec(dtype=Dtype.BFLOAT16), Device.CPU)
    assert {(t.probe, t.dtype) for t in planned} == {
        (ProbeName.EXACT, Dtype.FLOAT32),
        (ProbeName.GPT, Dtype.BFLOAT16),
    }


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(SpecError, match="model 'huge' is unknown"):
        trials(ExperimentSpec(model="huge"), Device.CPU)
