"""What each rank's two ends must hold before any synchronisation, computed in one process.

`replay_tied_gradients` runs the very modules of the pipeline, without a pipeline; `exact_tied_gradients` does not even
use autograd: it is the exact probe's forward and backward written out by hand in integers. Both compute the model in
one piece, whatever number of tensor-parallel ranks share it, and cut their answer. `replay_cut_gradients` runs the cut
model, all its parts in this process. Must not communicate and must not look at anything that a rank computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from workers.communicator import part
from workers.contract import End, ProbeName, TrialSpec
from workers.errors import ExactnessError, SpecError
from workers.exactness import EXACT_LIMIT, WIRE_LIMITS, code_digits, coded_bound, replicas_at_once
from workers.models import build_stage, exact, loss_flow, microbatch_loss, microbatches
from workers.models.exact import ExactStage
from workers.models.gpt import GptStage
from workers.models.weights import Shard
from workers.parameters import allocated, sequence_parallel_parameters, tied_elements, tied_parameter_name
from workers.rank_code import contributor_index, rank_code
from workers.tensor_parallel import run_flow, together


class TiedGradients(NamedTuple):
    """One dp rank's local gradients of the tied weight, flat, on each end.

    With a single stage there is one weight and one gradient: `wte_P` is all of it and `lm_head_P` is None.
    """

    wte_P: torch.Tensor
    lm_head_P: torch.Tensor | None


def replay_tied_gradients(
    spec: TrialSpec,
    step: int,
    dp_rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    tp_rank: int = 0,
) -> TiedGradients:
    """Local tied gradients of `dp_rank` in `step`: a sum over its microbatches, in order, in float32.

    Of a model that is shared by tensor-parallel ranks it is the part of `tp_rank`.

    `dtype=torch.float64` computes the same weights and data in float64 throughout (the floor). The exact probe has
    weights for every step; gpt's follow from training, so only step 0 can be replayed: SpecError otherwise.
    """
    stages = _uncut_stages(spec, step, device, dtype)
    sums = _accumulate(spec, step, dp_rank, device, stages, _tied_weights(stages))
    flat = [part(total.flatten(), tp_rank, spec.mesh.tp) for total in sums]
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
    stages = _uncut_stages(spec, step, device, dtype)
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
    stages = _uncut_stages(spec, step, device, dtype)
    tied = _tied_weights(stages)
    others = [weight for stage in stages for weight in stage.parameters() if all(weight is not end for end in tied)]
    totals = _accumulate(spec, step, dp_rank, device, stages, [*tied, *others])
    flat = [total.flatten().double() for total in totals]
    if spec.probe is ProbeName.EXACT and spec.mesh.tp > 1:
        # The one parameter that the model in one piece does without.
        parts = [exact_row_bias_gradient(spec, step, dp_rank, tp_rank) for tp_rank in range(spec.mesh.tp)]
        flat.append(torch.stack(parts).sum(dim=0).repeat(spec.model.num_layers).to(flat[0]))
    ends = [
        _signed(spec, end, dp_rank, end_P)
        for end, end_P in zip((End.WTE, End.LM_HEAD), flat[: len(tied)], strict=False)
    ]
    return WholeGradient(torch.stack(ends), torch.cat(flat[len(tied) :]))


def _signed(spec: TrialSpec, end: End, dp_rank: int, grad_P: torch.Tensor) -> torch.Tensor:
    code = rank_code(spec)
    if code is None:
        return grad_P
    contributor = contributor_index(spec.mesh, end, dp_rank)
    # Each tensor-parallel rank signs its part.
    return torch.cat([code.sign(part_n.long(), contributor) for part_n in grad_P.chunk(spec.mesh.tp)]).to(grad_P)


def replay_layernorm_gradients(
    spec: TrialSpec, step: int, dp_rank: int, of_stages: Sequence[int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The whole local gradient, flat, of some stages' parameters that tensor-parallel ranks replicate and sum; gpt."""
    stages = _uncut_stages(spec, step, device, dtype)
    names = [(stage, p.name) for stage in of_stages for p in sequence_parallel_parameters(spec, stage)]
    if not names:
        return torch.zeros(0, device=device, dtype=dtype)
    parameters = [stages[stage].get_parameter(name) for stage, name in names]
    sums = _accumulate(spec, step, dp_rank, device, stages, parameters)
    return torch.cat([total.flatten() for total in sums])


