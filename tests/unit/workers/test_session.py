"""Which failure is a first cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from workers.contract import (
    Position,
    RankPhase,
)
from workers.errors import CollectiveError, DrillError, ExactnessError
from workers.session import failure_of, first_cause, is_collateral

AT = Position(2, RankPhase.TIE, 1, 0, 9)


@pytest.mark.parametrize(
    "error",
    [
        CollectiveError("a collective broke"),
        dist.DistNetworkError("gone"),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("NCCL communicator was aborted on rank 3"),
    ],
)
def test_a_rank_that_only_lost_a_peer_is_a_victim(error: Exception) -> None:
    failure = failure_of(error, AT, "node-a")
    assert failure.collateral
    assert failure.code == "collective_failed"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DrillError("told to break"), "drill_fault"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "rank_raised"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "rank_raised"),
        (ValueError("connection closed"), "rank_raised"),
    ],
)
def test_a_rank_that_broke_by_itself_is_a_cause(error: Exception, code: str) -> None:
    failure = failure_of(error, AT, "node-a")
    assert not failure.collateral
    assert (failure.code, failure.world_rank, failure.node, failure.phase) == (code, 2, "node-a", RankPhase.TIE)
    assert (failure.trial_index, failure.step) == (1, 0)
    assert str(error) in failure.message


def test_what_the_pipeline_wraps_keeps_its_cause() -> None:
    def wrapped(cause: Exception) -> Exception:
        try:
            raise RuntimeError("[Stage 0] failed to run forward") from cause
        except RuntimeError as error:
            return error

    broke = failure_of(wrapped(ValueError("shapes differ")), AT, "a")
    assert broke.message == "RuntimeError: [Stage 0] failed to run forward; because of ValueError: shapes differ"
    assert (broke.code, broke.collateral) == ("rank_raised", False)
    left = failure_of(wrapped(ExactnessError("too large")), AT, "a")
    assert (left.code, left.message, left.collateral) == ("exactness_lost", "too large", False)
    assert failure_of(wrapped(CollectiveError("broke")), AT, "a").collateral


def test_the_first_cause_outranks_victims_of_lower_rank() -> None:
    victim = failure_of(CollectiveError("broke"), replace(AT, world_rank=0), "a")
    cause = failure_of(DrillError("told"), replace(AT, world_rank=3), "b")
    assert first_cause([victim, cause]) is cause
    assert first_cause([victim]) is victim
    assert first_cause([]) is None
    assert is_collateral(CollectiveError(""))
