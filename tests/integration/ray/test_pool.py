"""What the pool and its gangs leave behind when whoever asked is cancelled at a bad moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import psutil
import pytest

from service.execution.beacon import BeaconServer
from service.execution.cluster import read_nodes
from service.execution.gang import Gang, GangShape, Reservation, release_group, request_group, start_ranks
from service.execution.line import MAX_OVERTAKES
from service.execution.messages import NodeCapacity, Placement
from service.execution.pool import Pool
from workers.contract import Device

from .aftermath import gang_processes, nothing_left
from .conftest import NUM_CPUS, eventually


@pytest.fixture
async def beacons(ray_address: str) -> AsyncIterator[BeaconServer]:
    server = BeaconServer("127.0.0.1", dead_man_s=30.0)
    await server.open()
    yield server
    await server.close()


@pytest.fixture
async def pool(ray_address: str) -> AsyncIterator[Pool]:
    pool = Pool(max_gangs=4, idle_s=600.0, gpu_idle_s=600.0)
    yield pool
    await pool.close()
    await nothing_left()


def nodes() -> tuple[NodeCapacity, ...]:
    return read_nodes("none")


async def acquire(pool: Pool, num_ranks: int, name: str) -> Gang | Reservation:
    return await pool.acquire(f"gradgate:{name}", GangShape(num_ranks, Device.CPU, Placement()), nodes())


async def a_gang(pool: Pool, beacons: BeaconServer, num_ranks: int, name: str) -> Gang:
    gang = start_ranks(await room_for(pool, num_ranks, name), beacons)
    await gang.join({})
    return gang


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def room_for(pool: Pool, num_ranks: int, name: str) -> Reservation:
    held = await acquire(pool, num_ranks, name)
    assert isinstance(held, Reservation)
    return held


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02, 0.2])
async def test_a_cancel_while_room_is_asked_for_leaves_no_placement_group(pool: Pool, after_s: float) -> None:
    others = request_group("others", GangShape(NUM_CPUS, Device.CPU, Placement()), nodes())
    asking = asyncio.create_task(acquire(pool, 2, "cancelled"))
    await asyncio.sleep(after_s)
    await cancelled(asking)
    await release_group(others.group)
    await nothing_left()


async def test_a_cancelled_request_does_not_stop_the_gangs_it_made_leave(pool: Pool, beacons: BeaconServer) -> None:
    for gang in [await a_gang(pool, beacons, 1, f"idle-{number}") for number in range(3)]:
        pool.give_back(gang)
    assert len(gang_processes()) == 3

    async def want_all() -> None:
        async with pool.kept_empty(NUM_CPUS):
            await asyncio.sleep(60)

    asking = asyncio.create_task(want_all())
    await asyncio.sleep(0.001)
    await cancelled(asking)
    await nothing_left()


async def test_a_gang_is_gone_only_when_ranks_that_never_spoke_have_ended(beacons: BeaconServer, pool: Pool) -> None:
    held = await room_for(pool, 2, "deaf")
    with socket.create_server((beacons._host, 0)) as deaf:  # takes their lines and never listens
        real, beacons._port = beacons._port, deaf.getsockname()[1]
        gang = start_ranks(held, beacons)
        beacons._port = real
        await eventually(lambda: len(gang_processes()) == 2, 30.0)
        forming = gang_processes()
        for process in forming:
            process.suspend()  # so that it cannot hurry
        assert await gang.kill() is None
        assert not [process for process in forming if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


async def test_requests_that_each_fit_alone_are_served_in_order(pool: Pool) -> None:
    served: list[int] = []

    async def work(number: int) -> None:
        held = await room_for(pool, NUM_CPUS, f"one-of-ten-{number}")
        served.append(number)
        await release_group(held.group)

    await asyncio.gather(*map(work, range(10)))
    assert served == list(range(10))


async def test_a_large_request_is_passed_by_small_ones_a_few_times_only(pool: Pool) -> None:
    running = [await room_for(pool, 1, "running")]
    large = asyncio.create_task(acquire(pool, NUM_CPUS, "large"))
    await asyncio.sleep(0.3)
    for number in range(MAX_OVERTAKES):
        async with asyncio.timeout(10):
            running.append(await room_for(pool, 1, f"small-{number}"))
    late = asyncio.create_task(acquire(pool, 1, "late"))
    await asyncio.sleep(0.5)
    assert not late.done()  # though there is room for it
    for held in running:
        await release_group(held.group)
    async with asyncio.timeout(10):
        first = await large
    assert isinstance(first, Reservation)
    assert not late.done()
    await release_group(first.group)
    async with asyncio.timeout(10):
        last = await late
    assert isinstance(last, Reservation)
    await release_group(last.group)


async def test_a_warm_gang_that_small_requests_keep_using_leaves_for_a_large_one(
    pool: Pool, beacons: BeaconServer
) -> None:
    gang = await a_gang(pool, beacons, 1, "busy")
    num_served = 0

    async def use_it_again_and_again(gang: Gang) -> None:
        nonlocal num_served
        while True:
            pool.give_back(gang)
            again = await acquire(pool, 1, f"again-{num_served}")
            if not isinstance(again, Gang):
                await release_group(again.group)
                return
            gang = again
            num_served += 1
            await asyncio.sleep(0.01)

    stream = asyncio.create_task(use_it_again_and_again(gang))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(20):
        large = await room_for(pool, NUM_CPUS, "large")
    assert num_served > MAX_OVERTAKES
    await release_group(large.group)
    async with asyncio.timeout(20):
        await stream


async def test_one_who_gives_up_lets_the_next_go(pool: Pool) -> None:
    running = await room_for(pool, NUM_CPUS, "running")
    first, second = (asyncio.create_task(acquire(pool, NUM_CPUS, name)) for name in ("first", "second"))
    await asyncio.sleep(0.2)
    await cancelled(first)
    await release_group(running.group)
    async with asyncio.timeout(10):
        held = await second
    assert isinstance(held, Reservation)
    await release_group(held.group)
