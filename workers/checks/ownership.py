"""Who says that he owns what: each replica's claims, gathered, and held against "each element exactly once".

Claims are intervals; nothing here loops over elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.communicator import ProcessGroups
from workers.contract import StackFault, StackFinding
from workers.intervals import EMPTY, Interval, Intervals, count, intersect, subtract, union
from workers.mesh import Members


def gather_claims(
    communicator: ProcessGroups, members: Members, claims: Sequence[Intervals], device: torch.device
) -> tuple[tuple[Intervals, ...], ...]:
    """By member: what it claims of each of the parameters. Collective over `members`, all with as many parameters."""
    rows = [(index, interval.start, interval.stop) for index, intervals in enumerate(claims) for interval in intervals]
    mine = torch.tensor(rows, dtype=torch.int64, device=device).flatten()
    num_members = len(members)
    size = mine.new_tensor([mine.numel()])
    sizes = [int(other) for other in communicator.all_to_all(members, [size] * num_members, [1] * num_members)]
    received = communicator.all_to_all(members, [mine] * num_members, sizes)
    return tuple(_claims(values.view(-1, 3).tolist(), len(claims)) for values in received)


def _claims(rows: list[list[int]], num_parameters: int) -> tuple[Intervals, ...]:
    by_parameter: list[list[Interval]] = [[] for _ in range(num_parameters)]
    for index, start, stop in rows:
        by_parameter[index].append(Interval(start, stop))
    return tuple(map(tuple, by_parameter))


def is_replicated(claims: Sequence[Intervals], num_elements: int) -> bool:
    """Whether every replica claims all of a parameter, as without a distributed optimizer."""
    return all(claim == (Interval(0, num_elements),) for claim in claims)


def ownership_findings(
    names: Sequence[str], sizes: Sequence[int], claims: Sequence[Sequence[Intervals]]
) -> Iterator[StackFinding]:
    """Parameters of which an element has no owner, or several where not all replicas own all. `claims`: by dp_rank."""
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        claimed = [of_rank[index] for of_rank in claims]
        if is_replicated(claimed, size):
            continue
        covered, twice = EMPTY, EMPTY
        for claim in claimed:
            covered, twice = union(covered, claim), union(twice, intersect(covered, claim))
        gap = subtract((Interval(0, size),), covered)
        if gap:
            detail = f"has {count(gap)} of {size} elements that no replica owns, from element {gap[0].start} on"
            yield StackFinding(StackFault.OWNERSHIP_GAP, name, count(gap), detail)
        if twice:
            owners = [dp_rank for dp_rank, claim in enumerate(claimed) if intersect(claim, twice[:1])]
            detail = f"has {count(twice)} of {size} elements with several owners: dp ranks {owners} all claim "
            detail += f"{twice[0].start} to {twice[0].stop - 1}"
            yield StackFinding(StackFault.OWNERSHIP_OVERLAP, name, count(twice), detail)
