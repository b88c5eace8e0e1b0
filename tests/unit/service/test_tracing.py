"""Spans as a collector receives them: over HTTP, in OpenTelemetry's own encoding."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.tracing import current_traceparent

TRACE = "0af7651916cd43dd8448eb211c80319c"
PROGRAM = f"""
from opentelemetry import trace
from service.tracing import configure_tracing, current_traceparent, describe_response, request_span, tell_attempt

configure_tracing("gradgate-test")
with request_span("POST", {{"traceparent": "00-{TRACE}-b7ad6b7169203331-01"}}) as span:
    stored = current_traceparent()
    describe_response(span, "POST", "/validate", 202)
tell_attempt(stored, {{"gradgate.validation_id": "val_1"}}, {{"queued": 0.5, "run": 2.0}}, "a rank died")
tell_attempt(None, {{}}, {{"run": 1.0}}, None)
trace.get_tracer_provider().shutdown()
"""


class Collector(BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []
    handler = type("Handler", (Collector,), {"received": received})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def test_one_trace_from_the_caller_to_the_verdict(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    address, received = collector
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=60)
    resources = [spans for request in received for spans in request.resource_spans]
    names = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    assert names == {"gradgate-test"}
    spans = {span.name: span for r in resources for scope in r.scope_spans for span in scope.spans}
    assert set(spans) == {"POST /validate", "attempt", "queued", "run"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    request, attempt = spans["POST /validate"], spans["attempt"]
    assert (request.parent_span_id.hex(), attempt.parent_span_id) == ("b7ad6b7169203331", request.span_id)
    assert all(spans[phase].parent_span_id == attempt.span_id for phase in ("queued", "run"))
    seconds = {name: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for name, s in spans.items()}
    assert (seconds["queued"], seconds["run"], seconds["attempt"]) == (0.5, 2.0, 2.5)
    assert spans["queued"].end_time_unix_nano == spans["run"].start_time_unix_nano
    assert attempt.status.message == "a rank died"
    attributes = {a.key: a.value for a in request.attributes}
    assert attributes["http.response.status_code"].int_value == 202


def test_without_a_collector_nothing_is_traced() -> None:
    assert current_traceparent() is None
