"""Whether a cluster could ever hold a mesh where it is to be placed: refused at once what no waiting would help.

Pure. Says no only where the dispatcher would for the same nodes, by its own arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from service.api.problems import INFEASIBLE, Problem
from service.execution import placement as arithmetic
from service.execution.messages import NodeCapacity, Placement
from workers.contract import Device
from workers.encoding import plain, timestamp


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
    @property
    def nodes(self) -> Sequence[dict[str, Any]]: ...  # noqa: D102


def shortfall(num_ranks: int, device: Device, placement: Placement, totals: Totals) -> Problem | None:
    """The 409 for a mesh of `num_ranks`, or None where the totals and, as far as they are known, the nodes allow it.

    A rank takes one CPU, and one GPU where it computes on cuda; `auto` is cpu where there are too few GPUs.
    """
    return _total_shortfall(num_ranks, device, placement, totals) or _node_shortfall(
        num_ranks, device, placement, totals
    )


def _total_shortfall(num_ranks: int, device: Device, placement: Placement, totals: Totals) -> Problem | None:
    on_gpus = device is Device.CUDA
    slots = int(min(totals.num_cpus, totals.num_gpus) if on_gpus else totals.num_cpus)
    wanted_nodes = placement.num_nodes or 1
    if num_ranks <= slots and wanted_nodes <= totals.num_nodes:
        return None
    needs = _needs(num_ranks, Device.CUDA if on_gpus else Device.CPU, placement)
    unit = "one CPU and one GPU" if on_gpus else "one CPU"
    there_is = f"{totals.num_nodes} node(s), {totals.num_cpus:g} CPUs and {totals.num_gpus:g} GPUs in all"
    detail = (
        f"the mesh needs {num_ranks} ranks with {unit} each on at least {wanted_nodes} node(s); "
        f"cluster {totals.cluster} has {there_is}; choose a smaller mesh or another device, or add nodes"
    )
    return Problem(INFEASIBLE, detail, extra={"needs": needs, "has": _has(totals)})


def _node_shortfall(num_ranks: int, device: Device, placement: Placement, totals: Totals) -> Problem | None:
    """Where the sum would do, but not on the nodes that the placement allows."""
    nodes = [NodeCapacity(**node) for node in totals.nodes]
    device = arithmetic.choose_device(device, nodes, num_ranks, placement).device
    lack = arithmetic.shortfall(nodes, num_ranks, device, placement) if nodes else None
    if lack is None:
        return None
    room = {node.name: slots for node, slots in arithmetic.slots_by_node(nodes, num_ranks, device, placement)}
    needs = _needs(num_ranks, device, placement) | {"exclude": placement.exclude, "strategy": placement.strategy}
    detail = f"the mesh {lack} (cluster {totals.cluster})"
    return Problem(INFEASIBLE, detail, extra={"needs": plain(needs), "has": _has(totals) | {"room": room}})


def _needs(num_ranks: int, device: Device, placement: Placement) -> dict[str, Any]:
    return {"num_ranks": num_ranks, "device": device.value, "num_nodes": placement.num_nodes or 1}


def _has(totals: Totals) -> dict[str, Any]:
    return {
        "num_nodes": totals.num_nodes,
        "num_cpus": totals.num_cpus,
        "num_gpus": totals.num_gpus,
        "observed_at": timestamp(totals.observed_at),
    }
