"""A driver process that lives and does nothing: stopped, or with an attempt that it never ends. It is replaced."""

from __future__ import annotations

import signal
import time

import pytest

from service.domain.validation import State
from service.execution import supervisor

from .conftest import Service, alive, driver_process, eventually, rank_pids, until_free

WORK = {"mesh": {"dp": 2, "pp": 1}, "probes": ["gpt"], "orderings": ["fixed"], "steps": 100, "repeats": 1}


async def test_a_driver_that_is_stopped_is_killed_and_its_attempt_runs_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DRIVER_SILENCE_S", 5.0)
    validation_id = await service.submit(WORK)
    await service.step_reached(validation_id)
    first, driver = await service.get(validation_id), driver_process()
    driver.send_signal(signal.SIGSTOP)
    done = await service.wait(validation_id)
    assert (done.state, done.attempt) == (State.COMPLETED, 2)
    (requeued,) = [event for event in await service.history(validation_id) if event.type == "requeued"]
    assert "said nothing for 6 s and was killed" in requeued.data["message"]
    assert not alive(driver.pid)
    await eventually(lambda: not any(map(alive, rank_pids(first))), 10)


async def test_an_attempt_that_its_driver_does_not_end_fails_and_the_driver_is_replaced(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.validate(WORK | {"steps": 1})  # the driver is ready
    driver = driver_process()
    monkeypatch.setattr(supervisor, "OVERDUE_S", -117.0)  # of 120: as if the deadline had passed in the driver, too
    began_s = time.monotonic()
    failed = await service.validate(WORK | {"repeats": 20})
    monkeypatch.undo()
    assert failed.error is not None
    assert (failed.state, failed.error.code, failed.attempt) == (State.FAILED, "deadline_exceeded", 1)
    assert "the driver process had not ended it" in failed.error.message
    assert time.monotonic() - began_s < 60
    assert not alive(driver.pid)
    await eventually(lambda: not any(map(alive, rank_pids(failed))), 10)
    assert (await service.validate(WORK | {"steps": 1})).state is State.COMPLETED
    await until_free(4)
