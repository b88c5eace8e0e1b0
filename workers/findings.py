"""What owners found in their wrong elements, in sentences for reasons and tables. Pure; it does not judge."""

from __future__ import annotations

from workers.contract import Contributor, Deviation, DeviationKind, End


def sentence(deviation: Deviation, end: End, world_rank: int) -> str:
    """One story, told by the owner `world_rank` of elements of `end`; no full stop."""
    where = f"{deviation.num_elements} elements of {end.value} on world_rank {world_rank}"
    if deviation.kind is DeviationKind.CORRUPT:
        return f"{where} are no combination of anybody's shares"
    if deviation.kind is DeviationKind.WRONG_OWNER:
        (owner,) = deviation.contributors
        return f"{where} are the sum that belongs to world_rank {owner.world_rank}"
    if deviation.kind is DeviationKind.SCALE and not deviation.contributors:
        return f"{where} are {deviation.factor:.6g} times what they should be"
    if deviation.kind is DeviationKind.LOCAL:
        return f"{_shares(deviation)} was wrong before any synchronisation, in {where}"
    return f"{_shares(deviation)} {_HAPPENED[deviation.kind].format(factor=deviation.factor)} {where}"


_HAPPENED = {
    DeviationKind.DROPPED: "is missing from",
    DeviationKind.DOUBLED: "was added twice to",
    DeviationKind.SCALE: "counts {factor:.6g} times in",
}


def _shares(deviation: Deviation) -> str:
    """Whose share; several contributors of one end are listed together."""
    if not deviation.contributors:
        return "one contributor's share (whose cannot be told)"
    by_end = [
        _of_end(end, [one for one in deviation.contributors if one.end is end])
        for end in End
        if any(one.end is end for one in deviation.contributors)
    ]
    left_out = deviation.num_contributors - len(deviation.contributors)
    return " and ".join(by_end) + (f" and that of {left_out} more" if left_out else "")


def _of_end(end: End, named: list[Contributor]) -> str:
    if len(named) == 1:
        return f"world_rank {named[0].world_rank}'s {end.value} share"
    ranks = ", ".join(str(one.world_rank) for one in named)
    return f"the {end.value} share of each of world_ranks {ranks}"
