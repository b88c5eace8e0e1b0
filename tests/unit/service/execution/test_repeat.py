"""When a failed run is worth repeating with its ranks in other seats, and what is said where it is not."""

from __future__ import annotations

import pytest

from service.domain.cause import Attribution, Cause, Seat, unknown
from service.execution.chronicle import cause_reason
from service.execution.messages import Repeated
from service.execution.repeat import Failure, other_seats
from workers.contract import Reason


def failure(*suspects: set[int]) -> Failure:
    return Failure((), ("exact/fixed",), tuple(frozenset(each) for each in suspects))


def seats(nodes: str, devices: str | None = None) -> list[Seat]:
    return [Seat(f"node-{node}", devices and devices[i]) for i, node in enumerate(nodes)]


def test_the_suspects_get_to_another_node() -> None:
    assert other_seats(failure({1}), seats("ab")) == (1, 0)


def test_on_one_node_everybody_gets_another_gpu() -> None:
    assert other_seats(failure({1}), seats("aa", "xy")) == (1, 0)


@pytest.mark.parametrize(
    ("suspects", "nodes", "why"),
    [
        (set(), "ab", "do not point to any rank"),
        ({0}, "aa", "all ranks sit on node-a"),
        ({0, 1, 2}, "aaab", "more than half of the ranks sit on one of node-a, node-b"),
    ],
)
def test_a_repeat_that_would_show_nothing_says_why(suspects: set[int], nodes: str, why: str) -> None:
    repeated = other_seats(failure(suspects), seats(nodes))
    assert isinstance(repeated, Repeated)
    assert repeated.attribution.cause is Cause.UNKNOWN
    assert why in repeated.attribution.message
    assert repeated.seats == ()


def test_the_reason_names_what_the_fault_follows() -> None:
    hardware = Attribution(Cause.HARDWARE, "the fault stays on node-b", (), "node-b", ("x",))
    assert cause_reason(hardware) == Reason("cause_hardware", "The fault stays on node-b.", node="node-b")
    software = Attribution(Cause.SOFTWARE, "the fault follows world_rank 2", (2,))
    assert cause_reason(software) == Reason("cause_software", "The fault follows world_rank 2.", world_rank=2)
    assert cause_reason(unknown("no time")) == Reason("cause_unknown", "No time.")
