"""Layernorm gradients over tensor-parallel ranks, on small numbers that can be added by hand."""

from __future__ import annotations

import pytest
import torch
from lockstep import Lockstep

from workers.communicator import ProcessGroups, VirtualRanks
from workers.contract import Mesh, Normalization, OrderingName, Phase, ProbeName
from workers.grad_buffer import GradBuffer
from workers.grad_sync import TokenCounts, prescale_for, sync_gradients
from workers.layout import RULES, build_layout
from workers.orderings import Ordering, compose
from workers.parameters import ParameterShape, is_sequence_parallel

MESH = Mesh(2, 2, tp=2)
LAYERNORMS = {"layers.0.input_layernorm.weight": 1.0, "layers.0.input_layernorm.bias": 2.0}
"""What rank r holds of each, times 10**r; only on the first stage."""


def buffers(ordering: Ordering) -> dict[int, GradBuffer]:
    made = {}
    for rank in range(MESH.world_size):
        values = {"layers.0.qkv.weight": 4.0, **(LAYERNORMS if MESH.coordinates(rank).pp_rank == 0 else {})}
        shapes = [ParameterShape("tied", (4,), shared_embedding=True), *(ParameterShape(name, (3,)) for name in values)]
        made[rank] = GradBuffer(build_layout(shapes, RULES[ordering.layout], MESH.dp), torch.device("cpu"), "tied")
        for name, value in values.items():
            made[rank].grad(name).fill_(value * 10.0**rank)
    return made


def run(
    name: OrderingName, normalization: Normalization = Normalization.MICROBATCHES, alone: bool = False
) -> tuple[dict[int, GradBuffer], list[Phase]]:
    ordering, phases = compose(name, False, normalization, MESH.tp), []
    made, prescale = buffers(ordering), prescale_for(ordering, ProbeName.GPT, 1)
    tokens = TokenCounts(ProbeName.GPT, {rank: torch.tensor([1]) for rank in made})

    def rank_main(rank: int, communicator: ProcessGroups) -> None:
        sync_gradients(ordering, MESH, {rank: [made[rank]]}, communicator, prescale, lambda _: None, tokens=tokens)

    if alone:
        Lockstep(MESH.world_size).run(rank_main)
    else:
        chunks = {rank: [buffer] for rank, buffer in made.items()}
        sync_gradients(ordering, MESH, chunks, VirtualRanks(MESH.world_size), prescale, phases.append, tokens=tokens)
    return made, phases


def owned(made: dict[int, GradBuffer], name: str, dp_rank: int, tp_rank: int) -> list[float]:
    """What one rank of the first stage gives its optimizer of a parameter."""
    buffer = made[MESH.world_rank(dp_rank, 0, tp_rank)]
    parts = buffer.layout.owned_intervals(name, dp_rank)
    return [value for part in parts for value in buffer.grad(name)[part.start : part.stop].tolist()]


def of_ranks(*coordinates: tuple[int, int]) -> float:
    """What the first stage's ranks at these (dp_rank, tp_rank) hold together, in units of the parameter's value."""
    return sum(10.0 ** MESH.world_rank(dp_rank, 0, tp_rank) for dp_rank, tp_rank in coordinates)


EVERYONE = of_ranks((0, 0), (0, 1), (1, 0), (1, 1))


def test_the_names_are_those_of_layernorms() -> None:
    assert all(map(is_sequence_parallel, LAYERNORMS))
    assert not is_sequence_parallel("layers.0.qkv.weight")


@pytest.mark.parametrize("name", [OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE, OrderingName.FIXED])
def test_every_owner_has_the_sum_over_replicas_and_tensor_ranks(name: OrderingName) -> None:
    made, _ = run(name)
    for parameter, value in LAYERNORMS.items():
        everything = [owned(made, parameter, dp_rank, tp_rank) for tp_rank in range(2) for dp_rank in range(2)]
        assert {each for found in everything for each in found} == {value * EVERYONE}, parameter
        # Each tensor rank has an owner for every element.
        assert min(len(everything[0] + everything[1]), len(everything[2] + everything[3])) >= 3


def test_averaged_is_half_of_it() -> None:
    made, phases = run(OrderingName.LAYERNORM_AVERAGED)
    assert phases == [Phase.SCATTERED, Phase.LAYERNORM, Phase.TIED]
    for parameter, value in LAYERNORMS.items():
        found = {each for rank in range(4) for each in owned(made, parameter, rank % 2, rank // 2)}
        assert found == {value * EVERYONE / 2}


def test_skipped_leaves_each_tensor_rank_its_own_part() -> None:
    made, phases = run(OrderingName.LAYERNORM_SKIPPED)
    assert phases == [Phase.SCATTERED, Phase.TIED]
    for parameter, value in LAYERNORMS.items():
        for tp_rank in range(2):
            found = {each for dp_rank in range(2) for each in owned(made, parameter, dp_rank, tp_rank)}
            assert found == {value * of_ranks((0, tp_rank), (1, tp_rank))}


@pytest.mark.parametrize("name", [OrderingName.OWN_BUCKET, OrderingName.LAYERNORM_AVERAGED])
def test_nothing_else_is_summed_over_tensor_ranks(name: OrderingName) -> None:
    made, _ = run(name)
    for tp_rank in range(2):
        found = {each for dp_rank in range(2) for each in owned(made, "layers.0.qkv.weight", dp_rank, tp_rank)}
        assert found == {4 * of_ranks((0, tp_rank), (1, tp_rank))}


def test_phases_are_observed_in_megatron_s_order() -> None:
    assert run(OrderingName.OWN_BUCKET, Normalization.NUM_TOKENS)[1] == [
        Phase.SCATTERED,
        Phase.LAYERNORM,
        Phase.TIED,
        Phase.NORMALIZED,
    ]


@pytest.mark.parametrize("name", [OrderingName.OWN_BUCKET, OrderingName.LAYERNORM_AVERAGED])
def test_a_rank_alone_does_its_part_of_what_all_do_together(name: OrderingName) -> None:
    alone, together = run(name, alone=True)[0], run(name)[0]
    for rank, buffer in alone.items():
        assert torch.equal(buffer.main_grad, together[rank].main_grad), rank
