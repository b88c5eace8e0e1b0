"""Validations and reports to store."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from service.domain.validation import Validation, new_validation_id
from service.storage import queue, validations
from service.storage.session import Database
from workers.contract import (
    Contributor,
    Deviation,
    DeviationKind,
    DivergenceRow,
    End,
    Judgement,
    NormRow,
    Observation,
    OrderingName,
    Phase,
    ProbeName,
    Reason,
    ReplicaRow,
    Role,
    StepReport,
    TiedRow,
    TraceRow,
    TrialSummary,
    Verdict,
)

DEVIATION = Deviation(
    kind=DeviationKind.DROPPED,
    contributors=(Contributor(End.LM_HEAD, 1, 3),),
    num_contributors=1,
    factor=0.0,
    uncertainty=5e-324,
    first_element=0,
    num_elements=7,
)
Queue = Callable[..., Awaitable[Validation]]
Hold = Callable[..., Awaitable[queue.Claim]]


@pytest.fixture
def enqueue(database: Database) -> Queue:
    """Store a validation that waits; each test uses a cluster of its own, so that claims do not mix."""

    async def store(cluster: str, **overrides: Any) -> Validation:
        values: dict[str, Any] = {
            "validation_id": new_validation_id(),
            "cluster": cluster,
            "request": {"mesh": {"dp": 2, "pp": 2}, "drill": None},
            "labels": {},
            "num_ranks": 4,
            "deadline_s": 120.0,
        }
        async with database.transaction() as connection:
            validation, created = await validations.insert(connection, **values | overrides)
        assert created
        return validation

    return store


@pytest.fixture
def hold(database: Database, enqueue: Queue) -> Hold:
    """Store a validation and claim it; with `running=True`, bring it to running."""

    async def take(cluster: str, *, dispatcher_id: str = "d1", running: bool = False) -> queue.Claim:
        await enqueue(cluster)
        async with database.transaction() as connection:
            (claim,) = await queue.claim(connection, cluster=cluster, dispatcher_id=dispatcher_id, lease_s=60, limit=1)
            if running:
                assert await queue.mark_running(connection, claim.id, claim.attempt, [], {})
        return claim

    return take


@pytest.fixture
def reports() -> tuple[StepReport, ...]:
    """Two trials of two steps on four ranks (dp=2, pp=2), with every kind of float there is."""
    return tuple(
        _report(trial_index, step, world_rank)
        for trial_index in range(2)
        for step in range(2)
        for world_rank in range(4)
    )


@pytest.fixture
def judgement() -> Judgement:
    """A fail with one trial whose figures are not finite."""
    trial = TrialSummary(
        probe=ProbeName.GPT,
        ordering=OrderingName.BUGGY,
        role=Role.CONTROL,
        misowned_elements=2048,
        predicted_diverged_elements=2**40,
        diverged_elements=2048,
        missed_elements=0,
        unexpected_elements=0,
        compared_elements=4096,
        nonfinite_elements=1,
        reference_exceeded_elements=0,
        tied_unequal_elements=2048,
        tied_exceeded_elements=2048,
        tied_max_abs=math.inf,
        reference_max_abs=None,
        max_abs_error=0.1,
        weights_max_abs=5e-324,
        replicas_agree=True,
        grad_norm=math.inf,
        grad_norm_max_error=None,
        missing_reports=((0, 1, 3),),
        ok=False,
    )
    observation = Observation("straggler", "world_rank 3 held its peers up", 3)
    return Judgement(
        Verdict.FAIL, (Reason("non_finite", "1 value of gpt under buggy is not finite"),), (trial,), (observation,)
    )


def _report(trial_index: int, step: int, world_rank: int) -> StepReport:
    pp_rank, dp_rank = divmod(world_rank, 2)
    end = End.LM_HEAD if pp_rank else End.WTE
    return StepReport(
        trial_index=trial_index,
        probe=ProbeName.GPT,
        ordering=(OrderingName.BUGGY, OrderingName.FIXED)[trial_index],
        repeat=0,
        step=step,
        world_rank=world_rank,
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        tp_rank=0,
        divergence=(_divergence(end, world_rank),),
        trace=tuple(_trace(phase, end, shard) for phase in Phase for shard in range(2)),
        tied=TiedRow(1024, 7, -0.0, 7, 5e-324, 1024) if pp_rank == 0 else None,
        replica=ReplicaRow("before", f"after-{step}"),
        loss=4.25 if pp_rank else None,
        seconds={"forward_backward": 0.001, "tie": math.nan},
        grad_norm=NormRow(5e-324, math.inf, 0.1) if pp_rank == 0 else NormRow(math.nan, None, None),
        compute_seconds={"forward_backward": 0.001},
    )


def _divergence(end: End, world_rank: int) -> DivergenceRow:
    return DivergenceRow(
        end=end,
        owned_elements=1024,
        diverged_elements=0 if world_rank else 2**40,
        predicted_elements=0,
        missed_elements=0,
        unexpected_elements=0,
        nonfinite_elements=0,
        first_diverged=None if world_rank else 0,
        last_diverged=None if world_rank else 2**40,
        max_abs_error=(math.inf, math.nan, -math.inf, 0.1)[world_rank],
        relative_l2_error=1.0000000000000002,
        max_error_over_bound=5e-324,
        ratio_to_expected=math.nan,
        reference_max_abs_error=None,
        reference_exceeded_elements=0,
        min_detectable_share=1.7976931348623157e308,
        sum=-0.0,
        l2=1,
        digest="00ff",
        deviations=() if world_rank else (DEVIATION,),
    )


def _trace(phase: Phase, end: End, shard: int) -> TraceRow:
    return TraceRow(
        phase=phase, end=end, shard=shard, num_elements=512, sum=0.5, l2=math.inf, digest=f"{phase}-{shard}"
    )
