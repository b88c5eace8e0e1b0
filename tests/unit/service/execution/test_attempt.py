"""The end of an attempt on the driver's side: a result is said before anything is torn down."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from service.domain.cause import unknown
from service.execution import attempt as attempts
from service.execution.attempt import Attempt, Workplace
from service.execution.gang import Gang
from service.execution.messages import Finished, FromDriver, LeftBehind, Placement, Repeated, Start, WorkKey
from service.execution.ray_train import TrainGang
from workers.contract import Launcher
from workers.plan import ExperimentSpec

KEY = WorkKey("val_x", 1)
REPEATED = Repeated(unknown("it fits both"))


@dataclass(slots=True)
class Place:
    """Where the attempt is; takes down what is said."""

    said: list[FromDriver] = field(default_factory=list)

    def send(self, message: FromDriver) -> None:
        """To the supervisor."""
        self.said.append(message)


class StuckGang(Gang):
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def kill(self) -> str | None:
        self.asked.set()
        await asyncio.Event().wait()
        return None


class StuckTrainGang(TrainGang):
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def wind_down(self) -> str | None:
        self.asked.set()
        await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("kind", [StuckGang, StuckTrainGang])
async def test_a_teardown_that_hangs_comes_after_the_result_and_is_told(
    kind: type[StuckGang] | type[StuckTrainGang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "TEARDOWN_LIMIT_S", 0.2)
    monkeypatch.setattr(attempts, "WIND_DOWN_S", 0.0)
    place, gang = Place(), kind()
    one = Attempt(Start(KEY, ExperimentSpec(), Placement(), Launcher.POOL, 60.0), cast("Workplace", place))
    _seat(one, gang)
    ending = asyncio.create_task(one._finish(REPEATED))
    async with asyncio.timeout(5):
        await gang.asked.wait()
        assert place.said == [Finished(KEY, (), REPEATED)]
        await ending
    assert [type(message) for message in place.said] == [Finished, LeftBehind]


def _seat(attempt: Attempt, gang: Any) -> None:
    attempt._gang, attempt._moved = gang, True
