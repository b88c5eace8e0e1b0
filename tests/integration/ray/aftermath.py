"""What must be true of a cluster some seconds after anything went wrong on it, asked of Ray and of the kernel."""

from __future__ import annotations

from collections.abc import Collection

import psutil

from .conftest import FREED_WITHIN_S, alive, eventually

GANG_TITLES = ("ray::RankActor", "ray::RayTrainWorker", "ray::Mailbox")


def gang_processes() -> list[psutil.Process]:
    """Every process that a gang's actor runs in, below a Ray that this process started: others may test here, too."""
    return [process for process in psutil.Process().children(recursive=True) if _runs_a_rank(process)]


def _runs_a_rank(process: psutil.Process) -> bool:
    try:
        title = " ".join(process.cmdline())
        return title.startswith(GANG_TITLES) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def groups_left() -> list[str]:
    """Names of placement groups of ours that hold resources or wait for some."""
    from ray.util import placement_group_table

    return [
        group["name"]
        for group in placement_group_table().values()
        if group["name"].startswith("gradgate:") and group["state"] != "REMOVED"
    ]


def held() -> dict[str, float]:
    """Of each resource, what somebody holds."""
    import ray

    free = ray.available_resources()
    counted = {name: total for name, total in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    return {name: total - free.get(name, 0.0) for name, total in counted.items() if total != free.get(name, 0.0)}


async def nothing_left(pids: Collection[int] = ()) -> None:
    """Fail unless soon nothing is held, no group is left and no process of a gang runs, nor any of `pids`."""

    def left() -> str | None:
        running = {process.pid for process in gang_processes()}
        running |= {pid for pid in pids if alive(pid)}
        if not running and not held() and not groups_left():
            return None
        return f"processes {sorted(running)}, resources {held()}, placement groups {groups_left()}"

    await eventually(lambda: left() is None, FREED_WITHIN_S, lambda: f"left behind: {left()}")
