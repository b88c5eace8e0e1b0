"""The closed form of a sync that goes wrong, against the sync itself, element by element with small integers."""

from __future__ import annotations

import random
from itertools import product

import pytest

from workers.contributions import TiedSync
from workers.intervals import Interval, normalize


def synced(sync: TiedSync, owners: list[list[int]], early: set[int], grads: list, late: list) -> list:
    """value[end][dp_rank][element] as ranks hold it after scatter, late gradients, and tie; grads[end][dp_rank][e]."""
    num_elements = len(owners[0])
    held = [[[0.0] * num_elements for _ in range(sync.dp)] for _ in range(2)]
    for end, dp_rank, e in product(range(2), range(sync.dp), range(num_elements)):
        is_early = end == 0 and e in early
        seen = [grads[end][j][e] - (late[j][e] if is_early else 0) for j in range(sync.dp)]
        value = sync.summed * sum(seen) if owners[end][e] == dp_rank else sync.local * seen[dp_rank]
        held[end][dp_rank][e] = value + (late[dp_rank][e] if is_early else 0)
    return [[[held[0][k][e] + held[1][k][e] for e in range(num_elements)] for k in range(sync.dp)]] * 2


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize(("summed", "local"), [(0.25, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_factors_give_what_the_sync_gives(dp: int, summed: float, local: float) -> None:
    draw = random.Random(dp)
    num_elements = 24
    owners = [[draw.randrange(dp) for _ in range(num_elements)] for _ in range(2)]
    early = set(range(7))
    misowned = {e for e in range(num_elements) if owners[0][e] != owners[1][e]}
    grads = [[[draw.randrange(-9, 9) for _ in range(num_elements)] for _ in range(dp)] for _ in range(2)]
    late = [[draw.randrange(-9, 9) for _ in range(num_elements)] for _ in range(dp)]
    sync = TiedSync(dp, summed, local, *(normalize(Interval(e, e + 1) for e in each) for each in (misowned, early)))
    values = synced(sync, owners, early, grads, late)
    for end, dp_rank in product(range(2), range(dp)):
        deviating: set[int] = set()
        for mixture in sync.mixtures(end, dp_rank):
            for e in (e for part in mixture.elements for e in range(part.start, part.stop)):
                assert e not in deviating
                deviating.add(e)
                if owners[end][e] == dp_rank:
                    terms = [grads[x][j][e] for x in range(2) for j in range(dp)]
                    lates = [late[j][e] for j in range(dp)] + [0] * dp
                    predicted = sum(factor * term for factor, term in zip(mixture.whole, terms, strict=True))
                    predicted += sum(factor * term for factor, term in zip(mixture.late, lates, strict=True))
                    assert predicted == values[end][dp_rank][e], (end, dp_rank, e)
        assert deviating == misowned | early
        for e in set(range(num_elements)) - deviating:
            if owners[end][e] == dp_rank:
                assert values[end][dp_rank][e] == summed * sum(grads[x][j][e] for x in range(2) for j in range(dp))


def test_what_is_owned_alike_and_in_time_does_not_deviate() -> None:
    assert TiedSync(3, 0.5, 0.5, (), ()).mixtures(0, 1) == ()


def test_the_report_s_table() -> None:
    """dp=2: rank 1 owns an element of wte whose lm_head belongs to rank 0: (g0 + g1)/2 + g3/2."""
    (mixture,) = TiedSync(2, 0.5, 0.5, (Interval(0, 1),), ()).mixtures(0, 1)
    assert mixture.whole == (0.5, 0.5, 0.0, 0.5)
    assert mixture.late == (0.0, 0.0, 0.0, 0.0)
