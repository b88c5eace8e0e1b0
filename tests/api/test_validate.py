"""POST /validate: what is stored, what is refused, repeating and waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx
import pytest

from service.api.documents import ValidationDocument
from service.execution.messages import NodeCapacity
from service.storage import capacity
from service.storage.capacity import CapacitySnapshot
from workers.encoding import plain
from workers.faults import FAULTS

DEFAULT_REQUEST = {
    "cluster": "default",
    "mesh": {"dp": 2, "pp": 2, "tp": 1, "vpp": 1},
    "model": "tiny",
    "batch": {"micro_batch_size": 1, "num_microbatches": 2},
    "schedule": "1f1b",
    "overlap": False,
    "bucket_size": None,
    "average_in_collective": False,
    "normalization": "microbatches",
    "probes": ["exact", "gpt"],
    "orderings": ["buggy", "fixed", "own_bucket"],
    "steps": 2,
    "repeats": 1,
    "dtype": "float32",
    "grad_reduce_dtype": "float32",
    "device": "auto",
    "placement": {"nodes": None, "exclude": [], "strategy": "PACK", "devices_per_node": None},
    "launcher": "pool",
    "stack": "reference",
    "seed": 0,
    "deadline_s": 120,
    "drill": None,
    "labels": {},
}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"json": {}},
        {"content": b"", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
        {"content": b" \n", "headers": {"Content-Type": "application/json"}},
        {"content": b"{}", "headers": {"Content-Type": "application/json; charset=utf-8"}},
    ],
)
async def test_nothing_at_all_is_a_valid_request_and_is_stored_with_its_defaults(api, arguments):
    response = await api.post("/validate", **arguments)
    assert response.status_code == 202
    body = response.json()
    assert response.headers["location"] == f"/validations/{body['id']}"
    assert body["request"] == DEFAULT_REQUEST
    assert list(body["request"]) == list(DEFAULT_REQUEST)
    again = (await api.get(response.headers["location"])).json()
    assert again == body | {"attempts": [], "details_removed_at": None}


async def test_a_new_validation_has_exactly_the_contracts_shape(api):
    body = (await api.post("/validate")).json()
    assert set(body) == set(ValidationDocument.model_fields)
    ValidationDocument.model_validate(body)
    assert (body["state"], body["attempt"], body["schema_version"]) == ("queued", 0, 1)
    assert body["verdict_rules_version"] >= 1
    assert body["trials"] == body["reasons"] == []
    for name in ("verdict", "cause", "error", "fingerprint", "started_at", "finished_at", "cancel_requested_at"):
        assert body[name] is None
    assert body["created_at"].endswith("Z")
    assert abs((datetime.now(UTC) - datetime.fromisoformat(body["created_at"])).total_seconds()) < 60


@pytest.mark.parametrize(
    ("request_body", "field", "value"),
    [
        ({"mesh": {"dp": 0}}, "mesh.dp", 0),
        ({"mesh": {"dp": 65, "pp": 1}}, "mesh", 65),
        ({"mesh": {"pp": 5}, "probes": ["gpt"]}, "mesh.pp", 5),
        ({"batch": {"num_microbatches": 0}}, "batch.num_microbatches", 0),
        ({"batch": {"num_microbatches": 1}}, "batch.num_microbatches", 1),
        ({"model": {"hidden_size": 32, "num_heads": 5}}, "model.num_heads", 5),
        ({"model": "gpt-17"}, "model", "gpt-17"),
        ({"steps": 50, "repeats": 50}, "repeats", 50),
        ({"orderings": ["buggy", "best"]}, "orderings[1]", "best"),
        ({"orderings": []}, "orderings", "[]"),
        ({"mesh": {"vpp": 3}}, "mesh.vpp", 3),
        ({"mesh": {"vpp": 2}, "schedule": "gpipe"}, "schedule", "gpipe"),
        ({"mesh": {"vpp": 2}, "batch": {"num_microbatches": 3}}, "batch.num_microbatches", 3),
        ({"bucket_size": 8000}, "bucket_size", 8000),
        ({"orderings": ["buggy", "mean_of_means"]}, "orderings[1]", "mean_of_means"),
        ({"normalization": "num_tokens", "average_in_collective": True}, "average_in_collective", True),
        ({"grad_reduce_dtype": "float16"}, "grad_reduce_dtype", "float16"),
        ({"grad_reduce_dtype": "bfloat16", "model": {}}, "grad_reduce_dtype", "bfloat16"),
        ({"overlap": True, "bucket_size": 0}, "bucket_size", 0),
        ({"seed": -1}, "seed", -1),
        ({"drill": {"fault": "kill_in_collective", "world_rank": 4}}, "drill.world_rank", 4),
        ({"drill": {"fault": "flood"}}, "drill.fault", "flood"),
        ({"drill": {"fault": "kill_in_collective", "world_rank": 1, "node": "n"}}, "drill.node", "n"),
        ({"drill": {"fault": "kill_in_collective", "step": 2}}, "drill.step", 2),
        ({"drill": {"fault": "kill_in_collective", "probability": 0.0}}, "drill.probability", 0.0),
        ({"drill": {"fault": "kill_in_collective", "probability": "often"}}, "drill.probability", "often"),
        ({"drill": {"world_rank": 1}}, "drill.fault", None),
        ({"labels": {"team": 3}}, "labels.team", 3),
        ({"steps": True}, "steps", True),
        ({"colour": "red"}, "colour", "red"),
    ],
)
async def test_every_limit_is_a_422_naming_field_value_rule_and_remedy(api, request_body, field, value):
    response = await api.post("/validate", json=request_body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == "invalid_request"
    assert problem["request_id"] == response.headers["x-request-id"]
    error = next(error for error in problem["errors"] if error["field"] == field)
    assert error["value"] == value
    assert error["rule"]
    assert error["remedy"]


async def test_a_refused_request_leaves_nothing_behind(api):
    before = (await api.get("/validations", params={"limit": 200})).json()["items"]
    await api.post("/validate", json={"mesh": {"dp": 0}})
    await api.post("/validate", content=b"{", headers={"Content-Type": "application/json"})
    assert (await api.get("/validations", params={"limit": 200})).json()["items"] == before


async def test_broken_json_is_a_422_of_its_own(api):
    response = await api.post("/validate", content=b'{"steps": }', headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["code"]) == (422, "malformed_json")
    assert "line 1, column 11" in response.json()["detail"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_of_another_type_is_415(api, content_type):
    request = api.build_request("POST", "/validate", content=b"{}")
    if content_type:
        request.headers["Content-Type"] = content_type
    response = await api.send(request)
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
    response = await api.post("/validate", json={}, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415


async def test_a_large_body_is_413_whether_or_not_it_says_so(api):
    declared = await api.post("/validate", content=b" " * 70_000, headers={"Content-Type": "application/json"})
    assert (declared.status_code, declared.json()["code"]) == (413, "body_too_large")

    async def endless():
        while True:
            yield b" " * 10_000

    undeclared = await api.post("/validate", content=endless(), headers={"Content-Type": "application/json"})
    assert undeclared.status_code == 413


async def test_a_key_repeats_its_request_and_refuses_another(api):
    headers = {"Idempotency-Key": '"nightly-7"'}
    first = await api.post("/validate", json={"seed": 7}, headers=headers)
    assert "idempotency-replayed" not in first.headers
    same = await api.post(
        "/validate", content=b'{"steps":2, "seed":7}', headers={**headers, "Content-Type": "application/json"}
    )
    assert (same.status_code, same.json()["id"]) == (202, first.json()["id"])
    assert same.headers["idempotency-replayed"] == "true"
    unquoted = await api.post("/validate", json={"seed": 7}, headers={"Idempotency-Key": "nightly-7"})
    assert unquoted.json()["id"] == first.json()["id"]
    other = await api.post("/validate", json={"seed": 8}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert other.json()["errors"][0]["field"] == "header.Idempotency-Key"


async def test_concurrent_requests_with_one_key_store_one_validation(api):
    headers = {"Idempotency-Key": "rush"}
    answers = await asyncio.gather(*(api.post("/validate", headers=headers) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1


async def test_the_order_of_labels_does_not_make_another_request(api):
    headers = {"Idempotency-Key": "labels", "Content-Type": "application/json"}
    first = await api.post("/validate", content=b'{"labels":{"a":"1","b":"2"}}', headers=headers)
    second = await api.post("/validate", content=b'{"labels":{"b":"2","a":"1"}}', headers=headers)
    assert second.status_code == 202
    assert second.json()["id"] == first.json()["id"]


async def _see(
    database,
    cluster: str,
    num_cpus: float,
    num_gpus: float = 0.0,
    nodes: Sequence[NodeCapacity] = (),
    stacks: Sequence[str] = ("reference",),
) -> None:
    snapshot = CapacitySnapshot(
        cluster, datetime.now(UTC), len(nodes) or 1, num_cpus, num_gpus, plain(nodes), tuple(stacks)
    )
    async with database.transaction() as connection:
        await capacity.store_snapshot(connection, cluster, "test", snapshot)


async def test_a_mesh_larger_than_the_cluster_is_409_and_says_what_there_is(api, database):
    await _see(database, "small", num_cpus=4)
    assert (await api.post("/validate", json={"cluster": "small"})).status_code == 202
    response = await api.post("/validate", json={"cluster": "small", "mesh": {"dp": 4}})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (409, "infeasible")
    assert problem["needs"] == {"num_ranks": 8, "device": "cpu", "num_nodes": 1}
    assert problem["has"]["num_cpus"] == 4
    assert "8 ranks" in problem["detail"]
    listed = (await api.get("/validations", params={"cluster": "small"})).json()["items"]
    assert len(listed) == 1, "the refused one is not stored"


async def test_a_stack_that_the_cluster_does_not_know_is_422_and_says_which_there_are(api, database):
    asked = {"cluster": "stacked", "stack": "acme"}
    assert (await api.post("/validate", json=asked)).status_code == 202, "nobody has said yet what there is"
    await _see(database, "stacked", num_cpus=4)
    response = await api.post("/validate", json=asked)
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "invalid_request")
    assert problem["errors"][0] | {"remedy": ""} == {
        "field": "stack",
        "value": "acme",
        "rule": "cluster stacked knows reference",
        "remedy": "",
    }
    await _see(database, "stacked", num_cpus=4, stacks=("reference", "acme"))
    accepted = await api.post("/validate", json=asked)
    assert (accepted.status_code, accepted.json()["request"]["stack"]) == (202, "acme")


@pytest.mark.parametrize("stack", ["", "os:system", "a b", "x" * 64, None])
async def test_a_stack_is_a_name_and_nothing_else(api, stack):
    response = await api.post("/validate", json={"stack": stack})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "stack"


async def test_nodes_that_cannot_hold_a_placement_are_409(api, database):
    nodes = [NodeCapacity(f"id-{name}", name, "10.0.0.1", 2.0, 0.0) for name in "ab"]
    await _see(database, "two", num_cpus=4, nodes=nodes)
    asked = {"cluster": "two", "placement": {"nodes": 2}}
    assert (await api.post("/validate", json=asked)).status_code == 202
    response = await api.post("/validate", json=asked | {"placement": {"exclude": ["a"]}})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (409, "infeasible")
    assert problem["needs"]["exclude"] == ["a"]
    assert problem["has"]["room"] == {"b": 2}


async def test_repeating_an_accepted_request_stays_accepted_when_the_cluster_shrinks(api, database):
    asked = {"json": {"cluster": "shrinking"}, "headers": {"Idempotency-Key": "shrinking"}}
    await _see(database, "shrinking", num_cpus=4)
    first = await api.post("/validate", **asked)
    await _see(database, "shrinking", num_cpus=1)
    assert (await api.post("/validate", **asked)).json()["id"] == first.json()["id"]
    assert (await api.post("/validate", json={"cluster": "shrinking"})).status_code == 409


async def test_without_a_fresh_snapshot_any_size_is_queued(api):
    response = await api.post("/validate", json={"cluster": "unseen", "mesh": {"dp": 32}})
    assert response.status_code == 202


async def _started(api: httpx.AsyncClient, cluster: str) -> str:
    while True:
        items = (await api.get("/validations", params={"cluster": cluster})).json()["items"]
        if items:
            return str(items[0]["id"])
        await asyncio.sleep(0.01)


async def test_waiting_answers_as_soon_as_the_validation_ends(api, dispatcher):
    async def run() -> float:
        claim = await dispatcher.start(await _started(api, "waited"), "waited")
        await asyncio.sleep(0.3)
        await dispatcher.complete(claim)
        return time.monotonic()

    running = asyncio.create_task(run())
    response = await api.post("/validate", json={"cluster": "waited"}, headers={"Prefer": "wait=3"})
    late_s = time.monotonic() - await running
    assert response.status_code == 200
    assert response.headers["preference-applied"] == "wait=3"
    assert response.json()["verdict"] == "pass"
    assert late_s < 1.0


async def test_waiting_is_capped_and_then_answers_202(api):
    started_s = time.monotonic()
    response = await api.post("/validate", json={"cluster": "nobody"}, headers={"Prefer": "wait=3600"})
    assert 2.5 < time.monotonic() - started_s < 6
    assert response.status_code == 202
    assert response.headers["preference-applied"] == "wait=3"
    assert response.json()["state"] == "queued"


async def test_a_preference_that_is_not_understood_is_not_applied(api):
    response = await api.post("/validate", headers={"Prefer": "wait=soon"})
    assert response.status_code == 202
    assert "preference-applied" not in response.headers


async def test_many_waiting_requests_hold_no_database_session(api, app, database):
    engine = app.state.services.database.engine
    requests = [
        asyncio.create_task(api.post("/validate", json={"cluster": "crowd"}, headers={"Prefer": "wait=3"}))
        for _ in range(50)
    ]
    started_s = time.monotonic()
    while len(app.state.services.hub._subscriptions) < 50 or engine.pool.checkedout() > 0:
        await asyncio.sleep(0.02)
        assert not any(request.done() for request in requests)
    print("settled", time.monotonic() - started_s)
    assert (await api.get("/validations", params={"limit": 1})).status_code == 200
    assert {response.status_code for response in await asyncio.gather(*requests)} == {202}


async def test_progress_does_not_make_a_waiting_request_read(api, app, dispatcher):
    """Steps come by the dozen while the ranks need the processor."""
    from sqlalchemy import event

    async def run() -> int:
        claim = await dispatcher.start(await _started(api, "quiet"), "quiet")
        await asyncio.sleep(0.2)
        statements: list[str] = []

        def note(connection, cursor, statement, *_):
            statements.append(statement)

        engine = app.state.services.database.engine.sync_engine
        event.listen(engine, "before_cursor_execute", note)
        for step in range(20):
            await dispatcher.say(claim, "step", {"step": step})
        await asyncio.sleep(0.2)
        event.remove(engine, "before_cursor_execute", note)
        await dispatcher.complete(claim)
        return len(statements)

    running = asyncio.create_task(run())
    response = await api.post("/validate", json={"cluster": "quiet"}, headers={"Prefer": "wait=3"})
    assert response.status_code == 200
    assert await running == 0


async def test_an_unknown_fault_is_answered_with_the_catalogue(api):
    problem = (await api.post("/validate", json={"drill": {"fault": "flood"}})).json()
    [error] = problem["errors"]
    assert all(name in error["rule"] for name in FAULTS)


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({}, {"world_rank": 0, "node": None}),
        ({"world_rank": 3}, {"world_rank": 3, "node": None}),
        ({"node": "node-b"}, {"world_rank": None, "node": "node-b"}),
    ],
)
async def test_a_drill_is_stored_with_what_it_is_bound_to(api, given, bound):
    response = await api.post("/validate", json={"drill": {"fault": "raise_in_collective"} | given})
    assert response.status_code == 202
    filled = {"fault": "raise_in_collective", "step": 0, "probability": 1.0} | bound
    assert response.json()["request"]["drill"] == filled
