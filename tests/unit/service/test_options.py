"""Options become the request that the API documents; what was not given is not in it."""

from __future__ import annotations

from typing import Any

import pytest

from service.options import UsageFault, build_request, parse_drill, parse_labels, parse_model
from workers.contract import Dtype, OrderingName, ProbeName

NOTHING: dict[str, Any] = {"model": None, "labels": None, "drill": None}


def test_nothing_given_is_an_empty_request() -> None:
    assert build_request(**NOTHING, mesh={"dp": None, "pp": None}, probes=None, orderings=[], steps=None) == {}


def test_everything_given_arrives_as_plain_json() -> None:
    request = build_request(
        model="vocab_size=50257, hidden_size=6",
        labels=["team=a=b"],
        drill="kill_in_collective:1",
        mesh={"dp": 3, "pp": None},
        probes=[ProbeName.EXACT],
        orderings=[OrderingName.ALL_REDUCE, OrderingName.BUGGY],
        dtype=Dtype.BFLOAT16,
        seed=0,
    )
    assert request == {
        "mesh": {"dp": 3},
        "model": {"vocab_size": 50257, "hidden_size": 6},
        "probes": ["exact"],
        "orderings": ["all_reduce", "buggy"],
        "dtype": "bfloat16",
        "seed": 0,
        "labels": {"team": "a=b"},
        "drill": {"fault": "kill_in_collective", "world_rank": 1},
    }
    assert type(request["dtype"]) is str


def test_a_name_stays_a_name() -> None:
    assert parse_model("tiny") == "tiny"


def test_sizes_out_of_range_are_for_the_server_to_refuse() -> None:
    assert parse_model("num_layers=-1") == {"num_layers": -1}


@pytest.mark.parametrize("text", ["layers=4", "vocab_size=", "vocab_size=4.5", "vocab_size=1,", "=3", "vocab_size=--1"])
def test_sizes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageFault, match="needs NAME=NUMBER with NAME one of vocab_size"):
        parse_model(text)


@pytest.mark.parametrize("pairs", [["a"], ["=b"], ["a=1", "a=2"]])
def test_labels_that_cannot_be_read(pairs: list[str]) -> None:
    with pytest.raises(UsageFault, match="--label"):
        parse_labels(pairs)


def test_a_drill_by_place() -> None:
    assert parse_drill("raise_in_collective:3:1") == {"fault": "raise_in_collective", "world_rank": 3, "step": 1}
    assert parse_drill("raise_in_collective:@a") == {"fault": "raise_in_collective", "node": "a"}


def test_a_drill_that_cannot_be_read() -> None:
    with pytest.raises(UsageFault, match="--drill x:y: needs the form FAULT"):
        parse_drill("x:y")
