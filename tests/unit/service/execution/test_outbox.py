"""How long a gang's failures wait for a better explanation, and what ends a run."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.domain.validation import FailureDetail
from service.execution.failure import COLLATERAL_GRACE_S, Death
from service.execution.outbox import GangFailure, Outbox
from workers.contract import RankFailure, RankPhase


def failure(world_rank: int, *, collateral: bool) -> RankFailure:
    return RankFailure(world_rank, "n", RankPhase.TIE, 0, 0, "rank_raised", "broke", collateral)


async def collect(outbox: Outbox) -> FailureDetail:
    with pytest.raises(GangFailure) as caught:
        await outbox.collect(lambda _: None)
    return caught.value.detail


async def test_it_ends_when_every_rank_has_said_everything() -> None:
    outbox = Outbox(2)
    outbox.put(0)
    collecting = asyncio.create_task(outbox.collect(lambda _: None))
    await asyncio.sleep(0.01)
    assert not collecting.done()
    outbox.put(1)
    await collecting


async def test_a_death_that_is_noticed_late_still_is_the_cause() -> None:
    outbox = Outbox(4)
    outbox.put(failure(0, collateral=True))
    asyncio.get_running_loop().call_later(0.2, outbox.put, Death(1, "n", None))
    began_s = time.monotonic()
    assert (await collect(outbox)).world_rank == 1
    assert time.monotonic() - began_s < COLLATERAL_GRACE_S  # a death explains enough to stop waiting


async def test_ranks_that_block_are_not_waited_for() -> None:
    outbox = Outbox(4)
    outbox.put(failure(2, collateral=False))
    assert (await collect(outbox)).world_rank == 2


async def test_a_rank_that_is_done_may_go_away() -> None:
    outbox = Outbox(2)
    for word in (0, Death(0, "n", None), 1):
        outbox.put(word)
    await outbox.collect(lambda _: None)


async def test_a_launcher_that_gave_up_ends_it() -> None:
    outbox = Outbox(2)
    outbox.put(FailureDetail("ray_train_failed", "no more"))
    assert (await collect(outbox)).code == "ray_train_failed"
