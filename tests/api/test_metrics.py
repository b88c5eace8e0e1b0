"""GET /metrics as Prometheus reads it."""

from __future__ import annotations

from httpx import AsyncClient
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: AsyncClient) -> Samples:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"gradgate_{name}", frozenset(labels.items())), 0.0)


async def test_what_waits_is_counted_by_cluster(api: AsyncClient) -> None:
    cluster = {"cluster": "metered"}
    for _ in range(2):
        assert (await api.post("/validate", json=cluster)).status_code == 202
    samples = await scrape(api)
    assert value(samples, "queue_depth", **cluster) == 2
    assert value(samples, "queue_oldest_age_seconds", **cluster) > 0
    assert value(samples, "validations", **cluster, state="queued", verdict="") == 2


async def test_requests_are_counted_by_route_and_never_by_id(api: AsyncClient) -> None:
    route = "/validations/{validation_id}"
    labels = {"method": "GET", "route": route, "status": "404"}
    before = value(await scrape(api), "http_requests_total", **labels)
    for number in range(3):
        await api.get(f"/validations/val_{number:026d}")
        await api.get(f"/nowhere/{number}")
    samples = await scrape(api)
    assert value(samples, "http_requests_total", **labels) == before + 3
    assert value(samples, "http_request_duration_seconds_count", route=route) >= 3
    assert value(samples, "http_requests_in_flight") == 1  # this scrape itself
    routes = {dict(labels).get("route") for _, labels in samples}
    assert "(none)" in routes
    assert not any("nowhere" in str(each) or "val_" in str(each) for each in routes)
