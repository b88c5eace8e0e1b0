"""Each element exactly once, or everything everywhere: what of the replicas' claims is named."""

from __future__ import annotations

import pytest

from workers.checks.ownership import ownership_findings
from workers.contract import StackFault
from workers.intervals import Interval, Intervals

WHOLE: Intervals = (Interval(0, 8),)
LEFT: Intervals = (Interval(0, 4),)
RIGHT: Intervals = (Interval(4, 8),)


@pytest.mark.parametrize("claims", [(WHOLE, WHOLE), (LEFT, RIGHT), (RIGHT, LEFT), (WHOLE, ()), ((), WHOLE)])
def test_one_owner_each_or_all_of_them_is_right(claims: tuple[Intervals, ...]) -> None:
    assert not list(ownership_findings(["w"], [8], [[claim] for claim in claims]))


def test_a_gap_is_named_with_its_first_element() -> None:
    (finding,) = ownership_findings(["w"], [8], [[LEFT], [(Interval(5, 7),)]])
    assert (finding.fault, finding.parameter, finding.num_elements) == (StackFault.OWNERSHIP_GAP, "w", 2)
    assert "2 of 8 elements that no replica owns, from element 4 on" in finding.detail


def test_an_overlap_is_named_with_its_owners() -> None:
    (finding,) = ownership_findings(["w"], [8], [[LEFT], [(Interval(3, 8),)], [(Interval(3, 4),)]])
    assert (finding.fault, finding.num_elements) == (StackFault.OWNERSHIP_OVERLAP, 1)
    assert "dp ranks [0, 1, 2] all claim 3 to 3" in finding.detail


def test_a_claim_can_have_both_faults_and_only_its_parameter_is_named() -> None:
    found = list(ownership_findings(["right", "wrong"], [8, 8], [[WHOLE, LEFT], [WHOLE, LEFT]]))
    assert [(one.fault, one.parameter) for one in found] == [
        (StackFault.OWNERSHIP_GAP, "wrong"),
        (StackFault.OWNERSHIP_OVERLAP, "wrong"),
    ]
