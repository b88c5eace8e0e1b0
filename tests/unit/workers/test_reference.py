"""The single-process truth: exact by two independent routes, provably without cancellation and within float32."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from workers.contract import TINY, BatchSpec, Dtype, Mesh, ModelSpec, Normalization, OrderingName, ProbeName, TrialSpec
from workers.errors import ExactnessError, SpecError
from workers.exactness import EXACT_LIMIT
from workers.models import build_stage, exact, microbatch_loss, microbatches
from workers.padding import valid_tokens
from workers.reference import exact_tied_gradients, replay_tied_gradients

CPU = torch.device("cpu")
EXACT = TrialSpec(ProbeName.EXACT, OrderingName.FIXED, Mesh(2, 2), TINY, BatchSpec(1, 4))
GPT = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(2, 2), TINY, BatchSpec(1, 2))
ODD = ModelSpec(vocab_size=13, hidden_size=9, num_layers=5, num_heads=3, seq_len=7)
FEW = ModelSpec(vocab_size=3, hidden_size=2, num_layers=0, num_heads=1, seq_len=8)
WIDE = ModelSpec(vocab_size=50257, hidden_size=6, num_layers=2, num_heads=2, seq_len=4)
MODELS = {"tiny": TINY, "odd": ODD, "few": FEW, "wide": WIDE}


def ends_of(gradients):
    return [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(("model", "pp", "seed"), list(product(MODELS, (1, 2, 3, 4), (0, 5))))
def test_autograd_in_float32_equals_the_integers_bit_for_bit(model, pp, seed):
    spec = replace(EXACT, model=MODELS[model], mesh=Mesh(3, pp), seed=seed)
    for step, dp_rank in ((0, 0), (0, 2), (2, 1)):
        replayed = replay_tied_gradients(spec, step, dp_rank, CPU)
        integers = exact_tied_gradients(spec, step, dp_rank)
        assert len(ends_of(replayed)) == len(ends_of(integers)) == min(pp, 2)
        for live, answer in zip(ends_of(replayed), ends_of(integers), strict=True):
            assert (live.dtype, answer.dtype) == (torch.float32, torch.int64)
            assert live.shape == answer.shape == (spec.model.vocab_size * spec.model.hidden_size,)
            assert torch.equal(live.double(), answer.double())


@pytest.mark.parametrize(("model", "pp"), list(product(MODELS, (1, 2, 4))))
def test_every_touched_element_is_nonzero_and_a_column_has_one_sign_everywhere(model, pp):
    spec = replace(EXACT, model=MODELS[model], mesh=Mesh(3, pp))
    for step, dp_rank in product((0, 1), range(3)):
        signs = exact.draw_signs(spec.model, spec.seed, step)
        touched_by_end = [batch.flatten().unique() for batch in microbatches(spec, step, dp_rank, CPU)]
        if pp == 1:
            touched_by_end = [torch.cat(touched_by_end).unique()]
        gradients = ends_of(exact_tied_gradients(spec, step, dp_rank))
        for touched, gradient in zip(touched_by_end, gradients, strict=True):
            sized = gradient.view(-1, spec.model.hidden_size) * signs
            assert (sized[touched] > 0).all()
            untouched = torch.ones(spec.model.vocab_size, dtype=torch.bool)
            untouched[touched] = False
            assert (sized[untouched] == 0).all()


def test_by_default_no_element_is_zero_on_any_end_of_any_dp_rank():
    spec = replace(EXACT, mesh=Mesh(8, 2))
    for step, dp_rank in product(range(3), range(8)):
        for gradient in exact_tied_gradients(spec, step, dp_rank):
            assert (gradient != 0).all()


def test_every_single_term_has_its_column_s_sign():
    """One token at a time: a sum without cancellation is one whose every term has the sign of the sum."""
    spec = replace(EXACT, mesh=Mesh(1, 2))
    signs = exact.draw_signs(TINY, spec.seed, 0)
    stages = [build_stage(spec, pp_rank, CPU) for pp_rank in range(2)]
    weights = [stages[0].embedding.word_embeddings.weight, stages[1].output_layer.weight]
    tokens, targets = (batch.reshape(-1, 1, 1) for batch in microbatches(spec, 0, 0, CPU))
    totals = [torch.zeros_like(weight) for weight in weights]
    for token, target in zip(tokens, targets, strict=True):
        loss = microbatch_loss(spec)(stages[1](stages[0](token)), target)
        for total, weight_gradient, row in zip(
            totals, torch.autograd.grad(loss, weights), (int(token), int(target)), strict=True
        ):
            assert (weight_gradient[row] * signs > 0).all()
            assert torch.count_nonzero(weight_gradient) == TINY.hidden_size
            total += weight_gradient
    for total, answer in zip(totals, exact_tied_gradients(spec, 0, 0), strict=True):
        assert torch.equal(total.flatten().long(), answer)


@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (1024, 4), (1024, 64)])
def test_sums_stay_exact_at_scale(dp, pp):
    model = replace(TINY, num_layers=max(4, pp))
    spec = replace(EXACT, model=model, mesh=Mesh(dp, pp), batch=BatchSpec(1, 4))
    largest = 0
    for dp_rank in {0, 1, dp // 2, dp - 1}:
        wte, lm_head = exact_tied_gradients(spec, 0, dp_rank)
        largest = max(largest, int(wte.abs().max()) + int(lm_head.abs().max()))
    assert 0 < largest * dp < EXACT_LIMIT


def test_every_gradient_of_the_stages_is_within_the_asserted_bound():
    """The bound of the assertion covers A, B and b too: their true sums of |terms| by autograd lie below it."""
    spec = replace(EXACT, mesh=Mesh(1, 1))
    stage = build_stage(spec, 0, CPU)
    tokens, targets = microbatches(spec, 0, 0, CPU)
    sums = {name: torch.zeros_like(parameter) for name, parameter in stage.named_parameters()}
    for token, target in zip(tokens.reshape(-1, 1, 1), targets.reshape(-1, 1, 1), strict=True):
        stage.zero_grad()
        microbatch_loss(spec)(stage(token), target).backward()
        for name, parameter in stage.named_parameters():
            sums[name] += parameter.grad.abs()
    largest = int(max(total.max() for total in sums.values()))
    dp = EXACT_LIMIT // largest
    with pytest.raises(ExactnessError):
        exact_tied_gradients(replace(spec, mesh=Mesh(dp + 1, 1)), 0, 0)


def test_a_mesh_too_large_to_be_exact_is_refused():
    spec = replace(EXACT, mesh=Mesh(1024, 2), batch=BatchSpec(1, 2048))
    with pytest.raises(ExactnessError, match="smaller dp \\(now 1024\\)"):
        exact_tied_gradients(spec, 0, 0)


def test_float64_replay_of_gpt_is_close_but_not_equal():
    single = replay_tied_gradients(GPT, 0, 1, CPU)
    double = replay_tied_gradients(GPT, 0, 1, CPU, torch.float64)
    for low, high in zip(ends_of(single), ends_of(double), strict=True):
        assert (low.dtype, high.dtype) == (torch.float32, torch.float64)
        assert 0 < (low.double() - high).abs().max() < 1e-6 * high.abs().max()


def test_float64_replay_starts_from_the_rounded_bfloat16_weights():
    spec = replace(GPT, dtype=Dtype.BFLOAT16)
    low = replay_tied_gradients(spec, 0, 0, CPU)
    high = replay_tied_gradients(spec, 0, 0, CPU, torch.float64)
    assert low.wte_P.dtype == torch.float32
    assert (low.wte_P.double() - high.wte_P).abs().max() < 0.02 * high.wte_P.abs().max()
    assert not torch.equal(high.wte_P, replay_tied_gradients(GPT, 0, 0, CPU, torch.float64).wte_P)


def test_one_stage_holds_the_sum_of_what_two_stages_hold_apart():
    shared = replay_tied_gradients(replace(GPT, mesh=Mesh(2, 1)), 0, 0, CPU, torch.float64)
    split = replay_tied_gradients(GPT, 0, 0, CPU, torch.float64)
    assert shared.lm_head_P is None
    torch.testing.assert_close(shared.wte_P, split.wte_P + split.lm_head_P)


def test_trained_gpt_weights_cannot_be_replayed():
    with pytest.raises(SpecError, match="step 1 of a gpt trial cannot be replayed"):
        replay_tied_gradients(GPT, 1, 0, CPU)


def test_ranks_sums_over_all_valid_tokens_are_the_gradient_of_one_process_over_all_of_them():
    spec = TrialSpec(
        ProbeName.GPT,
        OrderingName.FIXED,
        Mesh(3, 1),
        ModelSpec(29, 12, 2, 3, 8),
        BatchSpec(1, 2),
        normalization=Normalization.NUM_TOKENS,
    )
    stage = build_stage(spec, 0, CPU).double()
    batches = [microbatches(spec, 0, dp_rank, CPU) for dp_rank in range(3)]
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = torch.nn.functional.cross_entropy(stage(tokens).flatten(0, -2), targets.flatten())
    weight = stage.get_parameter("embedding.word_embeddings.weight")
    (whole,) = torch.autograd.grad(loss, [weight])
    parts = [replay_tied_gradients(spec, 0, dp_rank, CPU, dtype=torch.float64).wte_P for dp_rank in range(3)]
    counts = valid_tokens(spec)
    assert counts == (15, 7, 3)
    torch.testing.assert_close(sum(parts) / sum(counts), whole.flatten(), rtol=1e-12, atol=1e-15)
    means = sum(part / count for part, count in zip(parts, counts, strict=True)) / 3
    assert (means - whole.flatten()).abs().max() > 0.1 * whole.abs().max()