CutGradients = list[list[dict[str, torch.Tensor]]]
"""By stage, then by tp rank: each parameter's local gradient, flat, in float32 (float64 where the weights are)."""


def replay_cut_gradients(
    spec: TrialSpec, step: int, dp_rank: int, device: torch.device, dtype: torch.dtype | None = None
) -> CutGradients:
    """What every tensor-parallel rank of a replica computes, in this process and in the same arithmetic.

    Raises SpecError as `replay_tied_gradients` does.
    """
    _refuse_unknown_weights(spec, step)
    tp, num_stages = spec.mesh.tp, spec.mesh.num_stages
    shards = [Shard(together(tp), tp_rank) for tp_rank in range(tp)]
    stages = [[build_stage(spec, stage, device, step, shard) for shard in shards] for stage in range(num_stages)]
    if dtype is not None:
        stages = [[module.to(dtype) for module in modules] for modules in stages]
    parameters = [parameter for modules in stages for module in modules for parameter in module.parameters()]
    losses = partial(_cut_losses, spec, shards, stages)
    flat = iter(total.flatten() for total in _add_up(spec, step, dp_rank, device, losses, parameters))
    return [[{name: next(flat) for name, _ in module.named_parameters()} for module in modules] for modules in stages]


def _cut_losses(
    spec: TrialSpec,
    shards: Sequence[Shard],
    stages: Sequence[Sequence[GptStage | ExactStage]],
    tokens: torch.Tensor,
    targets: torch.Tensor,
) -> list[torch.Tensor]:
    """Each tensor-parallel rank's loss, all of them the same."""
    group, xs = shards[0].group, [tokens] * len(shards)
    for modules in stages:
        xs = run_flow([module.flow(x) for module, x in zip(modules, xs, strict=True)], group)
    return run_flow([loss_flow(spec, shard, x, targets) for shard, x in zip(shards, xs, strict=True)], group)


def _uncut_stages(spec: TrialSpec, step: int, device: torch.device, dtype: torch.dtype | None) -> list[nn.Module]:
    """The model in one piece, with its weights of `step`; its vocabulary is padded as that of the cut one is."""
    _refuse_unknown_weights(spec, step)
    uncut = replace(spec, model=allocated(spec.model, spec.mesh.tp))
    stages = [build_stage(uncut, stage, device, step) for stage in range(spec.mesh.num_stages)]
    return [*stages] if dtype is None else [stage.to(dtype) for stage in stages]


def _refuse_unknown_weights(spec: TrialSpec, step: int) -> None:
    if not spec.is_replayable(step):
        raise SpecError(
            f"step {step} of a gpt trial cannot be replayed: only initial weights are known; ask for step 0"
        )


