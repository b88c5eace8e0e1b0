"""What the ranks' self-tests of the collectives come to: one line for each primitive on each kind of group.

Pure rules over what the ranks reported (`workers.checks.collectives` runs the tests).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from workers.contract import CollectiveOp, CollectiveRow, CollectiveSummary, Primitive, Reason, StepReport

Kind = tuple[str, Primitive, CollectiveOp | None]


def summarise_collectives(reports: Sequence[StepReport]) -> tuple[CollectiveSummary, ...]:
    """Over all ranks and groups of a kind; the slowest rank's time."""
    kinds: defaultdict[Kind, list[CollectiveRow]] = defaultdict(list)
    for report in sorted(reports, key=lambda each: each.world_rank):
        for row in report.collectives:
            kinds[row.group, row.primitive, row.op].append(row)
    return tuple(
        CollectiveSummary(
            group=group,
            primitive=primitive,
            op=op,
            num_elements=max((row.num_elements for row in rows), key=len),
            num_ranks=len({member for row in rows for member in row.members}),
            size_bytes=max(row.size_bytes for row in rows),
            seconds=max(row.seconds for row in rows),
            wrong_elements=sum(row.wrong_elements for row in rows),
            ok=not any(row.wrong_elements for row in rows),
        )
        for (group, primitive, op), rows in kinds.items()
    )


def wrong_collectives(reports: Sequence[StepReport]) -> Iterator[Reason]:
    """One failure for each primitive on each kind of group, told by the first rank that saw it."""
    seen: defaultdict[Kind, list[tuple[int, CollectiveRow]]] = defaultdict(list)
    for report in sorted(reports, key=lambda each: each.world_rank):
        for row in report.collectives:
            if row.first_wrong is not None:
                seen[row.group, row.primitive, row.op].append((report.world_rank, row))
    for (group, primitive, op), found in seen.items():
        _, row = found[0]
        ranks = list(dict.fromkeys(world_rank for world_rank, _ in found))
        title = primitive.value + (f" ({op.value})" if op else "")
        message = f"{title} on group {group} (world ranks {list(row.members)}) is wrong on world ranks {ranks}"
        yield Reason("collective_wrong", f"self-test: {message}: {_told(row)}.")


def untested_ranks(reports: Sequence[StepReport]) -> list[int]:
    """Ranks that tested nothing, though others did. A mesh in one process has no collectives to test."""
    tested = {report.world_rank for report in reports if report.collectives}
    return sorted({report.world_rank for report in reports} - tested) if tested else []


def _told(row: CollectiveRow) -> str:
    wrong = row.first_wrong
    assert wrong is not None
    told = f"of {wrong.num_elements} elements, element {wrong.element} is {wrong.got!r}"
    told += f" and should be {wrong.expected!r}"
    share = f", as if the share of world_rank {wrong.world_rank} were lost or changed"
    more = f" ({row.wrong_elements} wrong elements over the sizes tested)"
    return told + (share if wrong.world_rank is not None else "") + more
