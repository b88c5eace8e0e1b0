"""Ranks must hold very different numbers of valid tokens, or a mean of means would not show."""

from __future__ import annotations

import pytest
import torch

from workers.contract import TINY, BatchSpec, Mesh, ModelSpec, Normalization, OrderingName, ProbeName, TrialSpec
from workers.models import count_valid, microbatches
from workers.padding import num_valid_tokens, valid_length, valid_tokens


def trial(probe: ProbeName, mesh: Mesh, normalization: Normalization, model: ModelSpec = TINY) -> TrialSpec:
    return TrialSpec(probe, OrderingName.FIXED, mesh, model, BatchSpec(2, 3), normalization=normalization)


@pytest.mark.parametrize("probe", list(ProbeName))
def test_what_the_last_stage_counts_is_what_is_predicted(probe: ProbeName) -> None:
    spec = trial(probe, Mesh(4, 2), Normalization.NUM_TOKENS)
    counted = []
    for dp_rank in range(4):
        tokens, targets = microbatches(spec, 1, dp_rank, torch.device("cpu"))
        assert (tokens >= 0).all()
        counted.append(int(count_valid(targets)))
    assert tuple(counted) == valid_tokens(spec) == (93, 45, 21, 93)


@pytest.mark.parametrize("probe", list(ProbeName))
def test_by_microbatches_every_token_counts(probe: ProbeName) -> None:
    spec = trial(probe, Mesh(2, 2), Normalization.MICROBATCHES)
    assert int(count_valid(microbatches(spec, 0, 1, torch.device("cpu"))[1])) == num_valid_tokens(spec, 1) == 96


def test_no_sequence_is_ever_empty() -> None:
    assert {valid_length(1, dp_rank, sequence) for dp_rank in range(5) for sequence in range(4)} == {1}
