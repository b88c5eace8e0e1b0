"""Collectives that do not fit together end in an error that names the rank: no mixed values, no abort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import run_world
from torch import Tensor

from workers import step
from workers.communicator import Finished, Pending, ProcessGroups
from workers.contract import (
    BatchSpec,
    Dtype,
    Mesh,
    ModelSpec,
    OrderingName,
    Primitive,
    ProbeName,
    RankFailure,
    StepReport,
    TrialSpec,
)
from workers.errors import CollectiveError, CollectiveMismatchError
from workers.handshake import Handshake
from workers.mesh import Members
from workers.session import first_cause

# Both buckets of own_bucket are of one size on the first stage: the tied weight, and a layer of as many elements.
MODEL = ModelSpec(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, seq_len=16)
STEPS = 2
OVERLAP = {"overlap": True}
BF16 = {"grad_reduce_dtype": Dtype.BFLOAT16}


class Reordered(ProcessGroups):
    """Sums the second bucket first: the first is put off until the second comes."""

    held: Mapping[int, Tensor] | None = None

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        if self.held is None:
            self.held = buckets
            return Finished()
        first, self.held = self.held, None
        super().start_reduce_scatter(members, buckets).wait()
        return super().start_reduce_scatter(members, first)


class Shorter(ProcessGroups):
    """Leaves the last shard's worth of elements out."""

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        short = {rank: bucket_N[: -len(members)] for rank, bucket_N in buckets.items()}
        return super().start_reduce_scatter(members, short)


def run_with(session: Any, spec: TrialSpec, kind: type[ProcessGroups] | None, guilty: int) -> list[Any]:
    if kind is None or session.world_rank != guilty:
        return list(session.run([spec]))
    step.ProcessGroups = kind  # type: ignore[misc]
    try:
        return list(session.run([spec]))
    finally:
        step.ProcessGroups = ProcessGroups  # type: ignore[misc]


def failures_with(mesh: Mesh, kind: type[ProcessGroups], guilty: int, **changes: Any) -> list[RankFailure]:
    spec = TrialSpec(ProbeName.EXACT, OrderingName.OWN_BUCKET, mesh, MODEL, BatchSpec(1, 4), steps=STEPS)
    results = run_world(mesh.world_size, run_with, replace(spec, **changes), kind, guilty)
    return [item for items in results for item in items if isinstance(item, RankFailure)]


@pytest.mark.parametrize(("kind", "what"), [(Reordered, "order"), (Shorter, "shape")], ids=["order", "shape"])
@pytest.mark.parametrize("guilty", range(4))
def test_each_guilty_rank_of_two_replicas_is_named(kind: type[ProcessGroups], what: str, guilty: int) -> None:
    found = failures_with(Mesh(2, 2), kind, guilty)
    cause = first_cause(found)
    assert cause is not None
    assert (cause.code, cause.world_rank, cause.phase.value) == ("collective_mismatch", guilty, "dp_sync"), cause
    assert f"world_rank {guilty} is about to enter another collective than its group: {what} differs" in cause.message
    assert {failure.code for failure in found if failure.world_rank != guilty} <= {"collective_failed"}


@pytest.mark.parametrize(
    "changes", [{"overlap": True}, BF16, BF16 | {"overlap": True}], ids=["overlap", "bf16", "both"]
)
@pytest.mark.parametrize(("kind", "what", "guilty"), [(Reordered, "order", 1), (Shorter, "shape", 2)])
def test_one_of_two_replicas_is_named_where_backward_sets_the_order_and_where_copies_are_summed(
    kind: type[ProcessGroups], what: str, guilty: int, changes: dict[str, Any]
) -> None:
    found = failures_with(Mesh(2, 2), kind, guilty, **changes)
    cause = first_cause(found)
    assert cause is not None
    assert (cause.code, cause.world_rank) == ("collective_mismatch", guilty), cause
    assert f"world_rank {guilty} is about to enter another collective than its group: {what} differs" in cause.message


@pytest.mark.parametrize(("kind", "what"), [(Reordered, "order"), (Shorter, "shape")], ids=["order", "shape"])
@pytest.mark.parametrize("guilty", range(3))
def test_of_three_the_majority_names_it_under_overlap(kind: type[ProcessGroups], what: str, guilty: int) -> None:
    cause = first_cause(failures_with(Mesh(3, 1), kind, guilty, overlap=True))
    assert cause is not None
    assert (cause.code, cause.world_rank) == ("collective_mismatch", guilty), cause
    assert f"{what} differs" in cause.message


def agree_on(session: Any, case: Sequence[tuple[Sequence[int], int]], copied: bool) -> str:
    """What a rank makes of its case: (buckets announced, in order; the one that it is about to sum), of two of 4."""
    announced, issued = case[session.world_rank]
    buffer_N = torch.zeros(8)
    handshake = Handshake(session.world_rank, (0, 1), plan=None)
    handshake.know([buffer_N])
    buckets = buffer_N.split(4)
    carried = [bucket.bfloat16() if copied else bucket for bucket in buckets]
    for index in announced:
        handshake.announce(buckets[index], carried[index])
    assert dist.group.WORLD is not None
    try:
        handshake.agree(dist.group.WORLD, (0, 1), Primitive.REDUCE_SCATTER, carried[issued], -1, alike=True)
    except CollectiveMismatchError:
        return "left"
    except CollectiveError:
        return "noticed"
    return "agreed"


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
def test_who_does_something_else_than_announced_has_left_and_of_two_plans_neither_is_believed(copied: bool) -> None:
    usual = ((0, 1), 0)
    cases = {
        (usual, usual): ["agreed", "agreed"],
        (usual, ((0, 1), 1)): ["noticed", "left"],
        (((0, 1), 1), usual): ["left", "noticed"],
        (usual, ((1, 0), 1)): ["left", "left"],
    }
    for case, expected in cases.items():
        assert run_world(2, agree_on, case, copied) == expected, case


def test_without_a_fault_nobody_objects() -> None:
    spec = TrialSpec(ProbeName.EXACT, OrderingName.OWN_BUCKET, Mesh(2, 2), MODEL, BatchSpec(1, 4), steps=STEPS)
    for items in run_world(4, run_with, spec, None, 0):
        assert [type(item) for item in items] == [StepReport] * STEPS
