"""What a dispatcher counts, as Prometheus reads it over HTTP."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.execution.measures import Measures


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_attempts_and_their_phases_are_counted_and_scraped() -> None:
    measures, port = Measures(), free_port()
    measures.expose("127.0.0.1", port)
    measures.leading.set(1)
    measures.ended("completed", "pass", {"queued_s": 0.25, "run_s": 3.0, "warm": True, "phases_s": {"tie": 1.0}})
    measures.ended("failed", None, {"queued_s": 0.75})
    with httpx.Client(trust_env=False) as client:
        text = client.get(f"http://127.0.0.1:{port}/metrics").text
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["gradgate_dispatcher_leading", ()] == 1
    assert samples["gradgate_attempts_total", ("completed", "pass")] == 1
    assert samples["gradgate_attempts_total", ("failed", "")] == 1
    assert samples["gradgate_phase_duration_seconds_count", ("queued",)] == 2
    assert samples["gradgate_phase_duration_seconds_sum", ("queued",)] == 1.0
    assert samples["gradgate_phase_duration_seconds_sum", ("run",)] == 3.0
    assert not any("warm" in labels or "tie" in labels for _, labels in samples)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(OSError, match="in use"):
            Measures().expose("127.0.0.1", holder.getsockname()[1])
