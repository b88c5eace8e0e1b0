"""The code can be read back from any sum, names everyone in any long enough stretch, and rides on backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.contract import BatchSpec, End, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.models import build_stage, microbatch_loss, microbatches
from workers.parameters import tied_parameter_name
from workers.rank_code import RankCode, contributor_index, rank_code, sign_gradients
from workers.reference import exact_tied_gradients, signed_tied_gradients, signed_tied_sum

SPEC = TrialSpec(ProbeName.EXACT, OrderingName.FIXED, Mesh(3, 2), ModelSpec(16, 8, 3, 2, 8), BatchSpec(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    num_contributors=st.integers(1, 40),
    digits=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_digits_say_how_often_each_signer_was_added(
    num_contributors: int, digits: int, seed: int, data: st.DataObject
) -> None:
    code = RankCode(num_contributors, digits)
    times = torch.tensor([data.draw(st.sampled_from([0, 1, 1, 2, 3])) for _ in range(num_contributors)])
    generator = torch.Generator().manual_seed(seed)
    elements = torch.arange(3 * code.num_groups + 5)
    grads = torch.randint(-9, 10, (num_contributors, len(elements)), generator=generator)
    signed = torch.stack([code.sign(grad, index) for index, grad in enumerate(grads)])
    signers, read = code.read((times[:, None] * signed).sum(0), elements)
    real = signers < num_contributors
    assert torch.equal(read[real], times[signers[real]])
    assert not read[~real].any()


@pytest.mark.parametrize(("num_contributors", "digits"), [(1, 4), (4, 4), (6, 4), (128, 4), (1024, 2), (9, 1)])
def test_every_contributor_signs_within_any_two_rounds_of_the_groups(num_contributors: int, digits: int) -> None:
    code = RankCode(num_contributors, digits)
    window = 2 * code.num_groups
    signers, _ = code.read(torch.zeros(4 * window, dtype=torch.int64), torch.arange(4 * window))
    for start in range(0, 3 * window, max(1, window // 5)):
        assert set(range(num_contributors)) <= set(signers[:, start : start + window].flatten().tolist())


def test_the_groups_shift_so_that_a_column_meets_them_all() -> None:
    """With 8 columns and 2 groups an unshifted code would leave each column to one group."""
    code = RankCode(8, 4)
    assert set(code.group(torch.arange(0, 64, 8)).tolist()) == {0} or code.num_groups == 2
    assert set(code.group(torch.arange(0, 64, 2)).tolist()) == {0, 1}


@pytest.mark.parametrize("pp", [1, 2])
def test_what_leaves_backward_is_the_signed_integer_answer(pp: int) -> None:
    spec = TrialSpec(SPEC.probe, SPEC.ordering, Mesh(3, pp), SPEC.model, SPEC.batch)
    for dp_rank in range(3):
        stages = [build_stage(spec, pp_rank, torch.device("cpu")) for pp_rank in range(pp)]
        ends = list(End)[:pp]
        tied = [s.get_parameter(tied_parameter_name(pp, i) or "") for i, s in enumerate(stages)]
        signers = [sign_gradients(spec, weight, end, dp_rank) for weight, end in zip(tied, ends, strict=True)]
        for step in (0, 0):  # the second time the same: every step is signed once
            for signer, weight in zip(signers, tied, strict=True):
                signer.begin_step()
                weight.grad = None
            tokens, targets = microbatches(spec, step, dp_rank, torch.device("cpu"))
            for token, target in zip(tokens.chunk(3), targets.chunk(3), strict=True):
                hidden = token
                for stage in stages:
                    hidden = stage(hidden)
                microbatch_loss(spec)(hidden, target).backward()
            signed = signed_tied_gradients(spec, step, dp_rank)
            plain = exact_tied_gradients(spec, step, dp_rank)
            for weight, answer, unsigned in zip(tied, signed, plain, strict=False):
                assert weight.grad is not None
                assert torch.equal(weight.grad.flatten().long(), answer)
                assert torch.equal(answer // 256, unsigned)


def test_the_answer_s_sum_is_that_of_all_parts() -> None:
    parts = [part for dp_rank in range(3) for part in signed_tied_gradients(SPEC, 1, dp_rank) if part is not None]
    assert torch.equal(signed_tied_sum(SPEC, 1), sum(parts))
    code = rank_code(SPEC)
    assert code is not None
    _, digits = code.read(signed_tied_sum(SPEC, 1), torch.arange(128))
    signers, _ = code.read(signed_tied_sum(SPEC, 1), torch.arange(128))
    assert (digits == (signers < 6)).all()


def test_who_has_nothing_to_sign() -> None:
    gpt = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(2, 2), SPEC.model, SPEC.batch)
    assert rank_code(gpt) is None
    weight = torch.nn.Parameter(torch.ones(3))
    for signer in (sign_gradients(gpt, weight, End.WTE, 0), sign_gradients(SPEC, None, None, 0)):
        signer.begin_step()
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_contributors_are_counted_as_the_holders_are() -> None:
    mesh = Mesh(3, 4)
    assert [contributor_index(mesh, end, dp_rank) for end in (End.WTE, End.LM_HEAD) for dp_rank in range(3)] == list(
        range(6)
    )
