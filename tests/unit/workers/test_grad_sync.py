"""The phases in their order on small numbers that can be added by hand, and how the pre-scale rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from lockstep import Lockstep
from torch import Tensor

from workers.communicator import Pending, ProcessGroups, VirtualRanks
from workers.contract import TINY, BatchSpec, Dtype, Mesh, Normalization, OrderingName, Phase, ProbeName, TrialSpec
from workers.errors import SpecError
from workers.grad_buffer import GradBuffer
from workers.grad_sync import (
    Prescale,
    TokenCounts,
    counted_tokens,
    prescale_for,
    prescale_of,
    scale_of,
    sync_gradients,
    token_divisor,
)
from workers.layout import RULES, LayoutVersion, PrescaleKind, build_layout
from workers.mesh import Members
from workers.orderings import ORDERINGS
from workers.padding import valid_tokens
from workers.parameters import ParameterShape
from workers.wire import Wire


def buffers(mesh: Mesh, lead: int, version: LayoutVersion) -> dict[int, GradBuffer]:
    """Four tied elements; `lead` others lie in front of them on the last stage. Rank r holds 10**r in all of them."""
    made = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        ends = at.pp_rank in (0, mesh.pp - 1)
        shapes = [ParameterShape("tied", (4,), shared_embedding=True)] if ends else []
        # Buffers fill in reversed registration order.
        shapes += [ParameterShape("other", (lead if at.pp_rank else 4,))]
        layout = build_layout(shapes, RULES[version], mesh.dp)
        made[rank] = GradBuffer(layout, torch.device("cpu"), "tied" if ends else None)
        for shape in shapes:
            made[rank].grad(shape.name).fill_(10.0**rank)
    return made


def run(
    name: OrderingName, mesh: Mesh, lead: int = 8, average: bool = False
) -> tuple[dict[int, GradBuffer], list[Phase]]:
    ordering, phases = ORDERINGS[name], []
    made = buffers(mesh, lead, ordering.layout)
    prescale = prescale_for(ordering, ProbeName.GPT, mesh.dp, average)
    chunks = {rank: [buffer] for rank, buffer in made.items()}
    sync_gradients(ordering, mesh, chunks, VirtualRanks(mesh.world_size), prescale, phases.append)
    return made, phases


def test_phases_run_in_the_catalogue_s_order() -> None:
    assert run(OrderingName.BUGGY, Mesh(2, 2))[1] == [Phase.SCATTERED, Phase.TIED]
    assert run(OrderingName.FIXED, Mesh(2, 2))[1] == [Phase.TIED, Phase.SCATTERED]
    assert run(OrderingName.ALL_REDUCE, Mesh(2, 2))[1] == [Phase.SCATTERED, Phase.TIED]


def test_scatter_then_tie_by_hand_where_owners_agree() -> None:
    made, _ = run(OrderingName.BUGGY, Mesh(2, 2))
    # wte lies behind 4 others in 8, lm_head behind 8 in 12: dp rank 1 owns all of both.
    # Owner of wte on rank 1: (1 + 10) / 2, plus what rank 3 holds: (100 + 1000) / 2.
    assert made[1].tied_grad().tolist() == [555.5] * 4
    # Rank 0 owns none of it: its own half, plus rank 2's half.
    assert made[0].tied_grad().tolist() == [0.5 + 50] * 4


def test_the_bug_by_hand_where_owners_differ() -> None:
    made, _ = run(OrderingName.BUGGY, Mesh(2, 2), lead=0)
    # lm_head begins its buffer: of its four elements dp rank 0 owns two. wte's all belong to dp rank 1.
    assert made[1].tied_grad().tolist() == [5.5 + 500, 5.5 + 500, 5.5 + 550, 5.5 + 550]
    assert made[3].tied_grad().tolist() == made[1].tied_grad().tolist()
    assert made[2].tied_grad().tolist() == [550 + 0.5, 550 + 0.5, 50 + 0.5, 50 + 0.5]


def test_the_bug_by_hand_as_the_report_has_it_where_the_collective_averages() -> None:
    made, _ = run(OrderingName.BUGGY, Mesh(2, 2), lead=0, average=True)
    # The other end's local part has no 1/dp: what is not summed is not divided.
    assert made[1].tied_grad().tolist() == [5.5 + 1000, 5.5 + 1000, 5.5 + 550, 5.5 + 550]
    right, _ = run(OrderingName.ALL_REDUCE, Mesh(2, 2), average=True)
    assert all(buffer.tied_grad().tolist() == [555.5] * 4 for buffer in right.values())


@pytest.mark.parametrize("lead", [0, 3, 8])
@pytest.mark.parametrize("name", [OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE])
def test_right_orderings_give_owners_the_mean_of_all(name: OrderingName, lead: int) -> None:
    made, _ = run(name, Mesh(2, 2), lead)
    for rank, buffer in made.items():
        dp_rank = rank % 2
        owned = buffer.layout.owned_intervals("tied", dp_rank)
        if name is OrderingName.ALL_REDUCE:
            assert buffer.tied_grad().tolist() == [555.5] * 4
        for interval in owned:
            assert buffer.tied_grad()[interval.start : interval.stop].tolist() == [555.5] * (
                interval.stop - interval.start
            )


def test_a_stage_between_the_ends_is_only_averaged() -> None:
    made, _ = run(OrderingName.FIXED, Mesh(2, 3), lead=2)
    # Two elements: dp rank 0 owns the first, dp rank 1 the second; the other keeps its scaled local value.
    assert made[2].grad("other").tolist() == [(100 + 1000) / 2, 100 / 2]
    assert made[3].grad("other").tolist() == [1000 / 2, (100 + 1000) / 2]


def test_one_stage_has_nothing_to_tie() -> None:
    made, phases = run(OrderingName.FIXED, Mesh(2, 1))
    assert phases == [Phase.TIED, Phase.SCATTERED]
    assert made[1].tied_grad().tolist() == [5.5] * 4


def by_tokens(name: OrderingName, mesh: Mesh, alone: bool = False) -> dict[int, GradBuffer]:
    """Pipeline 0 has 30 valid tokens, pipeline 1 has 10; only its last stage knows."""
    ordering = ORDERINGS[name].normalized(Normalization.NUM_TOKENS)
    made = buffers(mesh, 8, ordering.layout)
    last = mesh.pp - 1
    at = {rank: mesh.coordinates(rank) for rank in made}
    counts = {rank: torch.tensor([(30, 10)[at[rank].dp_rank] if at[rank].pp_rank == last else 0]) for rank in made}
    prescale = Prescale(PrescaleKind.DIVIDE, mesh.dp if ordering.averages_means else 1)
    tokens = TokenCounts(ProbeName.GPT, counts)

    def rank_main(rank: int, communicator: ProcessGroups) -> None:
        held = {rank: [made[rank]]}
        sync_gradients(ordering, mesh, held, communicator, prescale, lambda _: None, tokens=tokens)

    if alone:
        Lockstep(mesh.world_size).run(rank_main)
    else:
        chunks = {rank: [buffer] for rank, buffer in made.items()}
        virtual = VirtualRanks(mesh.world_size)
        sync_gradients(ordering, mesh, chunks, virtual, prescale, lambda _: None, tokens=tokens)
    return made


def test_every_buffer_is_divided_by_all_valid_tokens_by_hand() -> None:
    made = by_tokens(OrderingName.OWN_BUCKET, Mesh(2, 3))
    # Ranks 0, 1 and 4, 5 hold the tied weight.
    owner, inner = made[0], made[2]
    assert owner.tied_grad()[0].item() == pytest.approx((1 + 10 + 1e4 + 1e5) / 40)
    assert inner.grad("other")[0].item() == pytest.approx((100 + 1000) / 40)


def test_a_mean_of_means_by_hand() -> None:
    made = by_tokens(OrderingName.MEAN_OF_MEANS, Mesh(2, 2))
    assert made[0].tied_grad()[0].item() == pytest.approx((1 / 30 + 10 / 10 + 100 / 30 + 1000 / 10) / 2)


@pytest.mark.parametrize(
    ("probe", "tokens", "divisor"),
    [
        (ProbeName.GPT, 0, 1),
        (ProbeName.GPT, 46, 46),
        (ProbeName.EXACT, 46, 64),
        (ProbeName.EXACT, 64, 64),
        (ProbeName.EXACT, 0, 1),
    ],
)
def test_tokens_are_clamped_and_exact_divides_by_powers_of_two(probe: ProbeName, tokens: int, divisor: int) -> None:
    assert token_divisor(probe, tokens) == divisor


def test_uncounted_tokens_are_an_error() -> None:
    ordering = ORDERINGS[OrderingName.FIXED].normalized(Normalization.NUM_TOKENS)
    made = {rank: [buffer] for rank, buffer in buffers(Mesh(1, 2), 8, ordering.layout).items()}
    with pytest.raises(SpecError, match="none were counted"):
        sync_gradients(ordering, Mesh(1, 2), made, VirtualRanks(2), Prescale(PrescaleKind.DIVIDE, 1), lambda _: None)


def test_the_two_prescales_round_differently() -> None:
    values = torch.tensor([5.0])
    divided, multiplied = values.clone(), values.clone()
    Prescale(PrescaleKind.DIVIDE, 3).apply(divided)
    Prescale(PrescaleKind.MULTIPLY_BY_INVERSE, 3).apply(multiplied)
    assert float(divided) == float(torch.tensor(5 / 3))
    assert float(multiplied) == float(values * torch.tensor(1 / 3)) != float(divided)


@pytest.mark.parametrize(("dp", "divisor"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024)])
def test_exact_scales_by_a_power_of_two_and_gpt_by_dp(dp: int, divisor: int) -> None:
    ordering = ORDERINGS[OrderingName.OWN_BUCKET]
    assert prescale_for(ordering, ProbeName.EXACT, dp).divisor == divisor
    assert prescale_for(ordering, ProbeName.GPT, dp) == Prescale(ordering.rule.prescale, dp)
    integers = torch.arange(-5.0, 6.0)
    scaled = integers.clone()
    prescale_for(ordering, ProbeName.EXACT, dp).apply(scaled)
    assert torch.equal(scaled * divisor, integers)


BY_TOKENS = {"normalization": Normalization.NUM_TOKENS}


@pytest.mark.parametrize("probe", list(ProbeName))
@pytest.mark.parametrize(
    ("name", "settings", "divisors", "averages"),
    [
        (OrderingName.BUGGY, {}, (4, 3), False),
        (OrderingName.ALL_REDUCE, {"average_in_collective": True}, (4, 3), True),
        (OrderingName.FIXED, BY_TOKENS, (1, 1), False),
        (OrderingName.MEAN_OF_MEANS, BY_TOKENS, (4, 3), False),
    ],
)
def test_what_a_trial_divides_by_before_its_sum(
    probe: ProbeName, name: OrderingName, settings: dict[str, Any], divisors: tuple[int, int], averages: bool
) -> None:
    spec = TrialSpec(probe, name, Mesh(3, 2), TINY, BatchSpec(1, 2), **settings)
    prescale = prescale_of(spec)
    assert prescale.divisor == divisors[probe is ProbeName.GPT]
    assert (prescale.kind, prescale.in_collective) == (ORDERINGS[name].rule.prescale, averages)
    tokens = sum(int(count) for count in counted_tokens(spec).counts.values())
    if settings == BY_TOKENS:
        assert scale_of(spec) == Prescale(PrescaleKind.MULTIPLY_BY_INVERSE, token_divisor(probe, tokens))
    else:
        assert scale_of(spec) == prescale


def test_only_the_last_stage_counts_tokens() -> None:
    spec = TrialSpec(ProbeName.GPT, OrderingName.FIXED, Mesh(2, 3), TINY, BatchSpec(1, 3), **BY_TOKENS)
    counts = [int(count) for count in counted_tokens(spec).counts.values()]
    assert counts[:4] == [0] * 4
    assert tuple(counts[4:]) == valid_tokens(spec)
    assert min(counts[4:]) > 0


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(2, 3), Mesh(4, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in OrderingName if name is not OrderingName.MEAN_OF_MEANS])
def test_a_rank_alone_does_its_part_of_what_all_do_together(name: OrderingName, mesh: Mesh) -> None:
    ordering = ORDERINGS[name]
    together, _ = run(name, mesh)
    alone = buffers(mesh, 8, ordering.layout)
    prescale = prescale_for(ordering, ProbeName.GPT, mesh.dp)

    def rank_main(rank: int, communicator: ProcessGroups) -> None:
        sync_gradients(ordering, mesh, {rank: [alone[rank]]}, communicator, prescale, lambda _: None)

    Lockstep(mesh.world_size).run(rank_main)
    for rank, buffer in alone.items():
        assert torch.equal(buffer.main_grad, together[rank].main_grad), rank


@pytest.mark.parametrize("name", [OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.MEAN_OF_MEANS])
def test_a_rank_alone_divides_by_the_tokens_that_all_divide_by_together(name: OrderingName) -> None:
    alone, together = by_tokens(name, Mesh(2, 3), alone=True), by_tokens(name, Mesh(2, 3))
    for rank, buffer in alone.items():
        assert torch.equal(buffer.main_grad, together[rank].main_grad), rank


class Postponed(VirtualRanks):
    """Collectives that do nothing before somebody waits for them."""

    def start_reduce_scatter(self, members: Members, buckets: Mapping[int, Tensor]) -> Pending:
        return Later(lambda: self.reduce_scatter(members, buckets))

    def start_all_reduce(self, members: Members, tensors: Mapping[int, Tensor]) -> Pending:
        return Later(lambda: self.all_reduce(members, tensors))


class Later:
    def __init__(self, act: Callable[[], None]) -> None:
        self.wait = act


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", [OrderingName.BUGGY, OrderingName.ALL_REDUCE])
def test_a_bucket_s_sum_is_waited_for(name: OrderingName, average: bool) -> None:
    mesh, ordering = Mesh(2, 2), ORDERINGS[name]
    made, prescale = buffers(mesh, 8, ordering.layout), prescale_for(ordering, ProbeName.GPT, 2, average)
    chunks = {rank: [buffer] for rank, buffer in made.items()}
    sync_gradients(ordering, mesh, chunks, Postponed(mesh.world_size), prescale, lambda _: None)
    right, _ = run(name, mesh, average=average)
    for rank, buffer in made.items():
        assert torch.equal(buffer.main_grad, right[rank].main_grad), rank


@pytest.mark.parametrize("name", [OrderingName.BUGGY, OrderingName.FIXED])
def test_what_was_started_in_backward_is_finished_where_its_phase_stands(name: OrderingName) -> None:
    mesh, ordering, order = Mesh(2, 2), ORDERINGS[name], []
    made = buffers(mesh, 8, ordering.layout)
    chunks = {rank: [buffer] for rank, buffer in made.items()}
    prescale = prescale_for(ordering, ProbeName.GPT, 2)
    communicator = VirtualRanks(mesh.world_size)
    sync_gradients(ordering, mesh, chunks, communicator, prescale, order.append, lambda: order.append("finished"))
    scattered = ["finished", Phase.SCATTERED]
    assert order == ([*scattered, Phase.TIED] if name is OrderingName.BUGGY else [Phase.TIED, *scattered])
    # Nothing was scattered again: the tie alone changed anything.
    assert made[0].tied_grad().tolist() == [1 + 100] * 4
    assert made[0].grad("other").tolist() == [1] * 4


def test_what_is_not_summed_keeps_its_whole_value_where_the_collective_averages() -> None:
    before, within = (Prescale(PrescaleKind.DIVIDE, 4, in_collective) for in_collective in (False, True))
    assert (before.factor, before.local_factor) == (0.25, 0.25)
    assert (within.factor, within.local_factor) == (0.25, 1.0)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("name", [OrderingName.BUGGY, OrderingName.ALL_REDUCE])
def test_each_bucket_is_announced_before_its_sum_with_what_the_wire_carries(name: OrderingName, dtype: Dtype) -> None:
    mesh, ordering = Mesh(2, 2), ORDERINGS[name]
    made = buffers(mesh, 8, ordering.layout)
    chunks = {rank: [buffer] for rank, buffer in made.items()}
    wire = Wire(dtype, mesh.dp, mesh.dp) if dtype is not Dtype.FLOAT32 else Wire()
    prescale = replace(prescale_for(ordering, ProbeName.GPT, mesh.dp), wire=wire)
    announced: list[tuple[int, float, bool]] = []

    def announce(bucket_N: Tensor, carried_N: Tensor) -> None:
        announced.append((bucket_N.data_ptr(), float(carried_N[0]), carried_N.data_ptr() == bucket_N.data_ptr()))

    virtual = VirtualRanks(mesh.world_size)
    sync_gradients(ordering, mesh, chunks, virtual, prescale, lambda _: None, announce=announce)
    expected = [
        # Scaled, and not yet summed: what rank r holds is 10**r everywhere.
        (buffer.bucket(index).data_ptr(), 10.0**rank / mesh.dp, dtype is Dtype.FLOAT32)
        for rank, buffer in made.items()
        for index in buffer.buckets()
    ]
    assert sorted(announced) == sorted(expected)
