"""The structure that makes the exact probe exact: signs, ranges, who is touched."""

from dataclasses import replace

import pytest
import torch

from workers.contract import TINY, BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.errors import SpecError
from workers.models import build_stage, exact, microbatches
from workers.tensor_parallel import WHOLE, run_flow

CPU = torch.device("cpu")
SPEC = TrialSpec(ProbeName.EXACT, OrderingName.FIXED, Mesh(2, 1), TINY, BatchSpec(1, 4))
ODD = ModelSpec(vocab_size=13, hidden_size=9, num_layers=5, num_heads=3, seq_len=7)


@pytest.mark.parametrize("model", [TINY, ODD], ids=["even", "odd"])
def test_weights_are_what_the_proof_needs(model):
    stage = build_stage(replace(SPEC, model=model), 0, CPU)
    signs = exact.draw_signs(model, 0, 0)
    width_lo, width_hi = exact.split_sizes(model.hidden_size)
    tied = stage.embedding.word_embeddings.weight
    assert set((tied * signs).unique().tolist()) == {1.0, 2.0}
    for layer in stage.decoder.layers:
        a, b = layer.a.weight, layer.b.weight
        assert a.shape == (width_lo, width_lo)
        assert torch.equal(a.abs().sum(0), torch.ones(width_lo))
        assert torch.equal(a.abs().sum(1), torch.ones(width_lo))
        assert torch.equal(a.sum(0), signs[:width_lo].float())
        assert b.shape == (width_hi, width_lo)
        assert torch.equal((b != 0).sum(1), torch.ones(width_hi, dtype=torch.int64))
        assert torch.equal(b.sum(1), signs[width_lo:].float())
        assert set(layer.bias.unique().tolist()) <= {0.0, 1.0}


def test_both_signs_and_both_sides_of_relu_occur():
    """Else a sign flip, or a relu left out, could not be seen."""
    assert set(exact.draw_signs(TINY, 0, 0).tolist()) == {-1, 1}
    stage = build_stage(SPEC, 0, CPU)
    lo = stage.embedding.word_embeddings.weight[:, :16]
    u = lo @ stage.decoder.layers[0].a.weight.T - stage.decoder.layers[0].bias
    assert set(u.unique().tolist()) == {0.0, 1.0, 2.0}


def test_hidden_state_grows_linearly_and_keeps_its_signs():
    model = replace(TINY, num_layers=64)
    spec = replace(SPEC, model=model)
    stage = build_stage(spec, 0, CPU)
    tokens, _ = microbatches(spec, 0, 0, CPU)
    x = stage.embedding.word_embeddings.weight[tokens]
    [out] = run_flow([stage.decoder.flow(x)], WHOLE)
    sized = out * exact.draw_signs(model, 0, 0)
    assert sized.min() >= 1
    assert sized.max() <= 2 + 2 * model.num_layers
    assert torch.equal(out[..., :16], x[..., :16])


@pytest.mark.parametrize("dp_rank", range(5))
def test_by_default_every_id_is_an_input_and_a_target_on_every_dp_rank(dp_rank):
    for batch in microbatches(SPEC, 1, dp_rank, CPU):
        assert torch.equal(batch.flatten().sort().values, torch.arange(TINY.vocab_size))


def test_upstream_is_one_or_two_and_both_occur():
    assert set(exact.upstream(torch.arange(10)).tolist()) == {1, 2}


def test_hidden_size_one_is_refused():
    with pytest.raises(SpecError, match="hidden_size 1 is too small"):
        build_stage(replace(SPEC, model=replace(TINY, hidden_size=1)), 0, CPU)
