"""Sums over the replicas in bfloat16: the bound holds in every order, the exact probe fits, and faults still show."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_mesh import JudgedMesh, each
from measured import every_trial
from torch import Tensor

from workers.communicator import VirtualRanks
from workers.contract import BatchSpec, Device, Dtype, Mesh, ModelSpec, OrderingName, ProbeName
from workers.divergence import UNIT_ROUNDOFF, rounding_bound
from workers.exactness import WIRE_LIMITS, exact_bound, replicas_at_once, takes_part
from workers.experiment import ExperimentSpec, trials
from workers.grad_sync import Prescale, prescale_of, scale_of, start_bucket
from workers.layout import PrescaleKind
from workers.orderings import SyncPhase
from workers.plan import violations
from workers.reference import exact_tied_gradients
from workers.wire import FLOAT32_WIRE, Wire

BF16 = Dtype.BFLOAT16
EXACT = (ProbeName.EXACT,)
VALUES = st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100)
TINY = st.floats(width=32, allow_nan=False, min_value=-(2.0**-120), max_value=2.0**-120)


def bfloat16(dp: int, divisor: int, kind: PrescaleKind = PrescaleKind.DIVIDE, in_collective: bool = False) -> Prescale:
    return Prescale(kind, divisor, in_collective, Wire(BF16, dp, divisor))


def random_order_sum(terms: list[Tensor], order: random.Random) -> Tensor:
    pool = list(terms)
    while len(pool) > 1:
        a, b = (pool.pop(order.randrange(len(pool))) for _ in range(2))
        pool.append(a + b)
    return pool[0]


def carried_sum(terms: list[Tensor], prescale: Prescale, order: random.Random) -> Tensor:
    """One bucket's sum over the replicas, back in float32."""
    carried = [prescale.wire.load(term) for term in terms]
    for each_ in carried:
        prescale.apply(each_)
    total = random_order_sum(carried, order).clone()
    prescale.settle(total)
    back = torch.zeros(1)
    prescale.wire.unload(total, back)
    return back


@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(st.tuples(VALUES | TINY, VALUES | TINY), min_size=2, max_size=16),
    divides=st.booleans(),
    kind=st.sampled_from(PrescaleKind),
    in_collective=st.booleans(),
    ties_first=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_no_order_of_bfloat16_additions_leaves_the_bound(
    pairs: list[tuple[float, float]],
    divides: bool,
    kind: PrescaleKind,
    in_collective: bool,
    ties_first: bool,
    order: random.Random,
) -> None:
    dp = len(pairs)
    prescale = bfloat16(dp, dp if divides else 1, kind, in_collective)
    ends = [[torch.tensor([pair[end]]) for pair in pairs] for end in (0, 1)]
    if ties_first:
        tied = [a + b for a, b in zip(*ends, strict=True)]
        computed = carried_sum(tied, prescale, order)
    else:
        computed = carried_sum(ends[0], prescale, order) + carried_sum(ends[1], prescale, order)
    values = [value for pair in pairs for value in pair]
    truth = sum((Fraction(value) for value in values), Fraction(0)) / prescale.divisor
    magnitude = (torch.tensor(values, dtype=torch.float64).abs() * prescale.factor).sum()
    bound = Fraction(float(rounding_bound(magnitude, len(values), prescale)))
    assert abs(Fraction(float(computed)) - truth) <= bound


@pytest.mark.parametrize(("dp", "divisor"), [(2, 2), (3, 3), (8, 8), (16, 1)])
def test_the_bound_counts_one_cast_one_scaling_and_the_replicas_additions(dp: int, divisor: int) -> None:
    roundings = dp - 1 + (1 if divisor & (divisor - 1) == 0 else 2)
    bound = float(rounding_bound(torch.tensor(1.0, dtype=torch.float64), 2 * dp, bfloat16(dp, divisor)))
    assert roundings * 2**-8 <= bound <= roundings * 2**-8 * (1 + dp * 2**-7)
    assert FLOAT32_WIRE.relative_error == 0


def test_a_bucket_is_float32_before_and_after_and_rounded_between() -> None:
    fine = 1 + 2.0**-10
    buckets = {rank: torch.tensor([fine, 3.0 + rank, fine, 3.0 + rank]) for rank in range(2)}
    started = start_bucket(SyncPhase.DP_REDUCE_SCATTER, (0, 1), buckets, VirtualRanks(2), bfloat16(2, 2))
    started.wait()
    assert all(bucket.dtype is torch.float32 for bucket in buckets.values())
    # The owned half is summed; the other half went over the wire and is rounded and scaled all the same.
    assert buckets[0].tolist() == [1.0, 3.5, 0.5, 1.5]
    assert buckets[1].tolist() == [0.5, 2.0, 1.0, 3.5]


