"""What ranks give to the sync as a single process computes it, each with its floor, remembered over a request.

Turns the gradients of `workers.reference` into the replays that judges are handed. Must not judge, and must not look at
anything that a rank computed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from workers.contract import Coordinates, End, ProbeName, TrialSpec
from workers.exchange import Replay
from workers.faults import data_of
from workers.memo import Memo
from workers.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS, is_sequence_parallel, sequence_parallel_parameters
from workers.reference import (
    exact_row_bias_gradient,
    replay_cut_gradients,
    replay_inner_gradients,
    replay_layernorm_gradients,
    replay_tied_gradients,
    signed_tied_gradients,
)

MAX_CACHED_REPLAYS = 8
"""Of each kind."""


class ReplaySource(Protocol):
    """Contributions as a single process computes them; None where the weights are not known."""

    def __call__(self, spec: TrialSpec, step: int, dp_rank: int, end: End, tp_rank: int = 0) -> Replay | None:
        """What `dp_rank` contributes to one end of a tp rank's part of the tied weight."""

    def layernorms(self, spec: TrialSpec, step: int, at: Coordinates) -> Replay | None:
        """What a rank contributes to its layernorms, of which each tp rank has a partial gradient."""

    def inner(
        self, spec: TrialSpec, step: int, dp_rank: int, stages: tuple[int, ...], tp_rank: int = 0
    ) -> Replay | None:
        """What `dp_rank` contributes to every other parameter of some stages, flat and as registered."""


