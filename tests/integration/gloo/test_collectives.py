"""The self-test on live ranks: everything right, every group and primitive named; and a liar found, whoever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from gloo_world import rank_run, run_world
from measured import every_trial
from torch import Tensor

from workers.checks.collectives import CASES, SWEEP_SIZES, WARM_SIZES
from workers.communicator import ProcessGroups
from workers.contract import CollectiveOp, Mesh, OrderingName, Primitive, ProbeName, StepReport, TrialSpec, Verdict
from workers.errors import CollectiveError
from workers.mesh import Members
from workers.verdict import judge

GROUPS = {Mesh(2, 2): {"dp", "pp+tie", "ends+world"}, Mesh(3, 1): {"dp+ends+world"}}
GROUPS[Mesh(2, 3)] = {"dp", "pp", "tie", "ends", "world"}


def exact_trials(mesh: Mesh) -> list[TrialSpec]:
    orderings = (OrderingName.BUGGY, OrderingName.OWN_BUCKET)
    specs = every_trial(mesh, 1)
    return [spec for spec in specs if spec.probe is ProbeName.EXACT and spec.ordering in orderings]


def run_twice(session: Any, specs: list[TrialSpec]) -> list[Any]:
    return [rank_run(session, specs), rank_run(session, specs)]


@pytest.mark.parametrize("mesh", GROUPS, ids=str)
def test_all_is_right_on_every_group(mesh: Mesh) -> None:
    specs = exact_trials(mesh)
    results = run_world(mesh.world_size, run_twice, specs)
    for run, sizes in enumerate((SWEEP_SIZES, WARM_SIZES)):
        reports = [report for rank in results for report in rank[run]]
        for report in reports:
            assert isinstance(report, StepReport), report
            assert bool(report.collectives) == (report.trial_index == 0)
        judgement = judge(specs, reports)
        assert not [reason for reason in judgement.reasons if reason.code.startswith("collective")]
        tested = {(row.group, row.primitive, row.op) for row in judgement.collectives}
        assert tested == {(group, *case) for group in GROUPS[mesh] for case in CASES}
        for row in judgement.collectives:
            assert row.ok
            assert row.num_elements == sizes
            assert row.seconds > 0
            assert row.size_bytes >= 4 * sum(sizes)


class Liar(ProcessGroups):
    """One element of what each sum left here is off by a little; nothing else knows."""

    def all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> None:
        super().all_reduce(members, tensors)
        tensors[self.hosted[0]][-1] += 0.5


class Absent(ProcessGroups):
    """What this rank gives to a sum is lost."""

    def reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> None:
        bucket_N = buckets[self.hosted[0]]
        kept_N = bucket_N.clone()
        bucket_N.zero_()
        super().reduce_scatter(members, buckets)
        size, me = bucket_N.numel() // len(members), members.index(self.hosted[0])
        kept_N[me * size : (me + 1) * size] = bucket_N[me * size : (me + 1) * size]
        bucket_N.copy_(kept_N)


class Broken(ProcessGroups):
    """A primitive that the backend does not have."""

    def broadcast(self, members: Members, source: int, tensors: Mapping[int, Tensor]) -> None:
        raise RuntimeError("no such kernel")


def run_lying(session: Any, specs: list[TrialSpec], kind: type[ProcessGroups], guilty: int | None) -> list[Any]:
    from workers.checks import collectives

    if guilty is None or session.world_rank == guilty:
        collectives.ProcessGroups = kind  # type: ignore[misc]
    try:
        return rank_run(session, specs)
    finally:
        collectives.ProcessGroups = ProcessGroups  # type: ignore[misc]


@pytest.mark.parametrize("guilty", range(4))
def test_a_wrong_element_fails_with_all_its_names(guilty: int) -> None:
    specs = exact_trials(Mesh(2, 2))
    results = run_world(4, run_lying, specs, Liar, guilty)
    judgement = judge(specs, [report for items in results for report in items])
    assert judgement.verdict is Verdict.FAIL
    told = [reason.message for reason in judgement.reasons if reason.code == "collective_wrong"]
    assert len(told) == len(GROUPS[Mesh(2, 2)]) * 2, "sum and average, on each group"
    for message in told:
        assert f"is wrong on world ranks [{guilty}]: of 1 elements, element 0 is" in message
    wrong = {(row.group, row.primitive, row.op) for row in judgement.collectives if not row.ok}
    ops = (CollectiveOp.SUM, CollectiveOp.AVERAGE)
    assert wrong == {(group, Primitive.ALL_REDUCE, op) for group in GROUPS[Mesh(2, 2)] for op in ops}


@pytest.mark.parametrize("guilty", range(3))
def test_a_lost_share_is_traced_to_its_rank(guilty: int) -> None:
    specs = exact_trials(Mesh(3, 1))
    results = run_world(3, run_lying, specs, Absent, guilty)
    judgement = judge(specs, [report for items in results for report in items])
    told = [reason.message for reason in judgement.reasons if reason.code == "collective_wrong"]
    assert len(told) == 2
    for message in told:
        assert message.startswith("self-test: reduce_scatter (")
        assert f"as if the share of world_rank {guilty} were lost or changed" in message


def test_a_primitive_that_raises_is_named() -> None:
    for items in run_world(2, run_lying, exact_trials(Mesh(1, 2)), Broken, None):
        (failure,) = items
        assert (failure.code, failure.phase.value) == (CollectiveError.code, "collectives")
        where = "group pp+tie+ends+world (world ranks [0, 1])"
        assert failure.message == f"self-test: broadcast on {where} of 1 elements broke: no such kernel"
