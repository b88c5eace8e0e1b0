"""Event streams over a real server: replay, following, heartbeats, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest

from service.api import events as events_route
from service.domain.validation import new_validation_id


def create(server, **request) -> str:
    return str(httpx.post(f"{server.base_url}/validate", json=request).raise_for_status().json()["id"])


async def read_stream(server, validation_id: str, **headers) -> tuple[httpx.Response, str]:
    async with httpx.AsyncClient(timeout=20) as client:
        response = await client.get(f"{server.base_url}/validations/{validation_id}/events", headers=headers)
    return response, response.text


def parse(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_a_stream_replays_follows_and_ends_with_the_final_event(server, dispatcher):
    validation_id = create(server)
    claim = await dispatcher.start(validation_id)
    reading = asyncio.create_task(read_stream(server, validation_id))
    await asyncio.sleep(0.3)
    for step in range(3):
        await dispatcher.say(claim, "step", {"step": step, "max_abs_error": float("nan"), "text": "a\u2028b\nc"})
        await asyncio.sleep(0.05)
    await dispatcher.complete(claim)
    response, text = await asyncio.wait_for(reading, 5)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    entries = parse(text)
    assert [entry["event"] for entry in entries] == ["queued", "claimed", "formed", "step", "step", "step", "completed"]
    assert [int(entry["id"]) for entry in entries] == list(range(1, 8))
    step = json.loads(entries[3]["data"])
    assert (step["seq"], step["type"]) == (4, "step")
    assert step["data"] == {"step": 0, "max_abs_error": "NaN", "text": "a\u2028b\nc"}
    assert "NaN" in entries[3]["data"]
    assert json.loads(entries[-1]["data"])["data"]["verdict"] == "pass"


async def test_last_event_id_continues_after_it_and_204_says_that_nothing_follows(server, dispatcher):
    validation_id = create(server)
    await dispatcher.complete(await dispatcher.start(validation_id))
    response, text = await read_stream(server, validation_id, **{"Last-Event-ID": "2"})
    assert [entry["event"] for entry in parse(text)] == ["formed", "completed"]
    for seen in ("4", "99"):
        response, text = await read_stream(server, validation_id, **{"Last-Event-ID": seen})
        assert (response.status_code, text) == (204, "")


@pytest.mark.parametrize("seen", ["x", "-1", "1.5", "9" * 30])
async def test_a_last_event_id_that_is_none_is_422(server, seen):
    response, _ = await read_stream(server, create(server), **{"Last-Event-ID": seen})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "header.Last-Event-ID"


async def test_an_unknown_validation_is_404_and_not_an_empty_stream(server):
    response, _ = await read_stream(server, new_validation_id())
    assert response.status_code == 404


async def test_a_long_history_arrives_whole(server, dispatcher):
    validation_id = create(server)
    claim = await dispatcher.start(validation_id)
    for block in range(3):
        await asyncio.gather(*(dispatcher.say(claim, "step", {"n": block * 10 + n}) for n in range(10)))
    async with dispatcher.database.transaction() as connection:
        from service.storage import events

        await events.append_many(connection, validation_id, [("step", {"n": n}) for n in range(1200)])
    await dispatcher.fail(claim)
    _, text = await read_stream(server, validation_id)
    assert [int(entry["id"]) for entry in parse(text)] == list(range(1, 3 + 30 + 1200 + 2))


async def test_an_idle_stream_beats(server, monkeypatch):
    monkeypatch.setattr(events_route, "HEARTBEAT_S", 0.1)
    validation_id = create(server)
    async with (
        httpx.AsyncClient(timeout=5) as client,
        client.stream("GET", f"{server.base_url}/validations/{validation_id}/events") as response,
    ):
        lines = response.aiter_lines()
        comments = 0
        async for line in lines:
            comments += line.startswith(":")
            if comments == 3:
                break


def subscriptions(running) -> int:
    return sum(len(waiting) for waiting in running.app.state.services.hub._subscriptions.values())


async def settle(condition, timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


def open_raw(running, request: str) -> socket.socket:
    host, port = running.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(request.encode())
    return connection


async def test_clients_that_leave_release_their_subscriptions(own_server):
    validation_id = create(own_server)
    streams = [
        open_raw(own_server, f"GET /validations/{validation_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(20)
    ]
    waits = [
        open_raw(
            own_server, "POST /validate HTTP/1.1\r\nHost: localhost\r\nPrefer: wait=60\r\nContent-Length: 0\r\n\r\n"
        )
        for _ in range(20)
    ]
    await settle(lambda: subscriptions(own_server) == 40, timeout_s=20)
    await settle(lambda: own_server.app.state.services.database.engine.pool.checkedout() == 0)
    for connection in streams + waits:
        connection.close()
    await settle(lambda: subscriptions(own_server) == 0, timeout_s=2.0)


async def test_shutdown_ends_streams_and_waits_at_once(own_server):
    validation_id = create(own_server)
    stream = asyncio.create_task(read_stream(own_server, validation_id))

    async def wait() -> httpx.Response:
        async with httpx.AsyncClient(timeout=20) as client:
            return await client.post(f"{own_server.base_url}/validate", headers={"Prefer": "wait=60"})

    waiting = asyncio.create_task(wait())
    await settle(lambda: subscriptions(own_server) == 2)
    started_s = time.monotonic()
    await asyncio.to_thread(own_server.stop)
    assert time.monotonic() - started_s < 2.0
    assert (await waiting).status_code == 202
    _, text = await stream
    assert [entry["event"] for entry in parse(text)] == ["queued"]
