"""A rank that breaks or hangs: the validation names it, and the gang is gone within seconds."""

from __future__ import annotations

import os
import signal
import socket

import psutil
import pytest

from service.domain.validation import State, Validation

from .conftest import Service, alive, rank_pids, until_free

SMALL = {"mesh": {"dp": 2, "pp": 1}, "probes": ["exact"], "orderings": ["own_bucket"], "steps": 2}
LONG = SMALL | {"probes": ["gpt"], "orderings": ["fixed"], "steps": 100, "repeats": 20}


def check_cause(validation: Validation, code: str, world_rank: int) -> None:
    assert validation.state is State.FAILED
    assert validation.verdict is None
    error = validation.error
    assert error is not None
    assert (error.code, error.world_rank, error.node) == (code, world_rank, socket.gethostname())


@pytest.mark.parametrize(
    ("how", "moment", "pp", "world_rank"),
    [
        ("raise", "before", 1, 1),
        ("raise", "in", 2, 3),  # with bystanders: the other stage's ranks are in another group
        ("raise", "after", 1, 0),
        ("kill", "before", 1, 1),
        ("kill", "in", 2, 1),
        ("kill", "after", 1, 0),
    ],
)
async def test_a_rank_that_breaks_around_a_collective(
    service: Service, how: str, moment: str, pp: int, world_rank: int
) -> None:
    drill = {"fault": f"{how}_{moment}_collective", "world_rank": world_rank, "step": 1}
    validation = await service.validate(SMALL | {"mesh": {"dp": 2, "pp": pp}, "drill": drill})
    check_cause(validation, {"raise": "drill_fault", "kill": "rank_died"}[how], world_rank)
    assert validation.error is not None
    assert validation.error.phase == "dp_sync"
    assert "step 1" in validation.error.message
    await until_free()
    assert not any(alive(pid) for pid in rank_pids(validation))


async def test_a_rank_killed_from_outside(service: Service) -> None:
    validation_id = await service.submit(LONG)
    await service.step_reached(validation_id, 3)
    os.kill(rank_pids(await service.get(validation_id))[1], signal.SIGKILL)
    validation = await service.wait(validation_id, timeout_s=15)
    check_cause(validation, "rank_died", 1)
    await until_free()


async def test_a_rank_that_hangs_is_named_at_the_deadline(service: Service) -> None:
    await service.validate(SMALL)  # a warm gang, so that the deadline is the hang's alone
    validation_id = await service.submit(LONG | {"deadline_s": 6})
    await service.step_reached(validation_id, 3)
    stopped = psutil.Process(rank_pids(await service.get(validation_id))[1])
    stopped.suspend()
    validation = await service.wait(validation_id)
    check_cause(validation, "deadline_exceeded", 1)
    await until_free()


async def test_a_rank_of_ray_train_that_is_killed(service: Service) -> None:
    drill = {"fault": "kill_in_collective", "world_rank": 1, "step": 1}
    validation = await service.validate(SMALL | {"launcher": "ray_train", "drill": drill})
    check_cause(validation, "rank_died", 1)
    assert validation.error is not None
    assert validation.error.phase == "dp_sync"
    await until_free()


async def test_the_cluster_is_as_good_as_new_after_all_that(service: Service) -> None:
    validation = await service.validate({"orderings": ["fixed", "buggy"]})
    assert validation.verdict == "pass"
