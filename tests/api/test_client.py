"""The client against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from service.client import GradgateClient, ProblemError, ServerUnreachableError


async def test_a_validation_from_start_to_end(client, dispatcher):
    validation = client.validate({"seed": 3, "cluster": "client"})
    assert validation["request"]["seed"] == 3
    claim = await dispatcher.start(validation["id"], "client")
    reading = asyncio.create_task(asyncio.to_thread(lambda: list(client.events(validation["id"]))))
    await asyncio.sleep(0.2)
    await dispatcher.complete(claim)
    events = await asyncio.wait_for(reading, 10)
    assert [event.type for event in events] == ["queued", "claimed", "formed", "completed"]
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert events[-1].data["verdict"] == "pass"
    assert client.get(validation["id"])["verdict"] == "pass"
    assert len(list(client.ranks(validation["id"], limit=3))) == 8
    assert len(list(client.trace(validation["id"], step=0))) == 4
    assert [item["id"] for item in client.validations(cluster="client", limit=1)] == [validation["id"]]
    assert list(client.events(validation["id"], last_event_id=4)) == []


async def test_waiting_for_the_end(client, dispatcher):
    assert client.validate({"cluster": "slow"}, wait_s=1)["state"] == "queued"


async def test_one_key_is_one_validation(client):
    first = client.validate({}, idempotency_key="client-key")
    assert client.validate({}, idempotency_key="client-key")["id"] == first["id"]
    assert client.validate({})["id"] != first["id"]


def test_a_refusal_carries_the_problems_fields(client):
    with pytest.raises(ProblemError) as caught:
        client.validate({"mesh": {"dp": 0}})
    error = caught.value
    assert (error.status, error.code) == (422, "invalid_request")
    assert error.errors[0]["field"] == "mesh.dp"
    assert error.request_id
    assert "mesh.dp" in str(error)


def test_cancel_predict_orderings_and_ready(client):
    validation_id = client.validate({"cluster": "cancel"})["id"]
    assert client.cancel(validation_id)["state"] == "cancelled"
    assert [event.type for event in client.events(validation_id)] == ["queued", "cancelled"]
    assert client.predict({"ordering": "fixed"})["misowned_elements"] == 0
    assert len(client.orderings()) == 8
    assert client.ready()
    assert client.wait_ready(1)


def test_a_server_that_is_not_there_is_a_typed_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with GradgateClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            assert not client.ready()
            assert not client.wait_ready(0.1)
            with pytest.raises(ServerUnreachableError, match="gradgate serve"):
                client.get("val_x")
            started_s = time.monotonic()
            with pytest.raises(ServerUnreachableError):
                list(client.events("val_x", patience_s=0.5))
            assert time.monotonic() - started_s < 5


def test_proxies_of_the_environment_do_not_come_between_a_machine_and_itself(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with GradgateClient(server.base_url) as client:
        assert client.ready()


async def test_events_survive_a_server_that_goes_away_and_comes_back(settings, dispatcher, start_server):
    first = start_server(settings)
    port = int(first.base_url.rsplit(":", 1)[1])
    with GradgateClient(first.base_url) as client:
        validation_id = client.validate({"cluster": "restart"})["id"]
        claim = await dispatcher.start(validation_id, "restart")
        seen: list[int] = []
        reader = threading.Thread(target=lambda: seen.extend(event.seq for event in client.events(validation_id)))
        reader.start()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(first.stop)
        await dispatcher.say(claim, "step", {"step": 0})
        await asyncio.sleep(0.3)
        second = await asyncio.to_thread(start_server, settings.model_copy(update={"port": port}))
        await dispatcher.complete(claim)
        await asyncio.to_thread(reader.join, 20)
        assert seen == [1, 2, 3, 4, 5]
        await asyncio.to_thread(second.stop)


def test_an_answer_that_is_no_problem_document_is_still_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\nConnection: close\r\n\r\noops!")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with GradgateClient(url) as client, pytest.raises(ProblemError) as caught:
            client.orderings()
    assert (caught.value.status, caught.value.detail) == (502, "oops!")
