"""Who changes seats with whom, and what two runs show together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from service.domain.cause import Cause, Seat, Sighting, attribute, reseat

nodes = st.lists(st.sampled_from("abcde"), min_size=1, max_size=24)


def seats(names: str | list[str], devices: str | None = None) -> tuple[Seat, ...]:
    return tuple(Seat(node, devices and devices[i]) for i, node in enumerate(names))


def sighting(names: str, *suspects: set[int], devices: str | None = None) -> Sighting:
    return Sighting(seats(names, devices), tuple(frozenset(each) for each in suspects))


@given(nodes)
def test_where_no_node_holds_more_than_half_everybody_gets_to_another(names: list[str]) -> None:
    assume(2 * max(Counter(names).values()) <= len(names))
    taken = reseat(seats(names), {0})
    assert taken is not None
    assert sorted(taken) == list(range(len(names)))
    assert all(names[seat] != names[world_rank] for world_rank, seat in enumerate(taken))


@given(nodes, st.data())
def test_elsewhere_suspects_move_or_nothing_does(names: list[str], data: st.DataObject) -> None:
    suspects = data.draw(st.sets(st.sampled_from(range(len(names))), min_size=1))
    (largest, num_largest) = Counter(names).most_common(1)[0]
    movable = len(names) - num_largest
    assume(2 * num_largest > len(names))
    taken = reseat(seats(names), suspects)
    if sum(names[world_rank] == largest for world_rank in suspects) > movable or len(set(names)) == 1:
        assert taken is None
    else:
        assert taken is not None
        assert sorted(taken) == list(range(len(names)))
        assert all(names[taken[world_rank]] != names[world_rank] for world_rank in suspects)


@given(st.integers(2, 16))
def test_on_one_node_everybody_gets_another_device(num_devices: int) -> None:
    taken = reseat([Seat("a", f"GPU-{i}") for i in range(num_devices)], {0})
    assert taken is not None
    assert sorted(taken) == list(range(num_devices))
    assert all(seat != world_rank for world_rank, seat in enumerate(taken))


@pytest.mark.parametrize(("names", "devices"), [("a", "x"), ("aa", None), ("aa", "xx")])
def test_without_another_device_nobody_moves(names: str, devices: str | None) -> None:
    assert reseat(seats(names, devices), {0}) is None


@given(nodes, st.data())
def test_a_bound_fault_never_is_taken_for_the_other_kind(names: list[str], data: st.DataObject) -> None:
    """Whoever is told, all of the guilty or some, is right or nobody."""
    guilty_rank = data.draw(st.sampled_from(range(len(names))))
    guilty_node = data.draw(st.sampled_from(names))
    on_node = {world_rank for world_rank, node in enumerate(names) if node == guilty_node}
    for cause, struck in ((Cause.SOFTWARE, {guilty_rank}), (Cause.HARDWARE, on_node)):
        taken = reseat(seats(names), struck)
        if taken is None:
            continue
        moved = "".join(names[seat] for seat in taken)
        again = struck if cause is Cause.SOFTWARE else {r for r, node in enumerate(moved) if node == guilty_node}
        found = attribute(sighting("".join(names), struck), sighting(moved, again))
        assert found.cause is cause
        assert found.world_ranks == ((guilty_rank,) if cause is Cause.SOFTWARE else ())
        assert found.node == (guilty_node if cause is Cause.HARDWARE else None)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (sighting("ab", {0}), sighting("ba"), "passed"),
        (sighting("ab", set()), sighting("ba", {0}), "do not point to any rank"),
        # One of two replicas is wrong and nobody can tell which: either reading holds.
        (sighting("ab", {0, 1}), sighting("ba", {0, 1}), "fits a rank as well as a node"),
        (sighting("abab", {0, 1}), sighting("baba", {2, 3}), "or several nodes"),
        (sighting("abc", {0}), sighting("bca", {0}, {1}), "neither"),
        (sighting("abc", {0}), sighting("bca", {1}), "neither"),
        # The suspect stayed where it was.
        (sighting("aab", {0}), sighting("aba", {0}), "fits a rank as well as a node"),
    ],
)
def test_what_can_be_read_in_two_ways_is_unknown(first: Sighting, second: Sighting, why: str) -> None:
    found = attribute(first, second)
    assert found.cause is Cause.UNKNOWN
    assert found.node is None
    assert why in found.message


@pytest.mark.parametrize(
    ("names", "again", "suspects", "cause", "node", "devices"),
    [
        # One GPU of b.
        ("aabb", "bbaa", ({2}, {0}), Cause.HARDWARE, "b", ("y",)),
        # Another GPU of b each time: the node.
        ("aabb", "bbaa", ({2}, {1}), Cause.HARDWARE, "b", ()),
        ("aabb", "bbaa", ({2}, {2}), Cause.SOFTWARE, None, ()),
        # On one node only the device can be told from the rank.
        ("aaaa", "aaaa", ({2}, {0}), Cause.HARDWARE, "a", ("y",)),
        ("aaaa", "aaaa", ({2}, {2}), Cause.SOFTWARE, None, ()),
        ("aaaa", "aaaa", ({2}, {1}), Cause.UNKNOWN, None, ()),
    ],
)
def test_devices(
    names: str,
    again: str,
    suspects: tuple[set[int], set[int]],
    cause: Cause,
    node: str | None,
    devices: tuple[str, ...],
) -> None:
    first = sighting(names, suspects[0], devices="wxyz")
    second = sighting(again, suspects[1], devices="yzwx")
    found = attribute(first, second)
    assert (found.cause, found.node, found.device_uuids) == (cause, node, devices)


def test_probes_that_accuse_different_ranks_of_one_node_agree_on_the_node() -> None:
    found = attribute(sighting("aabb", {2}, {3}), sighting("bbaa", {0, 1}))
    assert (found.cause, found.node) == (Cause.HARDWARE, "b")
    assert "world_rank 2 on b, world_rank 3 on b failed first" in found.message
