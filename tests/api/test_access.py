"""API keys over HTTP: who may do what, and what happens without one. Real database, real application."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from httpx import ASGITransport, AsyncClient

from service.app import create_app
from service.domain.keys import Scope, hash_secret, new_secret
from service.storage import keys


@pytest.fixture(scope="module")
async def make(database):
    """Makes keys; returns their headers and the key."""

    async def create(name: str, *scopes: Scope, **fields):
        secret = new_secret()
        async with database.transaction() as connection:
            key = await keys.create(connection, name=name, secret_hash=hash_secret(secret), scopes=scopes, **fields)
        return {"Authorization": f"Bearer {secret}"}, key

    return create


@pytest.fixture(scope="module")
async def admin(make):
    headers, _ = await make("admin", Scope.ADMIN)
    return headers


OPEN = ("/healthz", "/readyz")
"""What anybody may ask: a probe has no key."""


async def post(api: AsyncClient, headers: dict[str, str], body: dict | None = None, **more: str) -> httpx.Response:
    return await api.post("/validate", json=body or {}, headers=headers | more)


def test_before_the_first_key_the_server_is_open(own_server):
    # First in this file: the fixtures of the others make keys.
    base = own_server.base_url
    assert httpx.get(f"{base}/validations").status_code == 200
    assert httpx.post(f"{base}/validate").status_code == 202
    foreign = httpx.post(f"{base}/validate", headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["code"]) == (403, "forbidden")
    assert httpx.post(f"{base}/validate", headers={"Origin": base}).status_code == 202
    # A site whose name was pointed at this machine is of one origin with the server: its name gives it away.
    for host in ("evil.example:8470", "[::1", "10.0.0.1", ""):
        rebound = httpx.get(f"{base}/validations", headers={"Host": host, "Origin": f"http://{host}"})
        assert (rebound.status_code, rebound.json()["code"]) == (403, "forbidden"), host
    for host in ("localhost", "[::1]:8470"):
        assert httpx.get(f"{base}/orderings", headers={"Host": host}).status_code == 200


async def test_beyond_loopback_nothing_is_open_even_without_keys(settings):
    app = create_app(settings.model_copy(update={"host": "0.0.0.0"}))
    async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app), base_url="http://t") as api:
        response = await api.get("/validations")
        assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
        assert "gradgate keys create" in response.json()["detail"]
        assert (await api.get("/healthz")).status_code == 200


async def test_once_a_key_was_made_nothing_opens_without_and_nothing_without_its_scope(api, make, admin):
    powerless, _ = await make("powerless", Scope.DRILL)  # goes with another scope only
    routes = (await api.get("/openapi.json")).json()["paths"]
    for path, methods in routes.items():
        for method in methods:
            response = await api.request(method.upper(), path.format(validation_id="val_" + "0" * 26))
            if path in OPEN:
                assert response.status_code == 200, path
                continue
            assert (response.status_code, response.json()["code"]) == (401, "unauthenticated"), path
            assert response.headers["www-authenticate"].startswith("Bearer")
            nothing = await api.request(method.upper(), path.format(validation_id="x"), headers=powerless)
            assert (nothing.status_code, nothing.json()["code"]) == (403, "forbidden"), path
    assert (await api.get("/orderings", headers=admin)).status_code == 200


async def test_the_log_names_the_key_and_never_its_secret(api, make, caplog):
    headers, key = await make("logged", Scope.READ)
    secret = headers["Authorization"].removeprefix("Bearer ")
    with caplog.at_level("DEBUG"):
        assert (await api.get("/validations", headers=headers)).status_code == 200
        assert (await api.get(f"/validations?cursor={secret}", headers=headers)).status_code == 422
    ours = [record for record in caplog.records if record.name != "httpx"]  # the client's own log has its URLs
    assert [record.key for record in ours if record.message == "request"] == [key.name] * 2
    assert not any(secret in str(vars(record)) for record in ours)


@pytest.mark.parametrize(
    "sent", ["Bearer ggk_wrong", "Bearer " + "ggk_" + "a" * 43, "Basic YWRtaW46YWRtaW4=", "Bearer"]
)
async def test_a_wrong_key_is_refused_without_being_repeated(api, admin, sent):
    response = await api.get("/validations", headers={"Authorization": sent})
    assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
    assert "a" * 43 not in response.text


async def test_revoked_and_expired_keys_open_nothing(api, make, database):
    headers, key = await make("short", Scope.READ, expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert (await api.get("/validations", headers=headers)).status_code == 200
    async with database.transaction() as connection:
        revoked = await keys.revoke(connection, "short")
        assert revoked is not None
        again = await keys.revoke(connection, key.id)
        assert again == revoked
    response = await api.get("/validations", headers=headers)
    assert (response.status_code, "revoked" in response.json()["detail"]) == (401, True)
    headers, _ = await make("over", Scope.READ, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    response = await api.get("/validations", headers=headers)
    assert (response.status_code, "expired" in response.json()["detail"]) == (401, True)


async def test_scopes(api, make):
    reader, _ = await make("reader", Scope.READ)
    starter, _ = await make("starter", Scope.VALIDATE)
    driller, _ = await make("driller", Scope.VALIDATE, Scope.DRILL)
    drill = {"drill": {"fault": "kill_in_collective", "world_rank": 0}}
    response = await post(api, reader)
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")
    assert "scope validate" in response.json()["detail"]
    assert (await post(api, starter)).status_code == 202
    assert (await api.get("/validations", headers=starter)).status_code == 403
    response = await post(api, starter, drill)
    assert (response.status_code, "scope drill" in response.json()["detail"]) == (403, True)
    assert (await post(api, driller, drill)).status_code == 202


async def test_a_key_reaches_its_clusters_only(api, make, admin):
    headers, _ = await make("east", Scope.READ, Scope.VALIDATE, clusters=["east"])
    mine = (await post(api, headers, {"cluster": "east"})).json()["id"]
    other = (await post(api, admin, {"cluster": "west"})).json()["id"]
    refused = await post(api, headers, {"cluster": "west"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert [item["id"] for item in (await api.get("/validations", headers=headers)).json()["items"]] == [mine]
    assert (await api.get("/validations?cluster=west", headers=headers)).status_code == 403
    for path in ("", "/ranks", "/trace", "/events"):
        assert (await api.get(f"/validations/{other}{path}", headers=headers)).status_code == 404
    assert (await api.post(f"/validations/{other}/cancel", headers=headers)).status_code == 404
    assert (await api.get(f"/validations/{other}", headers=admin)).json()["state"] == "queued"
    assert (await api.post(f"/validations/{mine}/cancel", headers=headers)).json()["state"] == "cancelled"


async def test_an_idempotency_key_is_one_per_api_key(api, make):
    one, _ = await make("one", Scope.VALIDATE)
    two, _ = await make("two", Scope.VALIDATE)
    name = {"Idempotency-Key": "nightly"}
    answers = await asyncio.gather(*(post(api, one, {"seed": 1}, **name) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await post(api, two, {"seed": 2}, **name)
    assert other.status_code == 202
    assert other.json()["id"] != answers[0].json()["id"]
    clash = await post(api, one, {"seed": 2}, **name)
    assert (clash.status_code, clash.json()["code"]) == (422, "idempotency_key_reused")


async def test_unended_validations_of_a_key_are_capped_exactly(settings, make):
    headers, _ = await make("greedy", Scope.READ, Scope.VALIDATE)
    app = create_app(settings.model_copy(update={"max_active_validations": 3}))
    async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app), base_url="http://t") as api:
        answers = await asyncio.gather(*(post(api, headers, {"cluster": "greedy"}) for _ in range(8)))
        assert sorted(answer.status_code for answer in answers) == [202] * 3 + [429] * 5
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["code"] == "too_many_active_validations"
        assert int(refused.headers["retry-after"]) > 0
        stored = next(answer for answer in answers if answer.status_code == 202).json()["id"]
        await api.post(f"/validations/{stored}/cancel", headers=headers)
        assert (await post(api, headers, {"cluster": "greedy"})).status_code == 202


async def test_a_key_that_asks_too_often_is_told_when_to_come_back(settings, make, admin):
    headers, _ = await make("busy", Scope.READ)
    app = create_app(settings.model_copy(update={"max_requests_per_minute": 2}))
    async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app), base_url="http://t") as api:
        assert [(await api.get("/orderings", headers=headers)).status_code for _ in range(2)] == [200, 200]
        refused = await api.get("/orderings", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await api.get("/orderings", headers=admin)).status_code == 200


async def test_the_last_use_is_noted(api, make, database):
    headers, key = await make("used", Scope.READ)
    assert key.last_used_at is None
    await api.get("/orderings", headers=headers)
    async with database.read() as connection:
        first = next(found for found in await keys.list_all(connection) if found.id == key.id).last_used_at
    await api.get("/orderings", headers=headers)
    async with database.read() as connection:
        second = next(found for found in await keys.list_all(connection) if found.id == key.id).last_used_at
    assert first is not None
    assert second == first  # not written again within the minute


async def test_the_document_says_how_to_authenticate(api):
    document = (await api.get("/openapi.json")).json()
    (name,) = document["components"]["securitySchemes"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            protected = path not in OPEN
            assert (operation.get("security") == [{name: []}]) is protected, path
            assert ({"401", "403", "429"} <= set(operation["responses"])) is protected, path
