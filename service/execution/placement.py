"""Which nodes a gang may use and whether it can ever fit: arithmetic over the node table, nothing else.

Ray does not report placement groups that can never be placed, it waits for them for ever; so this decides before
anything is reserved. A rank takes one CPU, and one GPU where it computes on cuda.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.execution.messages import NodeCapacity, Placement
from workers.contract import Device

NODE_ID_LABEL = "ray.io/node-id"
ONE_NODE = "STRICT_PACK"
ONE_RANK_PER_NODE = "STRICT_SPREAD"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where ranks compute."""

    device: Device
    """Never `auto`."""
    why: str | None
    """Why `auto` became this; None where it was asked for."""


def choose_device(device: Device, nodes: Sequence[NodeCapacity], world_size: int, placement: Placement) -> DeviceChoice:
    """`auto` becomes cuda where the request can have a GPU for every rank, else cpu."""
    if device is not Device.AUTO:
        return DeviceChoice(device, None)
    num_gpus = int(sum(node.num_gpus for node in nodes))
    if num_gpus and shortfall(nodes, world_size, Device.CUDA, placement) is None:
        return DeviceChoice(Device.CUDA, f"auto: each of {world_size} ranks can have one of {num_gpus} GPUs")
    return DeviceChoice(Device.CPU, f"auto: {num_gpus} GPUs, too few for {world_size} ranks placed as asked")


def rank_resources(device: Device) -> dict[str, float]:
    """What one rank takes of a node."""
    return {"CPU": 1.0, "GPU": 1.0} if device is Device.CUDA else {"CPU": 1.0}


def slots_by_node(
    nodes: Sequence[NodeCapacity], world_size: int, device: Device, placement: Placement
) -> list[tuple[NodeCapacity, int]]:
    """The nodes that the request can use and how many of its ranks each would hold were it empty, in order of use."""
    allowed = [node for node in nodes if node.name not in placement.exclude]
    slots = [(node, _num_slots(node, world_size, device, placement)) for node in allowed]
    ordered = sorted((pair for pair in slots if pair[1] > 0), key=lambda pair: (-pair[1], pair[0].name))
    return ordered if placement.num_nodes is None else ordered[: placement.num_nodes]


def _num_slots(node: NodeCapacity, world_size: int, device: Device, placement: Placement) -> int:
    slots = int(min(node.num_cpus, node.num_gpus) if device is Device.CUDA else node.num_cpus)
    if placement.strategy == ONE_RANK_PER_NODE:
        slots = min(slots, 1)
    if placement.num_nodes is not None:  # an even share, or the last nodes would stay empty
        slots = min(slots, -(-world_size // placement.num_nodes))
    return slots if placement.devices_per_node is None else min(slots, placement.devices_per_node)


def shortfall(nodes: Sequence[NodeCapacity], world_size: int, device: Device, placement: Placement) -> str | None:
    """Why this gang can never be placed on these nodes: what it needs and what there is. None: it can."""
    slots = [count for _, count in slots_by_node(nodes, world_size, device, placement)]
    one_node = placement.strategy == ONE_NODE
    available = max(slots, default=0) if one_node else sum(slots)
    enough_nodes = placement.num_nodes is None or len(slots) >= placement.num_nodes
    if available >= world_size and enough_nodes:
        return None
    unit = "one CPU and one GPU" if device is Device.CUDA else "one CPU"
    per_node = "" if placement.devices_per_node is None else f", at most {placement.devices_per_node} a node"
    spread = "" if placement.num_nodes is None else f", on {placement.num_nodes} nodes"
    return (
        f"needs {world_size} ranks with {unit} each ({placement.strategy}{per_node}{spread}); of {len(nodes)} nodes "
        f"alive, {len(slots)} can be used and {'the largest has' if one_node else 'together they have'} room for "
        f"{available}; choose a smaller mesh, loosen the placement, or add nodes"
    )


def bundle_selectors(
    nodes: Sequence[NodeCapacity], world_size: int, device: Device, placement: Placement
) -> list[dict[str, str]]:
    """One label selector per rank, in world_rank order; empty where every node is allowed.

    With limits per node each rank is pinned to a node, because Ray has no such limit of its own.
    """
    usable = slots_by_node(nodes, world_size, device, placement)
    if placement.devices_per_node is not None or placement.num_nodes is not None:
        pinned = [node.node_id for node, count in usable for _ in range(count)]
        return [{NODE_ID_LABEL: node_id} for node_id in pinned[:world_size]]
    if not placement.exclude:
        return []
    return [{NODE_ID_LABEL: f"in({','.join(node.node_id for node, _ in usable)})"}] * world_size
