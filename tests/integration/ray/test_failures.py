"""A rank that breaks or hangs: the validation names it, and the gang is gone within seconds."""

from __future__ import annotations

import os
import signal
import socket

import psutil
import pytest

from service.domain.validation import State, Validation

from .conftest import Service, alive, rank_pids, until_free

LONG = {"probes": ["gpt"], "orderings": ["fixed"], "steps": 100, "repeats": 20}


def check_cause(validation: Validation, code: str, world_rank: int) -> None:
    assert validation.state is State.FAILED
    assert validation.verdict is None
    error = validation.error
    assert error is not None
    assert (error.code, error.world_rank, error.node) == (code, world_rank, socket.gethostname())


@pytest.mark.parametrize("moment", ["before", "in", "after"])
@pytest.mark.parametrize(("how", "code", "world_rank"), [("raise", "drill_fault", 3), ("kill", "rank_died", 1)])
async def test_a_rank_that_breaks_around_a_collective(
    service: Service, how: str, moment: str, code: str, world_rank: int
) -> None:
    drill = {"fault": f"{how}_{moment}_collective", "world_rank": world_rank, "step": 1}
    validation = await service.validate({"drill": drill, "probes": ["exact"], "orderings": ["own_bucket"]})
    check_cause(validation, code, world_rank)
    assert validation.error is not None
    assert validation.error.phase == "dp_sync"
    assert "step 1" in validation.error.message
    await until_free()
    assert not any(alive(pid) for pid in rank_pids(validation))


async def test_a_rank_killed_from_outside(service: Service) -> None:
    validation_id = await service.submit(LONG)
    await service.step_reached(validation_id, 3)
    os.kill(rank_pids(await service.get(validation_id))[2], signal.SIGKILL)
    validation = await service.wait(validation_id, timeout_s=15)
    check_cause(validation, "rank_died", 2)
    await until_free()


async def test_a_rank_that_hangs_is_named_at_the_deadline(service: Service) -> None:
    validation_id = await service.submit(LONG | {"deadline_s": 40})
    await service.step_reached(validation_id, 3)
    stopped = psutil.Process(rank_pids(await service.get(validation_id))[1])
    stopped.suspend()
    validation = await service.wait(validation_id)
    check_cause(validation, "deadline_exceeded", 1)
    await until_free()


async def test_the_cluster_is_as_good_as_new_after_all_that(service: Service) -> None:
    validation = await service.validate({"orderings": ["fixed", "buggy"]})
    assert validation.verdict == "pass"
