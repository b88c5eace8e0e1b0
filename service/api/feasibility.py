"""Whether a cluster could ever hold a mesh, from totals alone: refused at once what no waiting would help.

Pure. Says no only where the dispatcher certainly would; node by node (exclusions, strategies) the dispatcher decides.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from service.api.problems import INFEASIBLE, Problem
from workers.contract import Device
from workers.encoding import timestamp


class Totals(Protocol):
    """What a capacity snapshot says of a whole cluster."""

    @property
    def cluster(self) -> str: ...  # noqa: D102
    @property
    def observed_at(self) -> datetime: ...  # noqa: D102
    @property
    def num_nodes(self) -> int: ...  # noqa: D102
    @property
    def num_cpus(self) -> float: ...  # noqa: D102
    @property
    def num_gpus(self) -> float: ...  # noqa: D102


def shortfall(num_ranks: int, device: Device, num_nodes: int | None, totals: Totals) -> Problem | None:
    """The 409 for a mesh of `num_ranks` on `num_nodes` nodes (None: any), or None where the totals allow it.

    A rank takes one CPU, and one GPU where it computes on cuda; `auto` is cuda where the cluster has GPUs.
    """
    on_gpus = device is Device.CUDA or (device is Device.AUTO and totals.num_gpus >= 1)
    slots = int(min(totals.num_cpus, totals.num_gpus) if on_gpus else totals.num_cpus)
    wanted_nodes = num_nodes or 1
    if num_ranks <= slots and wanted_nodes <= totals.num_nodes:
        return None
    needs = {
        "num_ranks": num_ranks,
        "device": (Device.CUDA if on_gpus else Device.CPU).value,
        "num_nodes": wanted_nodes,
    }
    has = {
        "num_nodes": totals.num_nodes,
        "num_cpus": totals.num_cpus,
        "num_gpus": totals.num_gpus,
        "observed_at": timestamp(totals.observed_at),
    }
    unit = "one CPU and one GPU" if on_gpus else "one CPU"
    there_is = f"{totals.num_nodes} node(s), {totals.num_cpus:g} CPUs and {totals.num_gpus:g} GPUs in all"
    detail = (
        f"the mesh needs {num_ranks} ranks with {unit} each on at least {wanted_nodes} node(s); "
        f"cluster {totals.cluster} has {there_is}; choose a smaller mesh or another device, or add nodes"
    )
    return Problem(INFEASIBLE, detail, extra={"needs": needs, "has": has})
