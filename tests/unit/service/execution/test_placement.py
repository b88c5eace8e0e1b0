"""What fits on which nodes."""

from __future__ import annotations

import pytest

from service.execution.messages import NodeCapacity, Placement
from service.execution.placement import bundle_selectors, choose_device, shortfall
from workers.contract import Device


def node(name: str, num_cpus: float = 4, num_gpus: float = 0) -> NodeCapacity:
    return NodeCapacity(f"id-{name}", name, "10.0.0.1", num_cpus, num_gpus)


NODES = (node("a"), node("b"), node("c", num_cpus=2))


@pytest.mark.parametrize(
    ("world_size", "placement"),
    [
        (10, Placement()),
        (4, Placement(strategy="STRICT_PACK")),
        (3, Placement(strategy="STRICT_SPREAD")),
        (6, Placement(exclude=("a",))),
        (5, Placement(devices_per_node=2)),
        (8, Placement(num_nodes=2)),
        (6, Placement(num_nodes=3)),
    ],
)
def test_what_just_fits(world_size: int, placement: Placement) -> None:
    assert shortfall(NODES, world_size, Device.CPU, placement) is None


@pytest.mark.parametrize(
    ("world_size", "placement", "room"),
    [
        (11, Placement(), "10"),
        (5, Placement(strategy="STRICT_PACK"), "4"),
        (4, Placement(strategy="STRICT_SPREAD"), "3"),
        (7, Placement(exclude=("a",)), "6"),
        (7, Placement(devices_per_node=2), "6"),
        (9, Placement(num_nodes=2), "8"),
        (9, Placement(num_nodes=3), "8"),  # three even shares of 3 do not fit on c
        (2, Placement(num_nodes=4), "3"),  # fewer nodes than asked for
    ],
)
def test_what_can_never_fit_says_needs_and_has(world_size: int, placement: Placement, room: str) -> None:
    lack = shortfall(NODES, world_size, Device.CPU, placement)
    assert lack is not None
    assert f"needs {world_size} ranks" in lack
    assert f"room for {room}" in lack


def test_no_nodes_hold_nothing() -> None:
    assert shortfall((), 1, Device.CPU, Placement()) is not None


def test_a_gpu_rank_needs_a_gpu_and_a_cpu() -> None:
    nodes = (node("a", num_cpus=1, num_gpus=8), node("b", num_cpus=16, num_gpus=2))
    assert shortfall(nodes, 3, Device.CUDA, Placement()) is None
    assert shortfall(nodes, 4, Device.CUDA, Placement()) is not None


def test_auto_is_cuda_where_every_rank_can_have_a_gpu() -> None:
    nodes = (*NODES, node("g", num_gpus=2))
    for world_size, placement, device in [
        (1, Placement(), Device.CUDA),
        (2, Placement(), Device.CUDA),
        (3, Placement(), Device.CPU),
        (2, Placement(strategy="STRICT_SPREAD"), Device.CPU),
        (1, Placement(exclude=("g",)), Device.CPU),
    ]:
        choice = choose_device(Device.AUTO, nodes, world_size, placement)
        assert (choice.device, f"{world_size} ranks" in str(choice.why)) == (device, True)
    assert choose_device(Device.AUTO, NODES, 1, Placement()).device is Device.CPU


def test_a_device_that_was_asked_for_stays() -> None:
    for device in (Device.CPU, Device.CUDA):
        choice = choose_device(device, (node("g", num_gpus=1),), 4, Placement())
        assert (choice.device, choice.why) == (device, None)


def test_any_node_needs_no_selector() -> None:
    assert bundle_selectors(NODES, 4, Device.CPU, Placement()) == []


def test_exclusion_names_the_nodes_that_remain() -> None:
    selectors = bundle_selectors(NODES, 2, Device.CPU, Placement(exclude=("b",)))
    assert selectors == [{"ray.io/node-id": "in(id-a,id-c)"}] * 2


@pytest.mark.parametrize("placement", [Placement(devices_per_node=2), Placement(num_nodes=2)])
def test_limits_per_node_pin_every_rank(placement: Placement) -> None:
    selectors = bundle_selectors(NODES, 4, Device.CPU, placement)
    assert [selector["ray.io/node-id"] for selector in selectors] == ["id-a", "id-a", "id-b", "id-b"]