class ReplayMemo:
    """Single-process replays, remembered: the orderings of one request share their data and so their truth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tied: Memo[tuple[TrialSpec, int, int, int], tuple[Replay, Replay]] = Memo(MAX_CACHED_REPLAYS)
        self._layernorms: Memo[tuple[TrialSpec, int, Coordinates], Replay] = Memo(MAX_CACHED_REPLAYS)
        self._inner: Memo[tuple[TrialSpec, int, int, tuple[int, ...], int], Replay] = Memo(MAX_CACHED_REPLAYS)

    def __call__(self, spec: TrialSpec, step: int, dp_rank: int, end: End, tp_rank: int = 0) -> Replay | None:
        """See `ReplaySource`."""
        if not spec.is_replayable(step):
            return None
        key = (data_of(spec), step, dp_rank, tp_rank)
        compute = lambda: compute_replays(spec, step, dp_rank, self._device, tp_rank)  # noqa: E731
        return self._tied.recall(key, compute)[0 if end is End.WTE else 1]

    def layernorms(self, spec: TrialSpec, step: int, at: Coordinates) -> Replay | None:
        """See `ReplaySource`; flat, in the order of `sequence_parallel_parameters`."""
        if not spec.is_replayable(step):
            return None
        compute = lambda: compute_layernorm_replay(spec, step, at, self._device)  # noqa: E731
        return self._layernorms.recall((data_of(spec), step, at), compute)

    def inner(
        self, spec: TrialSpec, step: int, dp_rank: int, stages: tuple[int, ...], tp_rank: int = 0
    ) -> Replay | None:
        """See `ReplaySource`."""
        if not spec.is_replayable(step):
            return None
        key = (data_of(spec), step, dp_rank, stages, tp_rank)
        compute = lambda: compute_inner_replay(spec, step, dp_rank, stages, self._device, tp_rank)  # noqa: E731
        return self._inner.recall(key, compute)


def compute_replays(
    spec: TrialSpec, step: int, dp_rank: int, device: torch.device, tp_rank: int = 0
) -> tuple[Replay, Replay]:
    """(wte, lm_head) contributions of one dp rank, computed by this process alone, each with its floor."""
    if spec.probe is ProbeName.EXACT:
        exact = signed_tied_gradients(spec, step, dp_rank, tp_rank)
        wte = Replay(exact.wte_P.to(device, torch.float32), 0.0)
        return wte, wte if exact.lm_head_P is None else Replay(exact.lm_head_P.to(device, torch.float32), 0.0)
    replayed = replay_tied_gradients(spec, step, dp_rank, device, tp_rank=tp_rank)
    precise = replay_tied_gradients(spec, step, dp_rank, device, dtype=torch.float64, tp_rank=tp_rank)
    # A cut model takes its inner sums in another order; what that rounds away must not look like a fault.
    cut = replay_cut_gradients(spec, step, dp_rank, device) if spec.mesh.tp > 1 else None
    wte = Replay(replayed.wte_P, _distance(replayed.wte_P, precise.wte_P))
    if cut is not None:
        cut_wte_P = cut[0][tp_rank][WORD_EMBEDDINGS]
        wte = Replay(wte.grad_P, max(wte.floor, _distance(cut_wte_P, precise.wte_P)))
    if replayed.lm_head_P is None or precise.lm_head_P is None:
        return wte, wte
    floor = _distance(replayed.lm_head_P, precise.lm_head_P)
    if cut is not None:
        floor = max(floor, _distance(cut[-1][tp_rank][OUTPUT_LAYER], precise.lm_head_P))
    return wte, Replay(replayed.lm_head_P, floor)


def compute_layernorm_replay(spec: TrialSpec, step: int, at: Coordinates, device: torch.device) -> Replay:
    """A rank's part of its layernorms' gradients, computed by this process alone, with its floor.

    A model in one piece has whole gradients only: gpt's floor is how far the sum of all tp ranks' parts is from it.
    """
    stages = spec.mesh.stages(at.pp_rank)
    held = [(stage, parameter.name) for stage in stages for parameter in sequence_parallel_parameters(spec, stage)]
    if spec.probe is ProbeName.EXACT:
        bias_P = exact_row_bias_gradient(spec, step, at.dp_rank, at.tp_rank)
        return Replay(bias_P.repeat(len(held)).to(device, torch.float32), 0.0)
    cut = replay_cut_gradients(spec, step, at.dp_rank, device)
    by_tp_rank = [torch.cat([cut[stage][tp_rank][name] for stage, name in held]) for tp_rank in range(spec.mesh.tp)]
    precise_N = replay_layernorm_gradients(spec, step, at.dp_rank, stages, device, torch.float64)
    return Replay(by_tp_rank[at.tp_rank], _distance(torch.stack(by_tp_rank).sum(dim=0), precise_N))


def compute_inner_replay(
    spec: TrialSpec, step: int, dp_rank: int, stages: tuple[int, ...], device: torch.device, tp_rank: int = 0
) -> Replay:
    """One dp rank's contribution to some stages' parameters other than the tied weight, with its floor.

    Of a cut model it is the part of `tp_rank`, without what the tensor-parallel ranks sum.
    """
    if spec.mesh.tp > 1:
        return _compute_cut_replay(spec, step, dp_rank, stages, device, tp_rank)
    precise = replay_inner_gradients(spec, step, dp_rank, stages, device, dtype=torch.float64)
    if spec.probe is ProbeName.EXACT:
        return Replay(precise.float(), 0.0)
    replayed = replay_inner_gradients(spec, step, dp_rank, stages, device)
    return Replay(replayed, _distance(replayed, precise))


def _compute_cut_replay(
    spec: TrialSpec, step: int, dp_rank: int, stages: tuple[int, ...], device: torch.device, tp_rank: int
) -> Replay:
    def flat(dtype: torch.dtype | None) -> torch.Tensor:
        cut = replay_cut_gradients(spec, step, dp_rank, device, dtype)
        named = [pair for stage in stages for pair in cut[stage][tp_rank].items()]
        inner = [
            g for name, g in named if name not in (WORD_EMBEDDINGS, OUTPUT_LAYER) and not is_sequence_parallel(name)
        ]
        return torch.cat(inner) if inner else torch.zeros(0, device=device)

    precise_N = flat(torch.float64)
    if spec.probe is ProbeName.EXACT:
        return Replay(precise_N.float(), 0.0)
    replayed_N = flat(None)
    return Replay(replayed_N, _distance(replayed_N, precise_N))


def _distance(a_P: torch.Tensor, b_P: torch.Tensor) -> float:
    return float((a_P.double() - b_P).abs().max()) if a_P.numel() else 0.0
