"""What surrounds every request: its id, its one log line, its count, and the answer to an error nobody handled.

A plain ASGI middleware: it never touches the body, so streams pass through it unbuffered.
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import telemetry
from service.api.metrics import HttpMetrics, route_of
from service.api.problems import INTERNAL_ERROR, Problem, respond
from service.tracing import Span, describe_response, request_span

HEADER = "X-Request-ID"
_log = logging.getLogger("service.api")


class RequestLog:
    """Gives each request an id (the caller's, if plain), returns it in a header; logs and counts it at its end."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        chosen = telemetry.choose_request_id(Headers(scope=scope).get(HEADER))
        token = telemetry.request_id.set(chosen)
        try:
            with (
                self._metrics.in_flight.track_inprogress(),
                request_span(scope["method"], Headers(scope=scope)) as span,
            ):
                await self._serve(scope, receive, send, chosen, span)
        finally:
            telemetry.request_id.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, chosen: str, span: Span) -> None:
        started_s = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = chosen
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request failed", extra=_place(scope))
            if status is not None:
                raise
            detail = f"the server failed; its log has the details under request id {chosen}"
            await respond(Problem(INTERNAL_ERROR, detail), scope["path"])(scope, receive, send_with_id)
        finally:
            duration_s = time.perf_counter() - started_s
            status = status or 499  # the client left before there was one to send
            about = _place(scope) | {"status": status, "duration_ms": round(duration_s * 1e3, 2)}
            if key := scope.get("state", {}).get("key"):
                about["key"] = key
            _log.info("request", extra=about)
            self._metrics.count(scope, status, duration_s)
            describe_response(span, scope["method"], route_of(scope), status)


def _place(scope: Scope) -> dict[str, object]:
    return {"method": scope["method"], "path": scope["path"]}
