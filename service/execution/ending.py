"""Whether the process of an actor has ended, of which nothing but Ray was ever heard.

Ray calls an actor dead when it gives the order to kill it. Where the process is on this machine, look at the process.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

_POLL_S = 0.02
_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
_ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)


async def until_ended(actor: Any) -> None:
    """Wait until a `RankActor` that was told to end has ended. The caller bounds the wait."""
    while (told := await _told_of_end(actor)) is None:  # noqa: ASYNC110 - Ray has no event for it
        await asyncio.sleep(_POLL_S)
    pid, address = _PID.search(told), _ADDRESS.search(told)
    if pid is None or address is None or address[1] != ray.util.get_node_ip_address():
        return  # it never ran, or on another node, whose word is all there is
    while _is_worker(int(pid[1])):  # noqa: ASYNC110 - nor has the kernel, for no child of ours
        await asyncio.sleep(_POLL_S)


async def _told_of_end(actor: Any) -> str | None:
    try:
        await actor.position.remote()
    except RayActorError as error:
        return str(error)
    return None


def _is_worker(pid: int) -> bool:
    """Whether a process of Ray has this number: what else has it by now, or in another container, is none of ours."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "".join(process.cmdline()).startswith("ray::")
    except psutil.Error:
        return False
