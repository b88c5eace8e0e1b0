"""Which failure is a first cause, and when a remembered replay may be used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from workers import session
from workers.contract import (
    BatchSpec,
    Device,
    Drill,
    Dtype,
    End,
    Mesh,
    ModelSpec,
    OrderingName,
    Position,
    ProbeName,
    RankPhase,
    TrialSpec,
)
from workers.errors import CollectiveError, DrillError, ExactnessError
from workers.session import ReplayMemo, failure_of, first_cause, is_collateral

AT = Position(2, RankPhase.TIE, 1, 0, 9)
SPEC = TrialSpec(ProbeName.EXACT, OrderingName.BUGGY, Mesh(2, 2), ModelSpec(8, 4, 2, 2, 4), BatchSpec(1, 2))


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


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[TrialSpec]:
    """The specs whose replays were really computed."""
    specs: list[TrialSpec] = []
    real = session.compute_replays

    def counting(spec: TrialSpec, *arguments: object) -> object:
        specs.append(spec)
        return real(spec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "compute_replays", counting)
    return specs


def test_orderings_ends_steps_and_drills_share_one_replay(computed: list[TrialSpec]) -> None:
    memo = ReplayMemo(torch.device("cpu"))
    first = memo(SPEC, 0, 1, End.WTE)
    for changes in ({"ordering": OrderingName.FIXED}, {"steps": 9}, {"drill": Drill("raise_in_collective", 0)}):
        assert memo(replace(SPEC, **changes), 0, 1, End.WTE) is first
    assert memo(SPEC, 0, 1, End.LM_HEAD) is not first
    assert len(computed) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"probe": ProbeName.GPT},
        {"model": ModelSpec(8, 4, 3, 2, 4)},
        {"batch": BatchSpec(1, 3)},
        {"batch": BatchSpec(2, 2)},
        {"mesh": Mesh(2, 1)},
        {"dtype": Dtype.BFLOAT16},
        {"device": Device.CUDA},
    ],
)
def test_what_changes_the_answer_is_computed_anew(changes: dict[str, object], computed: list[TrialSpec]) -> None:
    memo = ReplayMemo(torch.device("cpu"))
    memo(SPEC, 0, 1, End.WTE)
    memo(replace(SPEC, **changes), 0, 1, End.WTE)  # type: ignore[arg-type]
    assert len(computed) == 2


def test_other_steps_and_contributors_are_computed_anew(computed: list[TrialSpec]) -> None:
    memo = ReplayMemo(torch.device("cpu"))
    replays = [memo(SPEC, step, dp_rank, End.WTE) for step in (0, 1) for dp_rank in (0, 1)]
    assert len(computed) == 4
    assert len({tuple(replay.grad_P.tolist()) for replay in replays if replay}) == 4


def test_memory_is_bounded_and_answers_stay_right(computed: list[TrialSpec]) -> None:
    memo = ReplayMemo(torch.device("cpu"))
    first = memo(SPEC, 0, 0, End.WTE)
    for step in range(1, session.MAX_CACHED_REPLAYS + 1):
        memo(SPEC, step, 0, End.WTE)
    again = memo(SPEC, 0, 0, End.WTE)
    assert first is not None
    assert again is not None
    assert again is not first
    assert torch.equal(first.grad_P, again.grad_P)
    assert len(computed) == session.MAX_CACHED_REPLAYS + 2


def test_trained_gpt_weights_have_no_replay() -> None:
    memo = ReplayMemo(torch.device("cpu"))
    gpt = replace(SPEC, probe=ProbeName.GPT)
    replay = memo(gpt, 0, 0, End.LM_HEAD)
    assert replay is not None
    assert 0 < replay.floor < 1e-5
    assert memo(gpt, 1, 0, End.LM_HEAD) is None
