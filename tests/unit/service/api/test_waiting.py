import asyncio
import time
from types import SimpleNamespace

import pytest
from fastapi import Request

from service.api.waiting import Wakeup, interruptible
from service.storage.events import Subscription


class Client:
    """The receiving half of an ASGI connection."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.stopping = asyncio.Event()

    def request(self) -> Request:
        app = SimpleNamespace(state=SimpleNamespace(stopping=self.stopping))
        return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}, self.receive)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (lambda client, subscription: subscription.wake(), Wakeup.NEWS),
        (lambda client, subscription: client.gone.set(), Wakeup.STOP),
        (lambda client, subscription: client.stopping.set(), Wakeup.STOP),
    ],
)
async def test_each_cause_ends_a_wait_at_once(cause, expected):
    client, subscription = Client(), Subscription()
    async with interruptible(client.request()) as interruption:
        asyncio.get_running_loop().call_later(0.02, cause, client, subscription)
        started_s = time.monotonic()
        assert await interruption.wait(subscription, 10) is expected
        assert time.monotonic() - started_s < 5
        if expected is Wakeup.STOP:
            assert await interruption.wait(subscription, 10) is Wakeup.STOP


async def test_silence_is_a_timeout_and_earlier_news_counts():
    subscription = Subscription()
    async with interruptible(Client().request()) as interruption:
        assert await interruption.wait(subscription, 0.01) is Wakeup.TIMEOUT
        subscription.wake()
        assert await interruption.wait(subscription, 10) is Wakeup.NEWS
        assert await interruption.wait(subscription, 0.01) is Wakeup.TIMEOUT


async def test_a_stream_leaves_the_client_to_its_response():
    client = Client()
    client.gone.set()
    async with interruptible(client.request(), watch_client=False) as interruption:
        assert await interruption.wait(Subscription(), 0.01) is Wakeup.TIMEOUT


async def test_no_task_outlives_the_block():
    before = asyncio.all_tasks()
    async with interruptible(Client().request()) as interruption:
        waiting = asyncio.ensure_future(interruption.wait(Subscription(), 10))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert asyncio.all_tasks() == before
