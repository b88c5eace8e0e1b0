"""What drivers of this cluster that are gone, or of no use, left reserved on Ray: found by name, and removed.

A group goes with its driver's job as a rule. It stays where that driver was stopped, or cut off together with its
dispatcher; Ray then sees a driver that lives. Removing the group kills the actors in it. Calls of Ray here block.
"""

from __future__ import annotations

from collections.abc import Set

import ray
from ray.util.placement_group import placement_group_table

from service.execution.gang import remove_group
from service.execution.messages import WorkKey

PREFIX = "gradgate:"
_JOB_DIGITS = 8


def group_name(validation_id: str, attempt: int) -> str:
    """The name of an attempt's placement group, within its cluster's namespace."""
    return f"{PREFIX}{validation_id}:{attempt}"


def remove_strangers(held: Set[WorkKey]) -> list[str]:
    """Remove the groups of this namespace that an earlier job made and no attempt in `held` has; their names.

    Of earlier jobs only: a leader that was stopped and goes on, not knowing yet that another one followed it, must not
    take away what that one has. Idle gangs carry the name of an attempt that is long over.
    """
    own_job = _job_number(ray.get_runtime_context().get_job_id())
    found = [
        entry["name"]
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED" and _job_number(entry["placement_group_id"][-_JOB_DIGITS:]) < own_job
    ]
    names = {group_name(key.validation_id, key.attempt) for key in held}
    # One that is not removed is of another cluster's namespace, or gone by itself.
    return [name for name in found if name.startswith(PREFIX) and name not in names and remove_group(name)]


def _job_number(job_id: str) -> int:
    """Jobs are numbered in the order in which they came; ids of what they made end with their own."""
    return int.from_bytes(bytes.fromhex(job_id), "little")
