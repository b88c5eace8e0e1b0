"""Which of several ranks' symptoms is told as the cause, and how a hang is told."""

from __future__ import annotations

from service.execution.failure import Death, Whereabouts, deadline_detail, first_cause, grace_s
from workers.contract import Position, RankFailure, RankPhase

AT_TIE = Position(1, RankPhase.TIE, 2, 1, 40)


def failure(world_rank: int, *, collateral: bool, code: str = "rank_raised") -> RankFailure:
    return RankFailure(world_rank, f"node-{world_rank}", RankPhase.DP_SYNC, 3, 1, code, "it broke", collateral)


def test_a_death_outranks_complaints_that_arrived_before_it() -> None:
    symptoms = [failure(0, collateral=True), failure(2, collateral=False), Death(1, "node-1", AT_TIE)]
    detail = first_cause(symptoms)
    assert (detail.code, detail.world_rank, detail.node, detail.phase) == ("rank_died", 1, "node-1", "tie")
    assert "trial 2, step 1" in detail.message


def test_an_own_error_outranks_a_broken_collective() -> None:
    detail = first_cause([failure(0, collateral=True), failure(3, collateral=False, code="drill_fault")])
    assert (detail.code, detail.world_rank, detail.phase) == ("drill_fault", 3, "dp_sync")


def test_of_equals_the_first_to_arrive_is_the_cause() -> None:
    assert first_cause([failure(2, collateral=False), failure(1, collateral=False)]).world_rank == 2
    assert first_cause([failure(3, collateral=True), failure(0, collateral=True)]).world_rank == 3


def test_a_rank_that_died_before_it_said_anything_was_forming() -> None:
    assert first_cause([Death(0, "node-0", None)]).phase == "forming"


def test_the_less_a_symptom_explains_the_longer_it_waits_for_another() -> None:
    assert grace_s(Death(0, "n", None)) < grace_s(failure(0, collateral=False)) < grace_s(failure(0, collateral=True))


def test_a_hang_names_who_never_arrived() -> None:
    positions = {
        0: Position(0, RankPhase.DP_SYNC, 1, 0, 12),
        1: Position(1, RankPhase.FORWARD_BACKWARD, 1, 0, 11),
        2: Position(2, RankPhase.DP_SYNC, 1, 0, 12),
    }
    detail = deadline_detail(30, Whereabouts(3, positions, {1: "node-b"}))
    assert (detail.code, detail.world_rank, detail.node) == ("deadline_exceeded", 1, "node-b")
    assert detail.phase == "forward_backward"
    assert "deadline_s=30" in detail.message


def test_a_hang_names_the_stack_of_its_trial() -> None:
    positions = {r: Position(r, RankPhase.DP_SYNC, 1, 0, 12 - r) for r in range(2)}
    ranks = Whereabouts(2, positions, {})
    assert "with stack 'acme' under test" in deadline_detail(30, ranks, ("reference", "acme")).message
    assert "under test" not in deadline_detail(30, ranks, ("acme", "reference")).message


def test_a_rank_that_never_spoke_is_the_one_that_holds_up_the_others() -> None:
    detail = deadline_detail(5, Whereabouts(2, {0: Position(0, RankPhase.BUILDING, 0, None, 3)}, {}))
    assert (detail.world_rank, detail.phase) == (1, "forming")


def test_ranks_at_one_point_accuse_nobody_in_particular() -> None:
    positions = {r: Position(r, RankPhase.STATISTICS, 0, 0, 7) for r in range(2)}
    detail = deadline_detail(5, Whereabouts(2, positions, {}))
    assert detail.world_rank is None
    assert "none of 2 ranks" in detail.message


def test_a_rank_that_does_not_answer_holds_up_even_those_that_are_behind() -> None:
    positions = {r: Position(r, RankPhase.DP_SYNC, 0, 0, 7 + r) for r in range(3)}
    detail = deadline_detail(5, Whereabouts(3, positions, {2: "node-c"}, silent=frozenset({2})))
    assert (detail.world_rank, detail.node, detail.phase) == (2, "node-c", "dp_sync")
    assert "does not answer" in detail.message
