from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from service.api.feasibility import shortfall
from service.execution.messages import NodeCapacity, Placement
from workers.contract import Device
from workers.encoding import plain


@dataclass(frozen=True)
class Totals:
    num_nodes: int
    num_cpus: float
    num_gpus: float
    cluster: str = "c"
    observed_at: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    nodes: list[dict[str, Any]] = field(default_factory=list)


@pytest.mark.parametrize(
    ("num_ranks", "device", "num_nodes", "totals", "fits"),
    [
        (4, Device.CPU, None, Totals(1, 4.0, 0.0), True),
        (5, Device.CPU, None, Totals(1, 4.9, 0.0), False),
        (4, Device.CUDA, None, Totals(1, 64.0, 3.0), False),
        (4, Device.CUDA, None, Totals(1, 64.0, 4.0), True),
        (4, Device.CUDA, None, Totals(1, 2.0, 4.0), False),
        (4, Device.AUTO, None, Totals(1, 64.0, 0.0), True),
        (4, Device.AUTO, None, Totals(1, 64.0, 2.0), True),
        (4, Device.AUTO, None, Totals(1, 3.0, 8.0), False),
        (4, Device.CPU, 3, Totals(2, 64.0, 0.0), False),
        (1, Device.CPU, None, Totals(0, 0.0, 0.0), False),
    ],
)
def test_totals_decide(num_ranks, device, num_nodes, totals, fits):
    assert (shortfall(num_ranks, device, Placement(num_nodes), totals) is None) is fits


def test_the_refusal_says_what_it_needs_and_what_there_is():
    problem = shortfall(12, Device.CUDA, Placement(), Totals(2, 64.0, 8.0))
    assert problem is not None
    assert problem.kind.status == 409
    assert problem.extra == {
        "needs": {"num_ranks": 12, "device": "cuda", "num_nodes": 1},
        "has": {"num_nodes": 2, "num_cpus": 64.0, "num_gpus": 8.0, "observed_at": "2026-01-02T00:00:00Z"},
    }
    assert "12 ranks" in problem.detail
    assert "8 GPUs" in problem.detail


NODES = plain([NodeCapacity(f"id-{name}", name, "10.0.0.1", 4.0, 0.0) for name in "ab"])


@pytest.mark.parametrize(
    ("num_ranks", "placement", "room"),
    [
        (8, Placement(), None),
        (4, Placement(exclude=("a",)), None),
        (8, Placement(exclude=("a",)), {"b": 4}),
        (6, Placement(strategy="STRICT_PACK"), {"a": 4, "b": 4}),
        (3, Placement(strategy="STRICT_SPREAD"), {"a": 1, "b": 1}),
        (6, Placement(devices_per_node=2), {"a": 2, "b": 2}),
        (2, Placement(num_nodes=2, exclude=("a",)), {"b": 1}),
    ],
)
def test_nodes_decide_where_the_total_would_do(num_ranks, placement, room):
    problem = shortfall(num_ranks, Device.CPU, placement, Totals(2, 8.0, 0.0, nodes=NODES))
    assert (problem and problem.extra["has"]["room"]) == room


def test_a_refusal_by_nodes_says_what_was_asked_of_them():
    problem = shortfall(8, Device.CPU, Placement(exclude=("a",)), Totals(2, 8.0, 0.0, nodes=NODES))
    assert problem is not None
    expected = {"num_ranks": 8, "device": "cpu", "num_nodes": 1, "exclude": ["a"], "strategy": "PACK"}
    assert problem.extra["needs"] == expected
    assert "of 2 nodes alive, 1 can be used" in problem.detail
