"""What each rank's two ends must hold before any synchronisation, computed in one process.

`replay_tied_gradients` runs the very modules of the pipeline, without a pipeline; `exact_tied_gradients` does not even
use autograd: it is the exact probe's forward and backward written out by hand in integers. Must not communicate and
must not look at anything that a rank computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from workers.contract import End, ProbeName, TrialSpec
from workers.errors import ExactnessError, SpecError
from workers.exactness import EXACT_LIMIT, code_digits, coded_bound
from workers.models import build_stage, exact, microbatch_loss, microbatches
from workers.parameters import tied_parameter_name
from workers.rank_code import contributor_index, rank_code


class TiedGradients(NamedTuple):
    """One dp rank's local gradients of the tied weight, flat, on each end.

    With a single stage there is one weight and one gradient: `wte_P` is all of it and `lm_head_P` is None.
    """

    wte_P: torch.Tensor
    lm_head_P: torch.Tensor | None


def replay_tied_gradients(
    spec: TrialSpec, step: int, dp_rank: int, device: torch.device, dtype: torch.dtype | None = None
) -> TiedGradients:
    """Local tied gradients of `dp_rank` in `step`: a sum over its microbatches, in order, in float32.

    `dtype=torch.float64` computes the same weights and data in float64 throughout (the floor). The exact probe has
    weights for every step; gpt's follow from training, so only step 0 can be replayed: SpecError otherwise.
    """
    stages = _build_stages(spec, step, device, dtype)
    flat = [total.flatten() for total in _accumulate(spec, step, dp_rank, device, stages, _tied_weights(stages))]
    return TiedGradients(flat[0], flat[1] if len(flat) > 1 else None)


def replay_inner_gradients(
    spec: TrialSpec,
    step: int,
    dp_rank: int,
    of_stages: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Local gradients of `dp_rank` of every parameter of some stages but the tied weight, flat [N], as registered.

    As `replay_tied_gradients`. In float64 the exact probe's gradients are the integers themselves.
    """
    stages = _build_stages(spec, step, device, dtype)
    inner: list[torch.Tensor] = [
        parameter
        for stage in of_stages
        for name, parameter in stages[stage].named_parameters()
        if name != tied_parameter_name(spec.mesh.num_stages, stage)
    ]
    if not inner:
        return torch.zeros(0, device=device)
    return torch.cat([total.flatten() for total in _accumulate(spec, step, dp_rank, device, stages, inner)])


class WholeGradient(NamedTuple):
    """One dp rank's local gradient of the whole model, flat, float64."""

    ends_EP: torch.Tensor
    """The ends of the tied weight: [2, P], or [1, P] with a single stage."""
    rest_N: torch.Tensor

    def summed(self) -> torch.Tensor:
        """The gradient with the tied weight once: its ends added up."""
        return torch.cat([self.ends_EP.sum(dim=0), self.rest_N])

    def norm_of_terms(self) -> float:
        """At least the norm of the sum of |terms|, each end a term."""
        return math.hypot(float(self.ends_EP.norm(dim=1).sum()), float(self.rest_N.norm()))

    def minus(self, other: WholeGradient) -> WholeGradient:
        """The difference, end by end."""
        return WholeGradient(self.ends_EP - other.ends_EP, self.rest_N - other.rest_N)


def replay_gradient(
    spec: TrialSpec, step: int, dp_rank: int, device: torch.device, dtype: torch.dtype | None = None
) -> WholeGradient:
    """As `replay_tied_gradients`, of every parameter; the exact probe's ends signed with the trial's rank code."""
    stages = _build_stages(spec, step, device, dtype)
    tied = _tied_weights(stages)
    others = [weight for stage in stages for weight in stage.parameters() if all(weight is not end for end in tied)]
    totals = _accumulate(spec, step, dp_rank, device, stages, [*tied, *others])
    flat = [total.flatten().double() for total in totals]
    ends = [_signed(spec, end, dp_rank, end_P) for end, end_P in zip(End, flat[: len(tied)], strict=False)]
    return WholeGradient(torch.stack(ends), torch.cat(flat[len(tied) :]))


