"""A teardown that hangs, or breaks, delays nobody for long and is told."""

from __future__ import annotations

import asyncio

import pytest

from service.execution.teardown import bounded


async def test_what_a_teardown_leaves_behind_is_passed_on() -> None:
    async def clean() -> str | None:
        return None

    async def leaky() -> str | None:
        return "rank 2 is still there"

    assert await bounded(clean(), 5) is None
    assert await bounded(leaky(), 5) == "rank 2 is still there"


async def test_a_teardown_that_hangs_is_a_leak_and_goes_on() -> None:
    let_go, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> str | None:
        await let_go.wait()
        ended.set()
        return None

    leak = await bounded(hang(), 0.01)
    assert leak is not None
    assert "has not ended within 0.01 s" in leak
    let_go.set()
    async with asyncio.timeout(5):
        await ended.wait()


async def test_a_teardown_that_breaks_is_a_leak(caplog: pytest.LogCaptureFixture) -> None:
    async def break_down() -> str | None:
        raise RuntimeError("no answer")

    assert await bounded(break_down(), 5) == "the teardown broke: RuntimeError: no answer"
    assert "a teardown broke" in caplog.text
