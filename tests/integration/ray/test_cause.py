"""A failed verdict is repeated with the ranks in other seats, and says what the fault followed. Real nodes, one Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from service.domain.cause import Cause
from service.domain.validation import EventType, State, Validation
from service.execution.order import to_experiment
from service.storage import validations
from workers.contract import Device, Reason, Verdict
from workers.faults import is_struck
from workers.plan import trials

from .conftest import Service, cluster_of, driver_process, serve

FAULT = "bit_flipped_in_receive_buffer"
WRONG = {"subject_diverged", "parameter_diverged"}
"""What is told of the fault, by the parameter in which a struck rank's largest element happens to be."""
REQUEST: dict[str, Any] = {"probes": ["exact"], "orderings": ["buggy", "own_bucket"], "steps": 1, "deadline_s": 300}
TIMEOUT_S = 300.0
"""Two cold gangs, on a machine that may be busy."""


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[Any]:
    with cluster_of({"node-a": 3, "node-b": 2, "node-c": 2}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def service(cluster: Any, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with serve(postgres_url, tmp_path_factory.mktemp("home"), cluster.address) as running:
        yield running


def asking(dp: int, pp: int, nodes: int, **drill: Any) -> dict[str, Any]:
    return REQUEST | {"mesh": {"dp": dp, "pp": pp}, "placement": {"nodes": nodes}, "drill": {"fault": FAULT} | drill}


def cause_of(validation: Validation) -> tuple[Cause | None, str | None, Reason]:
    """The stored cause, its node and its reason, of a validation that failed by its first run alone."""
    assert validation.state is State.COMPLETED, validation.error
    assert validation.verdict is Verdict.FAIL
    assert WRONG & {reason.code for reason in validation.reasons}
    [told] = [reason for reason in validation.reasons if reason.code.startswith("cause_")]
    assert told.code == f"cause_{validation.cause}"
    return validation.cause, told.node, told


async def validate(service: Service, request: dict[str, Any]) -> Validation:
    """Queue a validation and wait for its end, repeat included."""
    return await service.wait(await service.submit(request), timeout_s=TIMEOUT_S)


async def test_what_stays_on_its_node_is_hardware(service: Service) -> None:
    validation = await validate(service, asking(2, 2, 2, node="node-b"))
    cause, node, told = cause_of(validation)
    assert (cause, node) == (Cause.HARDWARE, "node-b"), told
    assert "whoever computes there" in told.message
    events = {event.type: event.data for event in await service.history(validation.id)}
    assert events[EventType.REPEATING_ELSEWHERE]["trials"] == ["exact/buggy", "exact/own_bucket"]
    assert events[EventType.REPEATING_ELSEWHERE]["suspects"] == [2, 3]
    assert [rank["node"] for rank in validation.fingerprint] == ["node-a", "node-a", "node-b", "node-b"]
    seats = [seat["node"] for seat in events[EventType.REPEATED_ELSEWHERE]["seats"]]
    assert seats == events[EventType.REPEATING_ELSEWHERE]["nodes"] == ["node-b", "node-b", "node-a", "node-a"]
    assert WRONG & {reason["code"] for reason in events[EventType.REPEATED_ELSEWHERE]["reasons"]}
    assert validation.timings["repeat_s"] > 0


async def test_what_follows_its_rank_is_software(service: Service) -> None:
    validation = await validate(service, asking(2, 2, 2, world_rank=2))
    cause, node, told = cause_of(validation)
    assert (cause, node, told.world_rank) == (Cause.SOFTWARE, None, 2), told
    assert "world_rank 2 on node-b failed first, and world_rank 2 on node-a" in told.message


async def test_a_third_node_is_told_from_the_others(service: Service) -> None:
    cause, node, told = cause_of(await validate(service, asking(3, 1, 3, node="node-c")))
    assert (cause, node) == (Cause.HARDWARE, "node-c"), told


async def test_a_rank_is_told_among_three_nodes(service: Service) -> None:
    cause, _, told = cause_of(await validate(service, asking(3, 1, 3, world_rank=1)))
    assert (cause, told.world_rank) == (Cause.SOFTWARE, 1), told


async def test_one_node_has_no_other_device(service: Service) -> None:
    validation = await validate(service, asking(2, 1, 1, world_rank=1))
    cause, _, told = cause_of(validation)
    assert cause is Cause.UNKNOWN, told
    assert "all ranks sit on node-a" in told.message
    assert EventType.REPEATING_ELSEWHERE not in {event.type for event in await service.history(validation.id)}


async def test_a_repeat_that_passes_explains_nothing(service: Service) -> None:
    """The drill's draw goes by rank: this one strikes rank 1 on node-b, but not rank 0 there."""
    request = asking(2, 1, 2, node="node-b", probability=0.5)
    for seed in range(100):
        request["seed"] = seed
        plan = trials(to_experiment(request), Device.CPU)
        if is_struck(plan[1], 1, "node-b") and not any(is_struck(spec, 0, "node-b") for spec in plan):
            break
    cause, _, told = cause_of(await validate(service, request))
    assert cause is Cause.UNKNOWN, told
    assert "passed with the ranks in other seats" in told.message


async def test_ray_train_places_its_ranks_itself(service: Service) -> None:
    cause, _, told = cause_of(await validate(service, asking(2, 1, 2, world_rank=1) | {"launcher": "ray_train"}))
    assert cause is Cause.UNKNOWN, told
    assert "Ray Train" in told.message


async def repeating(service: Service, **changes: Any) -> str:
    """A validation whose repeat has begun."""
    validation_id = await service.submit(asking(2, 1, 2, world_rank=1) | changes)
    while EventType.REPEATING_ELSEWHERE not in {event.type for event in await service.history(validation_id)}:
        async with service.hub.subscribe(validation_id) as subscription:
            await subscription.wait(0.05)
    return validation_id


async def test_a_cancelled_repeat_takes_no_verdict_away(service: Service) -> None:
    validation_id = await repeating(service)
    async with service.database.transaction() as connection:
        await validations.request_cancel(connection, validation_id)
    cause, _, told = cause_of(await service.wait(validation_id, timeout_s=TIMEOUT_S))
    assert cause is Cause.UNKNOWN, told
    assert "was cancelled" in told.message


async def test_a_driver_that_dies_in_the_repeat_takes_no_verdict_away(service: Service) -> None:
    validation_id = await repeating(service)
    driver_process().kill()
    validation = await service.wait(validation_id, timeout_s=TIMEOUT_S)
    cause, _, told = cause_of(validation)
    assert (cause, validation.attempt) == (Cause.UNKNOWN, 1), told
    assert "the driver process died" in told.message