def test_tokens_divide_main_grad_and_the_true_sum_knows_the_wire() -> None:
    for spec in every_trial(Mesh(3, 2), 1, grad_reduce_dtype=BF16):
        assert prescale_of(spec).wire == scale_of(spec).wire == Wire(BF16, 3, prescale_of(spec).divisor)


# --- the exact probe -------------------------------------------------------------------------------------------------


def exact_experiment(mesh: Mesh, **changes: object) -> ExperimentSpec:
    return ExperimentSpec(mesh=mesh, probes=EXACT, grad_reduce_dtype=BF16, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(2, 2), Mesh(3, 2), Mesh(2, 3), Mesh(4, 4), Mesh(8, 2), Mesh(2, 16)])
def test_named_models_fit_into_eight_bits_with_two_replicas_at_least(mesh: Mesh) -> None:
    spec = exact_experiment(mesh)
    assert violations(spec) == ()
    trial = trials(spec, Device.CPU)[0]
    at_once = replicas_at_once(trial.model, trial.batch, mesh.dp, BF16)
    assert at_once == min(mesh.dp, 2)
    assert exact_bound(trial.model, trial.batch, at_once) <= WIRE_LIMITS[BF16]
    # Once around, everyone has had a turn, and nobody more than the others.
    turns = [sum(takes_part(trial, step, dp_rank) for step in range(mesh.dp)) for dp_rank in range(mesh.dp)]
    assert turns == [at_once] * mesh.dp


def test_who_rests_gives_nothing_to_any_sum() -> None:
    trial = trials(exact_experiment(Mesh(4, 2)), Device.CPU)[0]
    for step in range(4):
        given_ = [any(bool(grad_P.any()) for grad_P in pair if grad_P is not None) for pair in gradients(trial, step)]
        assert given_ == [takes_part(trial, step, dp_rank) for dp_rank in range(4)]


def gradients(trial, step):  # type: ignore[no-untyped-def]
    return [exact_tied_gradients(trial, step, dp_rank) for dp_rank in range(trial.mesh.dp)]


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    model, batch = ModelSpec(64, 32, 4, 4, 16), BatchSpec(1, 4)
    (found,) = violations(exact_experiment(Mesh(2, 2), model=model, batch=batch))
    assert found.field == ("grad_reduce_dtype",)
    assert "exact up to 256" in found.rule
    assert "float32" in found.remedy
    # Unsigned, a replica whose turn never comes is not seen at all.
    (found,) = violations(exact_experiment(Mesh(8, 8), steps=3))
    assert (found.field, found.value) == (("steps",), 3)
    assert "4 steps" in found.remedy
    assert violations(exact_experiment(Mesh(8, 8), steps=4)) == ()


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", list(ProbeName))
@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(4, 2)], ids=str)
def test_a_contribution_that_is_dropped_is_still_seen(mesh: Mesh, probe: ProbeName) -> None:
    trial = trials(exact_experiment(mesh), Device.CPU)[0]
    model = trial.model if probe is ProbeName.EXACT else ModelSpec(40, 12, 4, 3, 5)
    for guilty in range(len(JudgedMesh(OrderingName.OWN_BUCKET, mesh, probe, model, grad_reduce_dtype=BF16).holders)):
        world = JudgedMesh(OrderingName.OWN_BUCKET, mesh, probe, model, batch=trial.batch, grad_reduce_dtype=BF16)
        world.held(world.holders[guilty]).zero_()
        diverged = each(world.judge(), lambda j: j.divergence.diverged_elements)
        assert sum(diverged.values()) > world.local[world.holders[guilty]].numel()


def test_the_judge_reports_how_little_it_sees_in_bfloat16() -> None:
    def power(dtype: Dtype) -> float:
        world = JudgedMesh(OrderingName.OWN_BUCKET, Mesh(8, 2), grad_reduce_dtype=dtype)
        return max(judgement.divergence.min_detectable_share for judgement in world.judge().values())

    assert power(Dtype.FLOAT32) < 2**10 * UNIT_ROUNDOFF
    assert 0.05 < power(BF16) < 1
