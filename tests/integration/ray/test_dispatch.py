"""Validations through a real dispatcher, Postgres and Ray: results, warm gangs, capacity, cancelling."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from service.domain.validation import State
from service.storage import validations
from service.storage.capacity import latest
from workers.contract import Verdict

from .conftest import NUM_CPUS, Service, alive, driver_process, eventually, free_cpus, rank_pids, until_free

SMALL = {"mesh": {"dp": 2, "pp": 1}, "probes": ["exact"], "orderings": ["fixed"], "steps": 1}
LONG = {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"], "steps": 100, "repeats": 20}


async def test_the_default_request_passes_and_stores_every_rank(service: Service) -> None:
    validation = await service.validate({})
    assert (validation.state, validation.verdict, validation.attempt) == (State.COMPLETED, Verdict.PASS, 1)
    assert [trial.ordering for trial in validation.trials] == ["buggy", "fixed", "own_bucket"] * 2
    assert len(validation.fingerprint) == 4
    assert {"queued_s", "reserve_s", "form_s", "run_s", "judge_s", "phases_s"} <= validation.timings.keys()
    async with service.database.read() as connection:
        count = text("SELECT count(*), count(DISTINCT world_rank) FROM divergence WHERE validation_id = :id")
        rows, ranks = (await connection.execute(count, {"id": validation.id})).one()
    assert (rows, ranks) == (6 * 2 * 4, 4)


async def test_events_tell_what_happened_in_order(service: Service) -> None:
    validation = await service.validate(SMALL | {"orderings": ["buggy", "fixed"], "steps": 2})
    history = await service.history(validation.id)
    per_trial = ["trial_started", "step", "step", "trial_finished"]
    expected = ["queued", "claimed", "reserved", "formed", *per_trial, *per_trial, "completed"]
    assert [event.type for event in history] == expected
    assert [event.seq for event in history] == list(range(1, len(expected) + 1))
    step = next(event for event in history if event.type == "step")
    assert step.data["ordering"] == "buggy"
    assert step.data["compared_elements"] > 0


async def test_a_warm_gang_serves_the_next_request_of_its_shape(service: Service) -> None:
    first = await service.validate(SMALL)
    second = await service.validate(SMALL | {"orderings": ["own_bucket"]})
    assert rank_pids(first) == rank_pids(second)
    assert second.timings["warm"] is True
    assert second.timings["form_s"] < 0.1


async def test_an_idle_gang_leaves_for_a_request_that_waits(service: Service) -> None:
    idle = await service.validate(SMALL)
    assert free_cpus() < 5
    larger = await service.validate(SMALL | {"mesh": {"dp": 5, "pp": 1}})
    assert larger.state is State.COMPLETED
    assert not any(alive(pid) for pid in rank_pids(idle))


async def test_a_mesh_that_can_never_fit_says_needs_and_has(service: Service) -> None:
    validation = await service.validate({"mesh": {"dp": 4, "pp": 2}})
    assert validation.state is State.FAILED
    assert validation.error is not None
    assert validation.error.code == "infeasible"
    assert "needs 8 ranks" in validation.error.message
    assert f"room for {NUM_CPUS}" in validation.error.message


async def test_a_mesh_that_does_not_fit_now_waits_until_its_deadline(service: Service) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    # A cancelled gang leaves nothing idle behind it, so that what it held goes to whoever waits: the others.
    holder = await service.submit(LONG | {"mesh": {"dp": NUM_CPUS, "pp": 1}})
    await service.step_reached(holder)
    others = placement_group([{"CPU": NUM_CPUS}])
    async with service.database.transaction() as connection:
        await validations.request_cancel(connection, holder)
    assert await asyncio.to_thread(others.wait, 20)
    try:
        validation = await service.validate({"deadline_s": 2})
    finally:
        remove_placement_group(others)
    assert validation.error is not None
    assert validation.error.code == "capacity_wait_expired"
    await until_free()


async def test_cancelled_only_when_the_gang_is_gone(service: Service) -> None:
    validation_id = await service.submit(LONG)
    await service.step_reached(validation_id)
    pids = rank_pids(await service.get(validation_id))
    assert all(alive(pid) for pid in pids)
    async with service.database.transaction() as connection:
        await validations.request_cancel(connection, validation_id)
    validation = await service.wait(validation_id, timeout_s=15)
    assert validation.state is State.CANCELLED
    assert not any(alive(pid) for pid in pids)
    assert validation.reasons == ()
    await until_free()


async def test_capacity_is_reported(service: Service) -> None:
    async with service.database.read() as connection:
        snapshot = await latest(connection, "test", max_age_s=30)
    assert snapshot is not None
    assert (snapshot.num_nodes, snapshot.num_cpus, snapshot.num_gpus) == (1, NUM_CPUS, 0)


async def test_ray_train_runs_the_same_trials(service: Service) -> None:
    validation = await service.validate(SMALL | {"launcher": "ray_train", "orderings": ["fixed", "buggy"]})
    assert validation.error is None
    assert validation.state is State.COMPLETED
    assert len(validation.fingerprint) == 2
    [fixed, buggy] = validation.trials
    assert (fixed.diverged_elements, buggy.diverged_elements) == (0, buggy.predicted_diverged_elements)
    assert fixed.compared_elements > 0
    await until_free(NUM_CPUS)


async def test_a_dead_driver_loses_its_attempt_and_a_new_one_takes_over(service: Service) -> None:
    validation_id = await service.submit(LONG | {"repeats": 1})
    await service.step_reached(validation_id)
    pids = rank_pids(await service.get(validation_id))
    driver_process().kill()
    validation = await service.wait(validation_id)
    assert (validation.state, validation.attempt) == (State.COMPLETED, 2)
    kinds = [event.type for event in await service.history(validation_id)]
    assert kinds.count("claimed") == 2
    assert kinds.count("requeued") == 1
    assert not set(rank_pids(validation)) & set(pids)
    await eventually(lambda: not any(alive(pid) for pid in pids), 10)


async def test_requests_of_different_shapes_run_at_once(service: Service) -> None:
    requests = [SMALL, SMALL | {"mesh": {"dp": 3, "pp": 1}}]
    results = await asyncio.gather(*map(service.validate, requests))
    assert [validation.state for validation in results] == [State.COMPLETED] * 2


@pytest.mark.parametrize("field", ["model", "device"])
async def test_a_request_that_this_version_cannot_read_fails(service: Service, field: str) -> None:
    validation = await service.validate(SMALL | {field: {"vocab": 1} if field == "model" else "tpu"})
    assert validation.error is not None
    assert validation.error.code == "invalid_request"
