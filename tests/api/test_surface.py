"""What every path has in common: problems, ids, health, the OpenAPI document."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from service.api.documents import ValidationDocument
from service.api.problems import KINDS
from service.app import create_app
from service.settings import Settings


async def test_an_unknown_path_is_a_problem(api):
    response = await api.get("/validation")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert response.headers["content-type"] == "application/problem+json"


async def test_a_wrong_method_is_a_problem_that_says_which_is_right(api):
    response = await api.put("/validate")
    assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_a_request_id_is_given_back_or_made(api):
    assert (await api.get("/healthz", headers={"X-Request-ID": "abc-1"})).headers["x-request-id"] == "abc-1"
    made = (await api.get("/healthz", headers={"X-Request-ID": "a b"})).headers["x-request-id"]
    assert len(made) == 32


async def test_a_bug_is_a_500_problem_with_the_request_id_and_no_details(settings):
    app = create_app(settings)

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("secret")

    async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
        response = await client.get("/broken", headers={"X-Request-ID": "bug-1"})
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"] == response.json()["request_id"] == "bug-1"
    assert "secret" not in response.text


async def test_health_and_readiness(api):
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    assert (await api.get("/readyz")).json() == {"status": "ready"}


async def test_a_database_that_is_not_migrated_is_not_ready(postgres_url, settings):
    import psycopg

    name = "unmigrated"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template1")
        url = postgres_url.replace(connection.info.dbname, name)
    app = create_app(settings.model_copy(update={"database_url": url}))
    async with lifespan(app), AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
        response = await client.get("/readyz")
    assert (response.status_code, response.json()["code"]) == (503, "not_ready")
    assert "gradgate migrate" in response.json()["detail"]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def lifespan(app: FastAPI):
    return app.router.lifespan_context(app)


async def test_without_its_database_the_process_lives_and_says_so():
    settings = Settings(database_url="postgresql://nobody@127.0.0.1:1/none", database_timeout_s=2)
    app = create_app(settings)
    async with lifespan(app), AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/healthz")).status_code == 200
        for response in (await client.get("/readyz"), await client.get("/validations"), await client.post("/validate")):
            assert (response.status_code, response.json()["code"]) == (503, "database_unavailable")


async def test_a_server_without_a_database_setting_says_what_to_set():
    with pytest.raises(RuntimeError, match="GRADGATE_DATABASE_URL"):
        async with lifespan(create_app(Settings(database_url=None))):
            pass


@pytest.fixture(scope="module")
async def openapi(api):
    return (await api.get("/openapi.json")).json()


def operations(openapi):
    return [operation for path in openapi["paths"].values() for operation in path.values()]


async def test_operations_have_ids_and_document_their_problems(openapi):
    ids = [operation["operationId"] for operation in operations(openapi)]
    assert sorted(ids) == [
        "cancelValidation",
        "createValidation",
        "getHealth",
        "getMetrics",
        "getReadiness",
        "getValidation",
        "listOrderings",
        "listRankDivergence",
        "listTrace",
        "listValidations",
        "predict",
        "streamValidationEvents",
    ]
    for operation in operations(openapi):
        for status, response in operation["responses"].items():
            if status >= "400":
                content = response["content"]["application/problem+json"]
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
                assert content["examples"]
    codes = set(openapi["components"]["schemas"]["Problem"]["properties"]["code"]["enum"])
    assert codes == {kind.code for kind in KINDS}
    validate = openapi["paths"]["/validate"]["post"]["responses"]
    assert {"200", "202", "406", "409", "413", "415", "422", "500", "503"} <= set(validate)
    assert "HTTPValidationError" not in openapi["components"]["schemas"]


async def test_every_reference_resolves(openapi):
    def references(node):
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(openapi))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in openapi["components"]["schemas"]


async def test_limits_and_headers_are_in_the_document(openapi):
    schemas = openapi["components"]["schemas"]
    assert "<= 64 ranks" in schemas["ValidateRequest"]["description"]
    assert schemas["ValidateRequest"]["additionalProperties"] is False
    assert schemas["ValidateRequest"]["properties"]["steps"]["maximum"] == 100
    assert schemas["MeshRequest"]["properties"]["dp"]["minimum"] == 1
    create = openapi["paths"]["/validate"]["post"]
    assert {parameter["name"] for parameter in create["parameters"]} == {"Prefer", "Idempotency-Key"}
    body = create["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ValidateRequest"}
    assert "65536 bytes" in create["requestBody"]["description"]
    events = openapi["paths"]["/validations/{validation_id}/events"]["get"]
    assert "Last-Event-ID" in {parameter["name"] for parameter in events["parameters"]}
    assert "text/event-stream" in events["responses"]["200"]["content"]
    ranks = openapi["paths"]["/validations/{validation_id}/ranks"]["get"]
    assert set(ranks["responses"]["200"]["content"]) == {"application/json", "text/csv"}


async def test_the_examples_work(api, openapi):
    for path, created in (("/validate", 202), ("/predict", 200)):
        body = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["examples"]
        for example in body["examples"].values():
            assert (await api.post(path, json=example["value"])).status_code == created
    ValidationDocument.model_validate(openapi["components"]["schemas"]["ValidationDocument"]["example"])


def test_serving_loads_neither_torch_nor_ray():
    code = "import sys, service.server; assert not {'torch', 'ray', 'numpy'} & set(sys.modules), 'too much loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)
