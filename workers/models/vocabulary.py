"""The vocabulary's two ends where each tensor-parallel rank holds a part of its rows: look-up, and loss over logits.

Source: Megatron-LM, megatron/core/tensor_parallel/layers.py (VocabParallelEmbedding) and cross_entropy.py. Padding rows
are rows like any other there, in the softmax too; so they are here. Must not communicate but where a flow yields.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.tensor_parallel import Flow, maximum, reduce_replicated


def look_up(tokens_BS: Tensor, weight_VH: Tensor, tp_rank: int) -> Tensor:
    """The rows of the ids that this rank holds, [B, S, H]; zero for the others' ids. The ranks' results add up."""
    local_BS, elsewhere_BS = _local(tokens_BS, weight_VH.shape[0], tp_rank)
    return F.embedding(local_BS, weight_VH).masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)


def target_logits(logits_BSV: Tensor, targets_BS: Tensor, tp_rank: int) -> Tensor:
    """Each target's logit where this rank holds it, else zero: [B, S]. The ranks' results add up."""
    local_BS, elsewhere_BS = _local(targets_BS, logits_BSV.shape[-1], tp_rank)
    return logits_BSV.gather(-1, local_BS.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere_BS, 0.0)


def cross_entropies(logits_BSV: Tensor, targets_BS: Tensor, tp_rank: int) -> Flow[Tensor]:
    """Each token's cross-entropy [B, S], from this rank's part of the logits; the same on every rank."""
    largest_BS = yield maximum(logits_BSV.amax(-1))
    shifted_BSV = logits_BSV - largest_BS.unsqueeze(-1)
    total_BS = yield reduce_replicated(shifted_BSV.exp().sum(-1))
    target_BS = yield reduce_replicated(target_logits(shifted_BSV, targets_BS, tp_rank))
    return total_BS.log() - target_BS


def _local(ids: Tensor, num_rows: int, tp_rank: int) -> tuple[Tensor, Tensor]:
    """Ids counted within this rank's rows, and where they lie on another rank (0 there)."""
    local = ids - tp_rank * num_rows
    elsewhere = (local < 0) | (local >= num_rows)
    return torch.where(elsewhere, 0, local), elsewhere
