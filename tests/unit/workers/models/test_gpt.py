from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from workers.contract import TINY, BatchSpec, Dtype, Mesh, OrderingName, ProbeName, TrialSpec
from workers.errors import SpecError
from workers.models import UNCUT, build_stage, gpt, microbatch_loss, microbatches
from workers.tensor_parallel import WHOLE, run_flow

CPU = torch.device("cpu")
SPEC = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(1, 1), TINY, BatchSpec(1, 2))


def test_no_position_sees_a_later_token():
    stage = build_stage(SPEC, 0, CPU)
    tokens, _ = microbatches(SPEC, 0, 0, CPU)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocab_size
    before, after = stage(tokens), stage(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_attention_equals_torch_s():
    layer = build_stage(SPEC, 0, CPU).decoder.layers[0].self_attention
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    query, key, value = (part.view(2, 16, 4, 8).transpose(1, 2) for part in layer.linear_qkv(x).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    [attended] = run_flow([layer.flow(x, future)], WHOLE)
    torch.testing.assert_close(attended, layer.linear_proj(mixed))


def test_gradients_are_means_over_all_tokens_of_the_microbatches():
    stage = build_stage(SPEC, 0, CPU).double()
    tokens, targets = microbatches(SPEC, 0, 0, CPU)
    weight = stage.embedding.word_embeddings.weight
    loss = microbatch_loss(SPEC)
    parts = [loss(stage(tokens[i : i + 1]), targets[i : i + 1]) for i in range(SPEC.batch.num_microbatches)]
    summed = sum(torch.autograd.grad(part, weight)[0] for part in parts)
    whole = torch.autograd.grad(F.cross_entropy(stage(tokens).flatten(0, 1), targets.flatten()), weight)[0]
    torch.testing.assert_close(summed, whole)


def test_loss_is_float32_for_bfloat16_logits_and_float64_for_float64():
    logits, targets = torch.zeros(1, 2, 5), torch.zeros(1, 2, dtype=torch.int64)
    for given, computed in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        [loss] = run_flow([gpt.token_loss(logits.to(given), targets, UNCUT)], WHOLE)
        assert loss.dtype == computed


def test_bfloat16_parameters_are_the_rounded_float32_ones():
    wide, narrow = build_stage(SPEC, 0, CPU), build_stage(replace(SPEC, dtype=Dtype.BFLOAT16), 0, CPU)
    for name, parameter in wide.named_parameters():
        assert torch.equal(narrow.get_parameter(name), parameter.bfloat16())


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with pytest.raises(SpecError, match="num_heads 5 does not divide hidden_size 32"):
        build_stage(replace(SPEC, model=replace(TINY, num_heads=5)), 0, CPU)
