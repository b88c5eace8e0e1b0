"""Each kind of story as a person reads it."""

from __future__ import annotations

import pytest

from workers.contract import Contributor, Deviation, DeviationKind, End
from workers.findings import sentence

TWO = Contributor(End.LM_HEAD, 0, 2)
THREE = Contributor(End.LM_HEAD, 1, 3)
ZERO = Contributor(End.WTE, 0, 0)


def deviation(kind: DeviationKind, *named: Contributor, factor: float | None = None, more: int = 0) -> Deviation:
    return Deviation(kind, named, len(named) + more, factor, 0.0, 7, 512)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            deviation(DeviationKind.DROPPED, TWO, factor=0.0),
            "world_rank 2's lm_head share is missing from 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.DROPPED, ZERO, TWO, THREE, factor=0.0, more=4),
            "world_rank 0's wte share and the lm_head share of each of world_ranks 2, 3 and that of 4 more"
            " is missing from 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.DOUBLED, ZERO, factor=2.0),
            "world_rank 0's wte share was added twice to 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.SCALE, THREE, factor=0.5),
            "world_rank 3's lm_head share counts 0.5 times in 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.SCALE, factor=1 / 3),
            "512 elements of wte on world_rank 1 are 0.333333 times what they should be",
        ),
        (
            deviation(DeviationKind.WRONG_OWNER, ZERO),
            "512 elements of wte on world_rank 1 are the sum that belongs to world_rank 0",
        ),
        (
            deviation(DeviationKind.DROPPED, factor=0.0),
            "one contributor's share (whose cannot be told) is missing from 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.LOCAL, TWO),
            "world_rank 2's lm_head share was wrong before any synchronisation, in 512 elements of wte on world_rank 1",
        ),
        (
            deviation(DeviationKind.CORRUPT),
            "512 elements of wte on world_rank 1 are no combination of anybody's shares",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Deviation) else "",
)
def test_sentences(told: Deviation, expected: str) -> None:
    assert sentence(told, End.WTE, 1) == expected
