"""Work that gives something back comes to its end whatever happens to whoever waits for it."""

from __future__ import annotations

import asyncio

import pytest

from service.execution.completion import complete


async def test_two_cancels_do_not_interrupt_it_and_are_not_forgotten() -> None:
    may_end, ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True

    waiting = asyncio.create_task(complete(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended


async def test_what_it_returns_or_raises_comes_back() -> None:
    async def give() -> int:
        return 7

    async def break_down() -> None:
        raise ValueError("broke")

    assert await complete(give()) == 7
    with pytest.raises(ValueError, match="broke"):
        await complete(break_down())
