"""What surrounds every request: its id, its one log line, and the answer to an error nobody handled.

A plain ASGI middleware: it never touches the body, so streams pass through it unbuffered.
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import telemetry
from service.api.problems import INTERNAL_ERROR, Problem, respond

HEADER = "X-Request-ID"
_log = logging.getLogger("service.api")


class RequestLog:
    """Gives each request an id (the caller's, if plain), returns it in a header and logs one line at its end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        chosen = telemetry.choose_request_id(Headers(scope=scope).get(HEADER))
        token = telemetry.request_id.set(chosen)
        try:
            await self._serve(scope, receive, send, chosen)
        finally:
            telemetry.request_id.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, chosen: str) -> None:
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
            duration_ms = round((time.perf_counter() - started_s) * 1e3, 2)
            # 499: the client left before there was a status to send.
            about = _place(scope) | {"status": status or 499, "duration_ms": duration_ms}
            if key := scope.get("state", {}).get("key"):
                about["key"] = key
            _log.info("request", extra=about)


def _place(scope: Scope) -> dict[str, object]:
    return {"method": scope["method"], "path": scope["path"]}
