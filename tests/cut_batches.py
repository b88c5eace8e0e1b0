"""One global batch, shared out to however many replicas a trial has: the same question asked in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.grad_sync import prescale_of
from workers.models import microbatches
from workers.rank_code import rank_code
from workers.reference import exact_tied_gradients
from workers.virtual import DataSource

NUM_SEQUENCES = 24
MODEL = ModelSpec(vocab_size=67, hidden_size=12, num_layers=4, num_heads=3, seq_len=5)
WHOLE = (Mesh(1, 1), BatchSpec(NUM_SEQUENCES, 1))


def trial(probe: ProbeName, cut: tuple[Mesh, BatchSpec], ordering: OrderingName = OrderingName.FIXED) -> TrialSpec:
    return TrialSpec(probe, ordering, *cut[:1], MODEL, cut[1], steps=1)


def shared_out(order: Sequence[int] | None = None) -> DataSource:
    """Every replica gets its part of one global batch; `order` says which part."""

    def source(spec: TrialSpec, step: int, dp_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens, targets = microbatches(trial(spec.probe, WHOLE), step, 0, device)
        share = NUM_SEQUENCES // spec.mesh.dp
        first = (order[dp_rank] if order else dp_rank) * share
        return tokens[first : first + share], targets[first : first + share]

    return source


def unsigned(spec: TrialSpec, synced_n: Tensor) -> Tensor:
    """The exact probe's integer gradient without pre-scale and rank code, int64 [n]."""
    sums_n = (synced_n.double() * prescale_of(spec).divisor).long()
    code = rank_code(spec)
    multiplier = code.multiplier if code else 1
    return (sums_n - sums_n.remainder(multiplier)) // multiplier


@cache
def whole_answer() -> Tensor:
    """The integer answer for the global batch in one piece, by hand: no autograd, no buffers, no sync."""
    return exact_tied_gradients(trial(ProbeName.EXACT, WHOLE), 0, 0).wte_P
