"""The probes, split into pipeline stages: one set of verbs over the gpt and the exact model.

Everything here is a function of the trial and of coordinates, never of the process it runs in. Must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from workers.contract import Dtype, Normalization, ProbeName, TrialSpec
from workers.faults import data_rank
from workers.models import exact, gpt
from workers.padding import valid_length
from workers.parameters import first_layer, stage_layer_counts

IGNORED = -100
"""The target of a token that does not count."""

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def parameter_dtype(spec: TrialSpec) -> torch.dtype:
    """The dtype of parameters and activations; the exact probe is always float32."""
    if spec.probe is ProbeName.EXACT or spec.dtype is Dtype.FLOAT32:
        return torch.float32
    return torch.bfloat16


def build_stage(spec: TrialSpec, stage: int, device: torch.device, step: int = 0) -> nn.Module:
    """One stage of the pipeline with its weights of `step` (gpt: initial weights only). Equal on all dp ranks."""
    num_stages = spec.mesh.num_stages
    num_layers = stage_layer_counts(spec.model.num_layers, num_stages)[stage]
    is_first, is_last = stage == 0, stage == num_stages - 1
    module: nn.Module
    if spec.probe is ProbeName.EXACT:
        module = exact.ExactStage(spec.model, num_layers, is_first, is_last)
    else:
        module = gpt.GptStage(spec.model, num_layers, is_first, is_last, parameter_dtype(spec))
    seed_weights(module, spec, stage, step)
    return module.to(device)


def seed_weights(module: nn.Module, spec: TrialSpec, stage: int, step: int = 0) -> None:
    """Write the stage's weights of `step` in place, wherever its parameters' storage is.

    The exact probe needs this before every step (an optimizer leaves the integers); gpt has initial weights only.
    """
    layer = first_layer(spec.model.num_layers, spec.mesh.num_stages, stage)
    if isinstance(module, exact.ExactStage):
        exact.seed_weights(module, spec.model, spec.seed, layer, step)
    else:
        gpt.seed_weights(module, spec.model, spec.seed, layer)


def stage_example(spec: TrialSpec, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of one microbatch at this stage's input and output, as tensors without storage (meta)."""
    shape_BS = (spec.batch.micro_batch_size, spec.model.seq_len)
    dtype = parameter_dtype(spec)
    hidden_BSH = torch.empty(*shape_BS, spec.model.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    tokens_BS = torch.empty(shape_BS, dtype=torch.int64, device="meta")
    logits_BSV = torch.empty(*shape_BS, spec.model.vocab_size, dtype=dtype, device="meta", requires_grad=True)
    return (
        tokens_BS if stage == 0 else hidden_BSH,
        logits_BSV if stage == spec.mesh.num_stages - 1 else hidden_BSH,
    )


def microbatches(spec: TrialSpec, step: int, dp_rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one dp rank's step, microbatch after microbatch: int64 [M * B, S] each.

    Where gradients are normalised by valid tokens, sequences are padded: targets past their length are IGNORED.
    """
    draw = exact.draw_tokens if spec.probe is ProbeName.EXACT else gpt.draw_tokens
    num_sequences = spec.batch.num_microbatches * spec.batch.micro_batch_size
    source_rank = data_rank(spec, dp_rank)
    tokens_BS, targets_BS = draw(spec.model, num_sequences, spec.seed, step, source_rank)
    if spec.normalization is Normalization.NUM_TOKENS:
        for sequence in range(num_sequences):
            targets_BS[sequence, valid_length(spec.model.seq_len, source_rank, sequence) :] = IGNORED
    return tokens_BS.to(device), targets_BS.to(device)


def count_valid(targets_BS: torch.Tensor) -> torch.Tensor:
    """How many tokens have a target that counts: int64 [1]."""
    return (targets_BS != IGNORED).sum().view(1)


def microbatch_loss(spec: TrialSpec) -> LossFunction:
    """The function of (logits, targets) whose gradients, summed over microbatches, are a dp rank's local gradients.

    gpt: the mean over tokens divided by the number of microbatches, as in Megatron-LM, or with num_tokens the sum over
    valid tokens; exact: a weighted sum.
    """
    if spec.probe is ProbeName.EXACT:
        return exact.token_loss
    if spec.normalization is Normalization.NUM_TOKENS:
        return gpt.token_loss_sum
    num_microbatches = spec.batch.num_microbatches
    return lambda logits_BSV, targets_BS: gpt.token_loss(logits_BSV, targets_BS) / num_microbatches


def mean_loss(spec: TrialSpec, losses: list[torch.Tensor], targets_BS: torch.Tensor) -> float:
    """The mean over microbatches, or with num_tokens over valid tokens, from what `microbatch_loss` gave for each.

    Waits for the device.
    """
    total = float(torch.stack([loss.detach() for loss in losses]).sum())
    if spec.normalization is Normalization.NUM_TOKENS:
        return total / max(1, int(count_valid(targets_BS)))
    return total / len(losses) if spec.probe is ProbeName.EXACT else total
