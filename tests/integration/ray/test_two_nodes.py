"""Placement over two nodes: names are the operator's labels, limits hold, a lost node takes its gangs along."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from service.domain.validation import State

from .conftest import Service, cluster_of, serve

TWO_BY_TWO = {"probes": ["exact"], "orderings": ["fixed", "buggy"], "steps": 1}


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[Any]:
    with cluster_of({"node-a": 3, "node-b": 2}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def service(cluster: Any, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with serve(postgres_url, tmp_path_factory.mktemp("home"), cluster.address) as running:
        yield running


async def test_ranks_spread_as_asked_and_nodes_have_their_operators_names(service: Service) -> None:
    validation = await service.validate(TWO_BY_TWO | {"placement": {"nodes": 2}})
    assert validation.state is State.COMPLETED, validation.error
    assert [rank["node"] for rank in validation.fingerprint] == ["node-a", "node-a", "node-b", "node-b"]
    [reserved] = [event for event in await service.history(validation.id) if event.type == "reserved"]
    assert reserved.data["nodes"] == ["node-a", "node-b"]


async def test_a_rank_that_dies_is_placed_on_its_node(service: Service) -> None:
    drill = {"fault": "kill_in_collective", "world_rank": 2, "step": 0}
    validation = await service.validate(TWO_BY_TWO | {"placement": {"nodes": 2}, "drill": drill})
    assert validation.error is not None
    assert (validation.error.code, validation.error.world_rank, validation.error.node) == ("rank_died", 2, "node-b")


async def test_an_excluded_node_stays_empty(service: Service) -> None:
    request = TWO_BY_TWO | {"mesh": {"dp": 2, "pp": 1}, "placement": {"exclude": ["node-a"]}}
    validation = await service.validate(request)
    assert {rank["node"] for rank in validation.fingerprint} == {"node-b"}


async def test_what_fits_the_total_but_not_the_placement_is_infeasible(service: Service) -> None:
    validation = await service.validate(TWO_BY_TWO | {"placement": {"strategy": "STRICT_PACK"}})
    assert validation.error is not None
    assert validation.error.code == "infeasible"
    assert "the largest has room for 3" in validation.error.message


async def test_a_lost_node_takes_its_warm_gang_along(service: Service, cluster: Any) -> None:
    [node_b] = [node for node in cluster.list_all_nodes() if not node.head]
    cluster.remove_node(node_b)
    request = TWO_BY_TWO | {"mesh": {"dp": 2, "pp": 1}}
    validation = await service.validate(request | {"placement": {"exclude": ["node-b"]}})
    assert {rank["node"] for rank in validation.fingerprint} == {"node-a"}
    gone = await service.validate(request | {"placement": {"exclude": ["node-a"]}, "deadline_s": 30})
    assert gone.state is State.FAILED
