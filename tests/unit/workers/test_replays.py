"""When a remembered replay may be used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workers import replays
from workers.contract import BatchSpec, Device, Drill, Dtype, End, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.replays import ReplayMemo

SPEC = TrialSpec(ProbeName.EXACT, OrderingName.BUGGY, Mesh(2, 2), ModelSpec(8, 4, 2, 2, 4), BatchSpec(1, 2))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[TrialSpec]:
    """The specs whose replays were really computed."""
    specs: list[TrialSpec] = []
    real = replays.compute_replays

    def counting(spec: TrialSpec, *arguments: object) -> object:
        specs.append(spec)
        return real(spec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(replays, "compute_replays", counting)
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
    found = [memo(SPEC, step, dp_rank, End.WTE) for step in (0, 1) for dp_rank in (0, 1)]
    assert len(computed) == 4
    assert len({tuple(replay.grad_P.tolist()) for replay in found if replay}) == 4


def test_memory_is_bounded_and_answers_stay_right(computed: list[TrialSpec]) -> None:
    memo = ReplayMemo(torch.device("cpu"))
    first = memo(SPEC, 0, 0, End.WTE)
    for step in range(1, replays.MAX_CACHED_REPLAYS + 1):
        memo(SPEC, step, 0, End.WTE)
    again = memo(SPEC, 0, 0, End.WTE)
    assert first is not None
    assert again is not None
    assert again is not first
    assert torch.equal(first.grad_P, again.grad_P)
    assert len(computed) == replays.MAX_CACHED_REPLAYS + 2


def test_trained_gpt_weights_have_no_replay() -> None:
    memo = ReplayMemo(torch.device("cpu"))
    gpt = replace(SPEC, probe=ProbeName.GPT)
    replay = memo(gpt, 0, 0, End.LM_HEAD)
    assert replay is not None
    assert 0 < replay.floor < 1e-5
    assert memo(gpt, 1, 0, End.LM_HEAD) is None
