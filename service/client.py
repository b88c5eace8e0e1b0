"""The HTTP API as Python calls, for the CLI and for scripts. Synchronous; imports neither torch nor ray.

Every refusal of the server is a `ProblemError` with the problem's own fields; a server that cannot be reached
is a `ServerUnreachableError`. `validate` is safe to repeat: it always sends an Idempotency-Key.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})
_STREAM_SILENCE_S = 45.0
"""Three missed heartbeats: the connection is dead even if nobody closed it."""
_RETRY_DELAYS_S = (0.1, 0.4)

Json = dict[str, Any]


class ClientError(Exception):
    """Root of what the client raises."""


class ServerUnreachableError(ClientError):
    """No answer came back."""


class ProblemError(ClientError):
    """The server refused; the attributes are the members of its problem document (RFC 9457)."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(document.get("code", "unknown"))
        self.title = str(document.get("title", "The server refused"))
        self.detail = str(document.get("detail", ""))
        self.errors: list[Json] = list(document.get("errors", []))
        self.request_id: str | None = document.get("request_id")
        self.document = dict(document)
        super().__init__(f"{self.title}: {self.detail}" if self.detail else self.title)


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One entry of a validation's history, as streamed; `seq` is its Last-Event-ID."""

    seq: int
    type: str
    at: str
    data: Json


class GradgateClient:
    """A connection to one Gradgate server. Close it, or use it as a context manager."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8470",
        *,
        timeout_s: float = 10.0,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        # A proxy from the environment must never stand between this machine and itself.
        trust_env = urlsplit(self.base_url).hostname not in _LOOPBACK
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.Client(base_url=self.base_url, timeout=timeout_s, headers=sent, trust_env=trust_env)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def validate(
        self,
        request: Mapping[str, Any] | None = None,
        *,
        wait_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Json:
        """Store a validation and return it; with `wait_s`, after at most that time (the server caps it) or its end."""
        headers = {"Idempotency-Key": f'"{idempotency_key or uuid.uuid4().hex}"'}
        if wait_s is not None:
            headers["Prefer"] = f"wait={max(0, round(wait_s))}"
        timeout_s = self._timeout_s + (wait_s or 0.0)
        return self._json("POST", "/validate", json=dict(request or {}), headers=headers, timeout=timeout_s)

    def get(self, validation_id: str) -> Json:
        """One validation."""
        return self._json("GET", _path(validation_id))

    def validations(self, **filters: Any) -> Iterator[Json]:
        """Validations, newest first, by page: filters cluster, state, verdict, label (a list), limit (a page)."""
        return self._pages("/validations", filters)

    def ranks(self, validation_id: str, **filters: Any) -> Iterator[Json]:
        """Divergence rows in order, page by page: filters probe, ordering, step, limit."""
        return self._pages(_path(validation_id, "ranks"), filters)

    def trace(self, validation_id: str, **filters: Any) -> Iterator[Json]:
        """Trace rows in order, page by page: filters probe, ordering, step, limit."""
        return self._pages(_path(validation_id, "trace"), filters)

    def cancel(self, validation_id: str) -> Json:
        """Ask for a validation to end; returns it as it is now."""
        return self._json("POST", _path(validation_id, "cancel"))

    def predict(self, request: Mapping[str, Any] | None = None) -> Json:
        """Which elements an ordering gets wrong, from layout alone."""
        return self._json("POST", "/predict", json=dict(request or {}))

    def orderings(self) -> list[Json]:
        """The catalogue of orderings."""
        items: list[Json] = self._json("GET", "/orderings")["items"]
        return items

    def ready(self) -> bool:
        """Whether the server is up, its database reachable and migrated."""
        try:
            return self._http.get("/readyz").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for `ready`; False when the time is up."""
        end_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.05)
        return True

    def events(
        self, validation_id: str, *, last_event_id: int | None = None, patience_s: float = 30.0
    ) -> Iterator[ServerEvent]:
        """The validation's history as it happens, to its final event, each entry once.

        A lost connection is taken up where it broke; after `patience_s` without a server, ServerUnreachableError.
        """
        failing_since_s: float | None = None
        while True:
            failure: Exception | None = None
            try:
                for event in self._stream(validation_id, last_event_id):
                    last_event_id, failing_since_s = event.seq, None
                    yield event
                    if event.type in _TERMINAL_EVENTS:
                        return
            except _StreamOver:
                return
            except ProblemError as error:
                if error.status < httpx.codes.INTERNAL_SERVER_ERROR:
                    raise
                failure = error
            except httpx.TransportError as error:
                failure = self._unreachable(error)
            failing_since_s = failing_since_s or time.monotonic()
            if failure is not None and time.monotonic() - failing_since_s > patience_s:
                raise failure
            time.sleep(0.2)

    def _stream(self, validation_id: str, last_event_id: int | None) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = str(last_event_id)
        timeout = httpx.Timeout(self._timeout_s, read=_STREAM_SILENCE_S)
        with self._http.stream("GET", _path(validation_id, "events"), headers=headers, timeout=timeout) as response:
            if response.status_code == httpx.codes.NO_CONTENT:
                raise _StreamOver
            if response.is_error:
                response.read()
                raise _problem(response)
            yield from _parse_events(response.iter_lines())

    def _pages(self, path: str, filters: Mapping[str, Any]) -> Iterator[Json]:
        parameters = {name: value for name, value in filters.items() if value is not None}
        while True:
            page = self._json("GET", path, params=parameters)
            yield from page["items"]
            if page["next_cursor"] is None:
                return
            parameters["cursor"] = page["next_cursor"]

    def _json(self, method: str, path: str, **arguments: Any) -> Json:
        response = self._send(method, path, **arguments)
        if response.is_error:
            raise _problem(response)
        answer: Json = response.json()
        return answer

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        # Every call here is safe to repeat (a key makes POST /validate so), so a broken connection is tried again.
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return self._http.request(method, path, **arguments)
            except httpx.TimeoutException as error:
                raise self._unreachable(error) from error
            except httpx.TransportError as error:
                if delay_s is None:
                    raise self._unreachable(error) from error
                time.sleep(delay_s)
        raise AssertionError("unreachable: the last delay is None")

    def _unreachable(self, error: Exception) -> ServerUnreachableError:
        cause = str(error) or type(error).__name__
        return ServerUnreachableError(f"{self.base_url} does not answer ({cause}); is `gradgate serve` running there?")


class _StreamOver(Exception):  # noqa: N818 - not an error
    """The server said that no event will ever follow."""


def _path(validation_id: str, part: str | None = None) -> str:
    path = f"/validations/{quote(validation_id, safe='')}"
    return f"{path}/{part}" if part else path


def _problem(response: httpx.Response) -> ProblemError:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {"title": f"HTTP {response.status_code}", "detail": response.text[:200]}
    return ProblemError(response.status_code, document)


def _parse_events(lines: Iterator[str]) -> Iterator[ServerEvent]:
    """Server-sent events, each holding one JSON document; comments and unknown fields are skipped."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            entry = json.loads("\n".join(data))
            data.clear()
            yield ServerEvent(entry["seq"], entry["type"], entry["at"], entry["data"])
