"""A bound for teardowns, so that a gang which does not go away delays an attempt's last word by seconds, not for ever.

A teardown bounds its own steps; this bounds it where a call of Ray blocks. Nothing is cancelled half-way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

TEARDOWN_LIMIT_S = 20.0
_log = logging.getLogger("gradgate.driver")


async def bounded(teardown: Coroutine[Any, Any, str | None], limit_s: float) -> str | None:
    """What a teardown left behind, in words, or None. One that takes longer than `limit_s` is a leak and goes on."""
    task = asyncio.create_task(teardown)
    done, _ = await asyncio.wait([task], timeout=limit_s)
    if not done:
        task.add_done_callback(_note_late)
        return f"the teardown has not ended within {limit_s:g} s; what it cannot end ends with the driver process"
    try:
        return task.result()
    except Exception as error:
        _log.exception("a teardown broke")
        return f"the teardown broke: {type(error).__name__}: {error}"


def _note_late(task: asyncio.Task[str | None]) -> None:
    broke = task.cancelled() or task.exception() is not None
    _log.warning("a late teardown ended", extra={"leak": "it broke" if broke else task.result()})