def _signed(spec: TrialSpec, end: End, dp_rank: int, grad_P: torch.Tensor) -> torch.Tensor:
    code = rank_code(spec)
    if code is None:
        return grad_P
    return code.sign(grad_P.long(), contributor_index(spec.mesh, end, dp_rank)).to(grad_P)


def _build_stages(spec: TrialSpec, step: int, device: torch.device, dtype: torch.dtype | None) -> list[nn.Module]:
    """The whole model with its weights of `step`. SpecError where they follow from training."""
    if spec.probe is ProbeName.GPT and step != 0:
        raise SpecError(
            f"step {step} of a gpt trial cannot be replayed: only initial weights are known; ask for step 0"
        )
    stages = [build_stage(spec, stage, device, step) for stage in range(spec.mesh.num_stages)]
    return stages if dtype is None else [stage.to(dtype) for stage in stages]


def _accumulate(
    spec: TrialSpec,
    step: int,
    dp_rank: int,
    device: torch.device,
    stages: list[nn.Module],
    weights: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The weights' gradients, summed over microbatches in order, in float32 (float64 where the weights are)."""
    dtype = weights[0].dtype
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sums = [torch.zeros_like(weight, dtype=sum_dtype) for weight in weights]
    loss_function = microbatch_loss(spec)
    batches = (batch.chunk(spec.batch.num_microbatches) for batch in microbatches(spec, step, dp_rank, device))
    for tokens, targets in zip(*batches, strict=True):
        loss = loss_function(_forward(stages, tokens), targets)
        for total, gradient in zip(sums, torch.autograd.grad(loss, weights), strict=True):
            total.add_(gradient)
    return sums


def exact_tied_gradients(spec: TrialSpec, step: int, dp_rank: int) -> TiedGradients:
    """The exact probe's local tied gradients of `dp_rank` in `step` as int64 [V * H], on CPU, without autograd.

    Without the rank code (`signed_tied_gradients` has it). Raises ExactnessError if a gradient summed over the whole
    mesh, code included, could leave the exact range of float32.
    """
    model = spec.model
    signs_H = exact.draw_signs(model, spec.seed, step)
    couplings = [exact.draw_coupling(model, spec.seed, step, layer) for layer in range(model.num_layers)]
    tied_VH = exact.draw_tied(model, spec.seed, step)
    tokens_BS, targets_BS = microbatches(spec, step, dp_rank, torch.device("cpu"))
    tokens_T, targets_T = tokens_BS.flatten(), targets_BS.flatten()

    output_TH, active = _integer_forward(tied_VH[tokens_T].long(), signs_H, couplings)
    upstream_TH = exact.upstream(targets_T).unsqueeze(1)
    # A target that does not count has no weight, and so may stand for any id.
    targets_T = targets_T.clamp(min=0)
    input_gradient_TH, largest_inner = _integer_backward(upstream_TH * tied_VH[targets_T], signs_H, couplings, active)

    wte_P = _add_rows(tied_VH, tokens_T, input_gradient_TH)
    lm_head_P = _add_rows(tied_VH, targets_T, upstream_TH * output_TH)
    _assert_exact(spec, int(wte_P.abs().max()) + int(lm_head_P.abs().max()), largest_inner)
    return TiedGradients(wte_P + lm_head_P, None) if spec.mesh.num_stages == 1 else TiedGradients(wte_P, lm_head_P)


def signed_tied_gradients(spec: TrialSpec, step: int, dp_rank: int) -> TiedGradients:
    """What each end of `dp_rank` gives to the sync: its integer gradient, signed with the trial's rank code."""
    plain, code = exact_tied_gradients(spec, step, dp_rank), rank_code(spec)
    if code is None:
        return plain
    signed = [
        code.sign(grad_P, contributor_index(spec.mesh, end, dp_rank))
        for end, grad_P in zip(End, plain, strict=True)
        if grad_P is not None
    ]
    return TiedGradients(signed[0], signed[1] if len(signed) > 1 else None)


def signed_tied_sum(spec: TrialSpec, step: int) -> torch.Tensor:
    """The whole tied weight's true sum over all contributors, code included and unscaled: int64 [V * H], on CPU."""
    parts = (signed_tied_gradients(spec, step, dp_rank) for dp_rank in range(spec.mesh.dp))
    total_P = torch.zeros(spec.model.vocab_size * spec.model.hidden_size, dtype=torch.int64)
    for part in parts:
        total_P += part.wte_P if part.lm_head_P is None else part.wte_P + part.lm_head_P
    return total_P


def _tied_weights(stages: list[nn.Module]) -> list[torch.Tensor]:
    """The two ends as separate leaves, or the one shared weight."""
    first = stages[0].get_parameter("embedding.word_embeddings.weight")
    return [first] if len(stages) == 1 else [first, stages[-1].get_parameter("output_layer.weight")]


def _add_rows(like_VH: torch.Tensor, rows_T: torch.Tensor, values_TH: torch.Tensor) -> torch.Tensor:
    """Values summed into the rows they belong to, flat int64 [V * H]."""
    return torch.zeros_like(like_VH, dtype=torch.int64).index_add_(0, rows_T, values_TH).flatten()


def _forward(stages: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage(x)
    return x


def _integer_forward(
    input_TH: torch.Tensor, signs_H: torch.Tensor, couplings: list[exact.Coupling]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The last hidden state, int64 [T, H], and for each layer where relu passes, [T, L]."""
    width_lo, _ = exact.split_sizes(signs_H.numel())
    sizes_TL = input_TH[:, :width_lo].abs()
    output_TH = input_TH.clone()
    active = []
    for coupling in couplings:
        u_TL = sizes_TL[:, coupling.permutation_L] - coupling.bias_L
        active.append(u_TL > 0)
        output_TH[:, width_lo:] += signs_H[width_lo:] * u_TL.clamp(min=0)[:, coupling.source_R]
    return output_TH, active


def _integer_backward(
    output_gradient_TH: torch.Tensor, signs_H: torch.Tensor, couplings: list[exact.Coupling], active: list[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """The gradient of the embedded input, int64 [T, H], and a bound on every inner weight's sum of |terms|.

    hi's gradient passes every layer unchanged; lo's collects what comes back through B, relu and A.
    """
    width_lo, _ = exact.split_sizes(signs_H.numel())
    input_gradient_TH = output_gradient_TH.clone()
    relu_TR = output_gradient_TH[:, width_lo:] * signs_H[width_lo:]
    largest = int(relu_TR.sum(0).max())
    for coupling, active_TL in zip(couplings, active, strict=True):
        u_TL = torch.zeros_like(active_TL, dtype=torch.int64).index_add_(1, coupling.source_R, relu_TR) * active_TL
        largest = max(largest, int(u_TL.sum(0).max()))
        input_gradient_TH.index_add_(1, coupling.permutation_L, u_TL * signs_H[coupling.permutation_L])
    # A term of A or B is a gradient times an activation of at most 2.
    return input_gradient_TH, 2 * largest


def _assert_exact(spec: TrialSpec, largest_tied: int, largest_inner: int) -> None:
    """Signs never cancel, so a rank's largest sum is its sum of |terms|; every rank asserts its share of the mesh."""
    dp = spec.mesh.dp
    largest = max(coded_bound(largest_tied * dp, code_digits(spec)), largest_inner * dp)
    if largest > EXACT_LIMIT:
        raise ExactnessError(
            f"a gradient's terms may add up to {largest}, above {EXACT_LIMIT}, where float32 stops being exact; "
            f"use fewer tokens a step, fewer layers or a smaller dp (now {dp})"
        )