def _accumulate(
    spec: TrialSpec,
    step: int,
    dp_rank: int,
    device: torch.device,
    stages: Sequence[nn.Module],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """One dp rank's gradients of `parameters` of the model in one piece, in their shapes."""
    loss_function = microbatch_loss(spec)
    losses = lambda tokens, targets: [loss_function(_forward(stages, tokens), targets)]  # noqa: E731
    return _add_up(spec, step, dp_rank, device, losses, parameters)


def _add_up(
    spec: TrialSpec,
    step: int,
    dp_rank: int,
    device: torch.device,
    losses: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]],
    parameters: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Gradients of the losses of (tokens, targets), added up by microbatch in float32, or float64 for such weights."""
    sum_dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    sums = [torch.zeros_like(parameter, dtype=sum_dtype) for parameter in parameters]
    batches = (batch.chunk(spec.batch.num_microbatches) for batch in microbatches(spec, step, dp_rank, device))
    for tokens, targets in zip(*batches, strict=True):
        gradients = torch.autograd.grad(losses(tokens, targets), list(parameters))
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)
    return sums


def exact_tied_gradients(spec: TrialSpec, step: int, dp_rank: int, tp_rank: int = 0) -> TiedGradients:
    """The exact probe's local tied gradients of `dp_rank` in `step` as int64 [V * H / tp], on CPU, without autograd.

    Without the rank code (`signed_tied_gradients` has it). Raises ExactnessError if a gradient summed over the whole
    mesh, code included, could leave the exact range of float32.
    """
    model = allocated(spec.model, spec.mesh.tp)
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
    _assert_exact(spec, int((wte_P.abs() + lm_head_P.abs()).max()), largest_inner)
    wte_P, lm_head_P = (part(grad_P, tp_rank, spec.mesh.tp) for grad_P in (wte_P, lm_head_P))
    return TiedGradients(wte_P + lm_head_P, None) if spec.mesh.num_stages == 1 else TiedGradients(wte_P, lm_head_P)


def exact_row_bias_gradient(spec: TrialSpec, step: int, dp_rank: int, tp_rank: int) -> torch.Tensor:
    """A tp rank's part of the gradient of any layer's row_bias, int64 [hi], on CPU, without autograd.

    The gradient of hi passes every layer unchanged; the part is that of the rank's piece of each sequence.
    """
    model, (width_lo, _) = spec.model, exact.split_sizes(spec.model.hidden_size)
    tied_VH = exact.draw_tied(allocated(model, spec.mesh.tp), spec.seed, step)
    targets_BS = microbatches(spec, step, dp_rank, torch.device("cpu"))[1]
    targets_T = targets_BS.chunk(spec.mesh.tp, dim=1)[tp_rank].flatten()
    upstream_T1 = exact.upstream(targets_T).unsqueeze(1)
    return (upstream_T1 * tied_VH[targets_T.clamp(min=0), width_lo:]).sum(dim=0)


def signed_tied_gradients(spec: TrialSpec, step: int, dp_rank: int, tp_rank: int = 0) -> TiedGradients:
    """What each end of `dp_rank` gives to the sync: its integer gradient, signed with the trial's rank code."""
    plain, code = exact_tied_gradients(spec, step, dp_rank, tp_rank), rank_code(spec)
    if code is None:
        return plain
    signed = [
        code.sign(grad_P, contributor_index(spec.mesh, end, dp_rank))
        for end, grad_P in zip((End.WTE, End.LM_HEAD), plain, strict=True)
        if grad_P is not None
    ]
    return TiedGradients(signed[0], signed[1] if len(signed) > 1 else None)


def signed_tied_sum(spec: TrialSpec, step: int, tp_rank: int = 0) -> torch.Tensor:
    """The true sum over all contributors of a tp rank's part of the tied weight, code included and unscaled.

    int64 [V * H / tp], on CPU.
    """
    given = (signed_tied_gradients(spec, step, dp_rank, tp_rank) for dp_rank in range(spec.mesh.dp))
    total_P = torch.zeros(tied_elements(spec.model, spec.mesh.tp), dtype=torch.int64)
    for ends in given:
        total_P += ends.wte_P if ends.lm_head_P is None else ends.wte_P + ends.lm_head_P
    return total_P


def _tied_weights(stages: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The two ends as separate leaves, or the one shared weight."""
    first = stages[0].get_parameter("embedding.word_embeddings.weight")
    return [first] if len(stages) == 1 else [first, stages[-1].get_parameter("output_layer.weight")]


def _add_rows(like_VH: torch.Tensor, rows_T: torch.Tensor, values_TH: torch.Tensor) -> torch.Tensor:
    """Values summed into the rows they belong to, flat int64 [V * H]."""
    return torch.zeros_like(like_VH, dtype=torch.int64).index_add_(0, rows_T, values_TH).flatten()


def _forward(stages: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
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
    dp, dtype = spec.mesh.dp, spec.grad_reduce_dtype
    largest = max(coded_bound(largest_tied * dp, code_digits(spec)), largest_inner * dp)
    if largest > EXACT_LIMIT:
        raise ExactnessError(
            f"a gradient's terms may add up to {largest}, above {EXACT_LIMIT}, where float32 stops being exact; "
            f"use fewer tokens a step, fewer layers or a smaller dp (now {dp})"
        )
    at_once, limit = replicas_at_once(spec.model, spec.batch, dp, spec.grad_reduce_dtype), WIRE_LIMITS[dtype]
    largest = max(coded_bound(largest_tied * at_once, code_digits(spec)), largest_inner * at_once)
    if largest > limit:
        raise ExactnessError(
            f"terms of {at_once} replicas may add up to {largest}, above {limit}, where {dtype.value} stops being "
            f"exact; use fewer tokens a step or fewer layers, or reduce in float32"
        )
