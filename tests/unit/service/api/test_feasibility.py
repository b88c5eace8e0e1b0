from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from service.api.feasibility import shortfall
from workers.contract import Device


@dataclass(frozen=True)
class Totals:
    num_nodes: int
    num_cpus: float
    num_gpus: float
    cluster: str = "c"
    observed_at: datetime = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("num_ranks", "device", "num_nodes", "totals", "fits"),
    [
        (4, Device.CPU, None, Totals(1, 4.0, 0.0), True),
        (5, Device.CPU, None, Totals(1, 4.9, 0.0), False),
        (4, Device.CUDA, None, Totals(1, 64.0, 3.0), False),
        (4, Device.CUDA, None, Totals(1, 64.0, 4.0), True),
        (4, Device.CUDA, None, Totals(1, 2.0, 4.0), False),
        (4, Device.AUTO, None, Totals(1, 64.0, 0.0), True),
        (4, Device.AUTO, None, Totals(1, 64.0, 2.0), False),
        (4, Device.CPU, 3, Totals(2, 64.0, 0.0), False),
        (1, Device.CPU, None, Totals(0, 0.0, 0.0), False),
    ],
)
def test_totals_decide(num_ranks, device, num_nodes, totals, fits):
    assert (shortfall(num_ranks, device, num_nodes, totals) is None) is fits


def test_the_refusal_says_what_it_needs_and_what_there_is():
    problem = shortfall(12, Device.AUTO, None, Totals(2, 64.0, 8.0))
    assert problem is not None
    assert problem.kind.status == 409
    assert problem.extra == {
        "needs": {"num_ranks": 12, "device": "cuda", "num_nodes": 1},
        "has": {"num_nodes": 2, "num_cpus": 64.0, "num_gpus": 8.0, "observed_at": "2026-01-02T00:00:00Z"},
    }
    assert "12 ranks" in problem.detail
    assert "8 GPUs" in problem.detail
