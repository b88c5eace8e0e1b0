"""Waiting for a validation without holding a database session: who wakes a request or a stream, and when to stop.

Three things end a wait: news of the validation, the client going away, this process shutting down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol

from fastapi import Request


class Subscription(Protocol):
    """What an event hub hands out: `wait` returns True on news, False when nothing came in time."""

    def wait(self, timeout_s: float) -> Awaitable[bool]:
        """Wait for news; news that came before the call counts."""
        ...


class Wakeup(StrEnum):
    """Why a wait ended."""

    NEWS = "news"
    TIMEOUT = "timeout"
    STOP = "stop"


class Interruption:
    """Set once, when a request should stop waiting: its client left or the server shuts down."""

    def __init__(self, *causes: asyncio.Task[object]) -> None:
        self._causes = causes

    @property
    def happened(self) -> bool:
        """Whether any cause has come about."""
        return any(cause.done() for cause in self._causes)

    async def wait(self, subscription: Subscription, timeout_s: float) -> Wakeup:
        """Wait for news for at most `timeout_s`; an interruption ends the wait at once."""
        if self.happened:
            return Wakeup.STOP
        news = asyncio.ensure_future(subscription.wait(timeout_s))
        try:
            await asyncio.wait({news, *self._causes}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not news.done():
                news.cancel()
                await asyncio.gather(news, return_exceptions=True)
        if self.happened:
            return Wakeup.STOP
        return Wakeup.NEWS if news.result() else Wakeup.TIMEOUT


@asynccontextmanager
async def interruptible(request: Request, *, watch_client: bool = True) -> AsyncIterator[Interruption]:
    """Watch the client and the server's shutdown while the block runs. Enter only after the body was read.

    A streaming response watches its client itself (two readers would steal each other's messages): pass
    `watch_client=False` there.
    """
    stopping: asyncio.Event = request.app.state.stopping
    causes: list[asyncio.Task[object]] = [asyncio.ensure_future(stopping.wait())]
    if watch_client:
        causes.append(asyncio.ensure_future(_disconnected(request)))
    try:
        yield Interruption(*causes)
    finally:
        for cause in causes:
            cause.cancel()
        await asyncio.gather(*causes, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
