"""Where pieces go: positions inside laid-out intervals, and what every owner receives, checked element by element."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judged_mesh import MODEL, JudgedMesh
from lockstep import Lockstep

from workers import exchange
from workers.communicator import ProcessGroups
from workers.contract import Mesh, OrderingName
from workers.exchange import Exchange, Piece, positions
from workers.intervals import Interval, Intervals, intersect, normalize


def laid_out(intervals: Intervals) -> list[int]:
    return [element for interval in intervals for element in range(interval.start, interval.stop)]


INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: Interval(pair[0], pair[0] + pair[1])),
    max_size=6,
).map(normalize)


@given(INTERVALS, INTERVALS)
def test_positions_say_where_a_subset_lies(outer: Intervals, other: Intervals) -> None:
    inner = intersect(outer, other)
    elements = laid_out(outer)
    assert [elements[position] for position in laid_out(tuple(positions(outer, inner)))] == laid_out(inner)


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(1, 2), Mesh(2, 1), Mesh(3, 2), Mesh(2, 3)], ids=str)
@pytest.mark.parametrize("ordering", list(OrderingName))
def test_owners_receive_their_elements_from_everyone(
    ordering: OrderingName, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE_ELEMENTS", 50)
    world = JudgedMesh(ordering, mesh, model=replace(MODEL, vocab_size=23), floor=0.25)
    world.synchronise()

    def rank_main(rank: int, communicator: ProcessGroups) -> list[Piece]:
        if rank not in world.holders:
            return []
        moved = Exchange(world.expectation, rank, world.holding(rank), communicator)
        return [moved.round(index) for index in range(moved.num_rounds)]

    for rank, pieces in enumerate(Lockstep(mesh.world_size).run(rank_main)):
        if rank in world.holders:
            assert [element for piece in pieces for element in laid_out(piece.intervals)] == world.owned(rank)
            for piece in pieces:
                if piece.intervals:
                    assert_piece(world, rank, piece)


def assert_piece(world: JudgedMesh, rank: int, piece: Piece) -> None:
    elements = laid_out(piece.intervals)
    owned_sets = {holder: set(world.owned(holder)) for holder in world.holders}
    assert torch.equal(piece.synced_n, world.synced[rank][elements])
    assert piece.replay_Cn is not None
    assert piece.floor_C is not None
    for index, holder in enumerate(world.holders):
        assert torch.equal(piece.local_Cn[index], world.local[holder][elements])
        assert torch.equal(piece.replay_Cn[index], world.replayed[holder][elements])
    assert piece.floor_C.tolist() == [0.25] * len(world.holders)
    if world.mesh.pp == 1 or rank >= world.mesh.dp:
        assert piece.other_end_n is None
        return
    assert piece.other_end_n is not None
    # Where every rank owns everything, the other end is that of the same pipeline.
    same_pipeline = world.mesh.world_rank(rank, world.mesh.pp - 1)
    for position, element in enumerate(elements):
        owners = [owner for owner in world.holders[world.mesh.dp :] if element in owned_sets[owner]]
        owner = owners[0] if len(owners) == 1 else same_pipeline
        assert piece.other_end_n[position] == world.synced[owner][element]
