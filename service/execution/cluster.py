"""How a process of ours gets to Ray, and what it sees there: the connection, the code to ship, the node table."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray

import workers
from service.execution.messages import DriverConfig, NodeCapacity
from workers.checks.digest import workers_digest
from workers.stacks.registry import SETTING as STACKS_SETTING

LOCAL_OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Statistics cross Ray, never gradients."""


def connect(config: DriverConfig) -> None:
    """Join the cluster, or start a local one. On the main thread: a local Ray dies with the thread that started it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ[STACKS_SETTING] = config.stacks  # inherited by a local Ray's workers
    workers_digest()  # remembered as of now: this is the code that the ranks get
    if config.ray_address is not None:
        ray.init(address=config.ray_address, runtime_env=to_ship(config), **_manners(config.cluster))
        return
    # Inherited by the local Ray's workers, which then find our packages where this process finds them.
    os.environ["PYTHONPATH"] = python_path()
    ray.init(
        address="local",
        num_cpus=config.local_num_cpus,
        include_dashboard=False,
        object_store_memory=LOCAL_OBJECT_STORE_BYTES,
        _temp_dir=config.local_ray_dir,
        **_manners(config.cluster),
    )


def join(address: str, cluster: str, runtime_env: dict[str, Any] | None) -> None:
    """Be another driver on the cluster that `connect` reached."""
    ray.init(address=address, runtime_env=runtime_env, **_manners(cluster))


def _manners(cluster: str) -> dict[str, Any]:
    return {"namespace": f"gradgate-{cluster}", "log_to_driver": False, "logging_level": logging.WARNING}


def to_ship(config: DriverConfig) -> dict[str, Any] | None:
    """What every process of this job gets on a cluster that somebody else started."""
    environment = {"env_vars": {STACKS_SETTING: config.stacks}} if config.stacks else {}
    return (code_to_ship() or {}) | environment or None


def code_to_ship() -> dict[str, Any] | None:
    """Job-level packages for a cluster whose image lacks the wheel; None where this process runs from a wheel.

    An installed wheel means a pinned image on the nodes too; a source checkout means development.
    """
    root = source_root()
    if "site-packages" in root.parts or "dist-packages" in root.parts:
        return None
    return {"py_modules": [str(root / "workers"), str(root / "service")]}


def source_root() -> Path:
    """The folder that holds our packages."""
    return Path(workers.__path__[0]).resolve().parent


def python_path() -> str:
    """A PYTHONPATH with which a process we start finds our packages."""
    return os.pathsep.join(filter(None, [str(source_root()), os.environ.get("PYTHONPATH")]))


def read_nodes(node_label: str) -> tuple[NodeCapacity, ...]:
    """The nodes that are alive, under the operator's label where one is set. Blocks for some milliseconds."""
    return tuple(
        NodeCapacity(
            node_id=node["NodeID"],
            name=node.get("Labels", {}).get(node_label) or node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            num_cpus=float(node["Resources"].get("CPU", 0)),
            num_gpus=float(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    )
