"""Work that must come to its end although whoever waits for it is cancelled: giving resources back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def complete(work: Coroutine[Any, Any, _Result] | asyncio.Task[_Result]) -> _Result:
    """Wait for the end of `work`, however often the caller is cancelled meanwhile; the cancel is raised afterwards.

    Only for work that ends by itself within a bounded time.
    """
    task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
