"""When a drill strikes, and how one is written: pure rules over the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.contract import BatchSpec, Drill, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.faults import FAULTS, FaultName, draw, is_struck, read_drill, why_not

SPEC = TrialSpec(ProbeName.EXACT, OrderingName.BUGGY, Mesh(2, 2), ModelSpec(8, 4, 2, 1, 4), BatchSpec(1, 2))
FAULT = FaultName.BIT_IN_RECEIVE_BUFFER


def struck(drill: Drill | None, spec: TrialSpec = SPEC, nodes: str = "aabb") -> list[int]:
    spec = replace(spec, drill=drill)
    return [world_rank for world_rank, node in enumerate(nodes) if is_struck(spec, world_rank, node)]


def test_every_fault_has_an_entry_in_words() -> None:
    assert set(FAULTS) == set(FaultName)
    assert all(name is fault.name and fault.summary.endswith(".") for name, fault in FAULTS.items())


@pytest.mark.parametrize("name", [FaultName.COLLECTIVES_REORDERED, FaultName.SIZES_UNEQUAL])
def test_ranks_that_do_not_fit_together_need_a_replica_and_nothing_else(name: FaultName) -> None:
    assert why_not(FAULTS[name], Mesh(1, 2), 0) == "with dp=1 there are no replicas"
    assert all(why_not(FAULTS[name], Mesh(2, 3), world_rank) is None for world_rank in range(6))
    assert why_not(FAULTS[name], Mesh(2, 1), 1) is None


def test_a_sum_over_tensor_ranks_can_be_skipped_wherever_there_are_two() -> None:
    fault = FAULTS[FaultName.LAYERNORM_SKIPPED]
    assert "tp=1" in str(why_not(fault, Mesh(2, 2), 0))
    assert why_not(fault, Mesh(1, 1, 2), 1) is None


def test_a_drill_strikes_its_rank_or_every_rank_of_its_node() -> None:
    assert struck(None) == []
    assert [struck(Drill(FAULT, rank)) for rank in range(4)] == [[0], [1], [2], [3]]
    assert struck(Drill(FAULT, node="a")) == [0, 1]
    assert struck(Drill(FAULT, node="b")) == [2, 3]
    assert struck(Drill(FAULT, node="b"), nodes="abab") == [1, 3]
    assert struck(Drill(FAULT, node="c")) == []


def test_the_draw_follows_from_the_request_alone_and_is_fair() -> None:
    drill = Drill(FAULT, 1, probability=0.3)
    repeats = [replace(SPEC, repeat=repeat, seed=repeat) for repeat in range(1000)]
    first = [bool(struck(drill, spec)) for spec in repeats]
    assert first == [bool(struck(drill, spec)) for spec in repeats]
    # 4 standard deviations around 300.
    assert abs(sum(first) - 300) < 58
    assert all(struck(replace(drill, probability=1.0), spec) for spec in repeats)


def test_ranks_and_trials_are_drawn_apart() -> None:
    drill = Drill(FAULT, node="a", probability=0.5)
    specs = [replace(SPEC, ordering=ordering, probe=probe) for ordering in OrderingName for probe in ProbeName]
    drawn = {draw(spec, drill, world_rank) for spec in specs for world_rank in range(4)}
    assert len(drawn) == len(specs) * 4
    assert all(0 <= number < 1 for number in drawn)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("x", {"fault": "x"}),
        ("x:3", {"fault": "x", "world_rank": 3}),
        ("x:3:1", {"fault": "x", "world_rank": 3, "step": 1}),
        ("x:@gpu-7.rack.example", {"fault": "x", "node": "gpu-7.rack.example"}),
        ("x:@n:0:0.3", {"fault": "x", "node": "n", "step": 0, "probability": 0.3}),
        ("x:0:0:1", {"fault": "x", "world_rank": 0, "step": 0, "probability": 1.0}),
    ],
)
def test_a_drill_in_one_word(text: str, fields: dict[str, object]) -> None:
    assert read_drill(text) == fields


@pytest.mark.parametrize(
    "text", ["", ":1", "x:", "x:y", "x:@", "x:1:2:3:4", "x:-1", "x:1:a", "x:1:0:often", "x:1:0:-1"]
)
def test_what_is_no_drill_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="needs the form FAULT"):
        read_drill(text)
