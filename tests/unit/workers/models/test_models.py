"""Both probes through the verbs of `workers.models`."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from workers.contract import TINY, BatchSpec, Dtype, Mesh, ModelSpec, Normalization, OrderingName, ProbeName, TrialSpec
from workers.models import (
    build_stage,
    mean_loss,
    microbatch_loss,
    microbatches,
    parameter_dtype,
    seed_weights,
    stage_example,
)
from workers.parameters import stage_parameters

CPU = torch.device("cpu")
SPEC = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(2, 2), TINY, BatchSpec(1, 2))
ODD = ModelSpec(vocab_size=101, hidden_size=9, num_layers=5, num_heads=3, seq_len=7)
WIDE = ModelSpec(vocab_size=50257, hidden_size=6, num_layers=1, num_heads=2, seq_len=4)
PROBES = tuple(ProbeName)


def all_weights(spec: TrialSpec, step: int = 0) -> dict[str, torch.Tensor]:
    """Every weight of the unsplit model by its global name, the output layer apart."""
    weights = {}
    layer = 0
    for pp_rank in range(spec.mesh.pp):
        stage = build_stage(spec, pp_rank, CPU, step)
        for name, parameter in stage.named_parameters():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(layer + int(parts[2]))
            weights[".".join(parts)] = parameter.detach()
        layer += len(stage.decoder.layers)
    return weights


@pytest.mark.parametrize(("probe", "model", "pp"), list(product(PROBES, (TINY, ODD, WIDE), (1, 2, 3, 4, 7))))
def test_parameters_have_the_names_shapes_and_order_that_layouts_are_computed_from(probe, model, pp):
    spec = replace(SPEC, probe=probe, model=model, mesh=Mesh(1, pp))
    for pp_rank in range(pp):
        built = [(name, tuple(p.shape)) for name, p in build_stage(spec, pp_rank, CPU).named_parameters()]
        expected = [(p.name, p.shape) for p in stage_parameters(probe, model, spec.mesh, pp_rank)]
        assert built == expected


@pytest.mark.parametrize("probe", PROBES)
def test_weights_do_not_depend_on_how_layers_are_split(probe):
    whole = all_weights(replace(SPEC, probe=probe, mesh=Mesh(1, 1)))
    for pp in (2, 3, 6):
        split = all_weights(replace(SPEC, probe=probe, mesh=Mesh(4, pp)))
        output = split.pop("output_layer.weight")
        assert torch.equal(output, whole["embedding.word_embeddings.weight"])
        assert split.keys() == whole.keys()
        assert all(torch.equal(split[name], whole[name]) for name in whole)


@pytest.mark.parametrize("probe", PROBES)
def test_layers_and_seeds_differ(probe):
    weights = all_weights(replace(SPEC, probe=probe))
    others = all_weights(replace(SPEC, probe=probe, seed=1))
    for name in ("embedding.word_embeddings.weight", *[n for n in weights if n.endswith(("a.weight", "fc1.weight"))]):
        assert not torch.equal(weights[name], others[name])
    matrices = [weights[name] for name in weights if name.endswith(("a.weight", "linear_fc1.weight"))]
    assert len(matrices) == SPEC.model.num_layers
    assert all(not torch.equal(matrices[0], other) for other in matrices[1:])


def test_exact_weights_are_written_anew_for_each_step_and_in_place():
    spec = replace(SPEC, probe=ProbeName.EXACT)
    stage = build_stage(spec, 0, CPU)
    storage = stage.embedding.word_embeddings.weight.data_ptr()
    seed_weights(stage, spec, 0, step=3)
    assert stage.embedding.word_embeddings.weight.data_ptr() == storage
    fresh = build_stage(spec, 0, CPU, step=3)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, stage.get_parameter(name))
    first = build_stage(spec, 0, CPU).embedding.word_embeddings.weight
    assert not torch.equal(first, fresh.embedding.word_embeddings.weight)


@pytest.mark.parametrize("probe", PROBES)
def test_data_follows_from_seed_step_and_dp_rank(probe):
    spec = replace(SPEC, probe=probe, batch=BatchSpec(3, 2))
    tokens, targets = microbatches(spec, 1, 1, CPU)
    assert tokens.shape == targets.shape == (6, TINY.seq_len)
    assert tokens.dtype == targets.dtype == torch.int64
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < TINY.vocab_size
    again = microbatches(spec, 1, 1, CPU)
    assert torch.equal(tokens, again[0])
    assert torch.equal(targets, again[1])
    assert not torch.equal(tokens, targets)
    for step, dp_rank, seed in ((0, 1, 0), (1, 0, 0), (1, 1, 1)):
        assert not torch.equal(tokens, microbatches(replace(spec, seed=seed), step, dp_rank, CPU)[0])


def test_gpt_targets_are_the_next_tokens():
    tokens, targets = microbatches(SPEC, 0, 0, CPU)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize(("probe", "dtype", "pp"), list(product(PROBES, Dtype, (1, 2, 3))))
def test_examples_describe_what_stages_take_and_give(probe, dtype, pp):
    spec = replace(SPEC, probe=probe, dtype=dtype, mesh=Mesh(2, pp), batch=BatchSpec(2, 3))
    x, targets = (batch[: spec.batch.micro_batch_size] for batch in microbatches(spec, 0, 0, CPU))
    for pp_rank in range(pp):
        taken, given = stage_example(spec, pp_rank)
        assert (taken.shape, taken.dtype) == (x.shape, x.dtype)
        x = build_stage(spec, pp_rank, CPU)(x)
        assert (given.shape, given.dtype, given.stride()) == (x.shape, x.dtype, x.stride())
        assert given.requires_grad
    assert x.shape == (2, TINY.seq_len, TINY.vocab_size)
    assert microbatch_loss(spec)(x, targets).shape == ()


def test_the_exact_probe_is_float32_whatever_is_asked():
    assert parameter_dtype(replace(SPEC, dtype=Dtype.BFLOAT16)) is torch.bfloat16
    assert parameter_dtype(replace(SPEC, probe=ProbeName.EXACT, dtype=Dtype.BFLOAT16)) is torch.float32


def test_mean_loss_is_the_mean_over_microbatches():
    losses = [torch.tensor(3.0), torch.tensor(5.0)]
    targets = torch.tensor([[3, -100], [5, 7]])
    assert mean_loss(replace(SPEC, probe=ProbeName.EXACT), losses, targets) == 4.0
    # gpt's losses are already divided by their number, so that gradients are means.
    assert mean_loss(SPEC, losses, targets) == 8.0
    by_tokens = replace(SPEC, normalization=Normalization.NUM_TOKENS)
    assert mean_loss(by_tokens, [torch.tensor(6.0), torch.tensor(3.0)], targets) == 3.0
