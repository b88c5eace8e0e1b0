"""OpenTelemetry traces: one of a validation runs from its POST through the dispatcher to its verdict.

Off, and without cost, unless `OTEL_EXPORTER_OTLP_ENDPOINT` (or `..._TRACES_ENDPOINT`) names a collector; the extra
`gradgate[otel]` brings the exporter. The other `OTEL_*` variables mean what OpenTelemetry says. What carries a trace
from one process to the other is W3C's `traceparent`, stored with the validation.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger("gradgate.tracing")


def configure_tracing(service_name: str) -> None:
    """Send this process's spans to the collector that the environment names, if it names one."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("no traces: the exporter is not installed; pip install 'gradgate[otel]'")
        return
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service_name}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def request_span(method: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """The span of one HTTP request, under the caller's where it sent a `traceparent`."""
    caller = _PROPAGATOR.extract(dict(headers))
    with _tracer().start_as_current_span(method, context=caller, kind=SpanKind.SERVER) as span:
        yield span


def describe_response(span: Span, method: str, route: str, status: int) -> None:
    """Put what is known at a request's end on its span; names and attributes as OpenTelemetry's HTTP conventions."""
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def current_traceparent() -> str | None:
    """The `traceparent` of the current span, to be stored; None where nothing is traced."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent")


def tell_attempt(
    traceparent: str | None,
    attributes: Mapping[str, str | int],
    seconds_by_phase: Mapping[str, float],
    error: str | None,
) -> None:
    """One span of an attempt that has just ended, with one below it for each of its phases, in their order.

    Durations come from monotonic clocks; only the end is read off the wall. Nothing where the request was not traced.
    """
    if traceparent is None:
        return
    request = _PROPAGATOR.extract({"traceparent": traceparent})
    end_ns = time.time_ns()
    at_ns = end_ns - round(sum(seconds_by_phase.values()) * 1e9)
    attempt = _tracer().start_span("attempt", context=request, start_time=at_ns, attributes=dict(attributes))
    below = trace.set_span_in_context(attempt, Context())
    for phase, seconds in seconds_by_phase.items():
        span = _tracer().start_span(phase, context=below, start_time=at_ns)
        at_ns += round(seconds * 1e9)
        span.end(at_ns)
    if error is not None:
        attempt.set_status(Status(StatusCode.ERROR, error))
    attempt.end(end_ns)


def _tracer() -> Any:
    return trace.get_tracer("gradgate")
