"""What a failed verdict follows when its trials are repeated with the ranks in other seats: a rank, a node, or nothing.

Pure. It says how ranks change seats and what two runs together show; it neither runs nor judges. An accusation that
another reading of the same evidence would contradict is not made: the cause is then unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

_T = TypeVar("_T", int, str)


class Cause(StrEnum):
    """What a failed verdict follows when the trial is repeated on other devices."""

    SOFTWARE = "software"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank computes. A CPU has no UUID, so that seats of one node are then one device."""

    node: str
    device_uuid: str | None


@dataclass(frozen=True, slots=True)
class Sighting:
    """One run of the trials that failed: each rank's seat, by world_rank, and whom each failure points to."""

    seats: tuple[Seat, ...]
    suspects: tuple[frozenset[int], ...]
    """World ranks, one set for each probe and ordering that failed; empty where nobody could be named."""

    @property
    def accused(self) -> frozenset[int]:
        """Everybody whom any failure points to."""
        return frozenset().union(*self.suspects)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause, what it is fixed to, and in words what was tried."""

    cause: Cause
    message: str
    world_ranks: tuple[int, ...] = ()
    """Those that the fault follows, of `software`."""
    node: str | None = None
    """The one that the fault stays on, of `hardware`."""
    device_uuids: tuple[str, ...] = ()
    """The devices of `node` that explain every failure; empty where they have none, or not one of them does."""


def unknown(message: str) -> Attribution:
    """Not tried, or tried in vain; the message says which."""
    return Attribution(Cause.UNKNOWN, message)


def attribute(first: Sighting, second: Sighting) -> Attribution:
    """What the fault of two runs follows.

    Every set of suspects holds one of the guilty, so a rank is a possible cause only where it is in all sets of both
    runs, and a node or device only where each set has a rank that sat on it. What is possible alone is the cause.
    """
    if not second.suspects:
        return unknown("the same trials passed with the ranks in other seats, so that the fault did not come again")
    if not (first.accused and second.accused):
        return unknown("the failures do not point to any rank, so that there is nothing to follow")
    ranks = _in_all([*first.suspects, *second.suspects])
    nodes = _in_all(_places(first, by_node=True) + _places(second, by_node=True))
    devices = _in_all(_places(first, by_node=False) + _places(second, by_node=False))
    one_node = len({seat.node for seat in (*first.seats, *second.seats)}) == 1
    places = devices if one_node else nodes
    told = f"{_told(first)} failed first, and {_told(second)} with the ranks in other seats"
    if ranks and not places:
        return Attribution(
            Cause.SOFTWARE, f"the fault follows world_rank {_joined(ranks)}: {told}", tuple(sorted(ranks))
        )
    if len(nodes) == 1 and places and not ranks:
        return _hardware(next(iter(nodes)), devices, told)
    if ranks or places:
        return unknown(f"what was seen fits a rank as well as a node, or several nodes: {told}")
    return unknown(f"neither one rank nor one node explains what was seen: {told}")


def reseat(seats: Sequence[Seat], suspects: Collection[int]) -> tuple[int, ...] | None:
    """For each world rank the rank whose seat it takes, so that every suspect gets to another node.

    Everybody does where no node holds more than half of the ranks; on one node everybody gets another device. None
    where the suspects cannot be moved.
    """
    nodes = [seat.node for seat in seats]
    if len(set(nodes)) == 1:
        uuids = [seat.device_uuid for seat in seats]
        distinct = len(seats) > 1 and None not in uuids and len(set(uuids)) == len(seats)
        return tuple((world_rank + 1) % len(seats) for world_rank in range(len(seats))) if distinct else None
    num_largest = max(Counter(nodes).values())
    if 2 * num_largest <= len(seats):
        return _rotated(nodes, num_largest)
    return _swapped(nodes, suspects)


def _rotated(nodes: Sequence[str], by: int) -> tuple[int, ...]:
    """Sorted by node, everybody moves on by the size of the largest node, which leads out of every node."""
    queue = sorted(range(len(nodes)), key=lambda world_rank: nodes[world_rank])
    taken = dict(zip(queue, queue[by:] + queue[:by], strict=True))
    return tuple(taken[world_rank] for world_rank in range(len(nodes)))


def _swapped(nodes: Sequence[str], suspects: Collection[int]) -> tuple[int, ...] | None:
    """One node holds most: everybody elsewhere changes places with a rank there, a suspect before others."""
    ((largest, _),) = Counter(nodes).most_common(1)
    elsewhere = [world_rank for world_rank, node in enumerate(nodes) if node != largest]
    there = [world_rank for world_rank, node in enumerate(nodes) if node == largest]
    there.sort(key=lambda world_rank: world_rank not in suspects)
    moving, staying = there[: len(elsewhere)], there[len(elsewhere) :]
    if any(world_rank in suspects for world_rank in staying):
        return None
    taken = dict(zip(moving + elsewhere, elsewhere + moving, strict=True))
    taken |= dict(zip(staying, staying[1:] + staying[:1], strict=True))
    return tuple(taken[world_rank] for world_rank in range(len(nodes)))


def _hardware(node: str, devices: Collection[str], told: str) -> Attribution:
    device_uuids = tuple(sorted(devices))
    where = f"{node}, device {_joined(device_uuids)}" if device_uuids else node
    return Attribution(
        Cause.HARDWARE, f"the fault stays on {where}, whoever computes there: {told}", (), node, device_uuids
    )


def _places(run: Sighting, *, by_node: bool) -> list[frozenset[str]]:
    """For each failure where its suspects sat."""
    places = [seat.node if by_node else seat.device_uuid for seat in run.seats]
    return [
        frozenset(place for world_rank in suspects if (place := places[world_rank]) is not None)
        for suspects in run.suspects
        if suspects
    ]


def _in_all(sets: Iterable[frozenset[_T]]) -> frozenset[_T]:
    """What is in every set that is not empty."""
    known = [each for each in sets if each]
    return frozenset.intersection(*known) if known else frozenset()


def _told(run: Sighting) -> str:
    """The accused with their nodes."""
    accused = sorted(run.accused)
    shown = [f"world_rank {world_rank} on {run.seats[world_rank].node}" for world_rank in accused[:4]]
    return ", ".join(shown) + (f" and {len(accused) - 4} more" if len(accused) > 4 else "")


def _joined(values: Iterable[_T]) -> str:
    return ", ".join(str(value) for value in sorted(values))
