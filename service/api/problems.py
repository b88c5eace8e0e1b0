"""Errors on the wire: RFC 9457 problem documents with a stable `code` and, where input is at fault, field paths.

The catalogue below is the whole list of codes; OpenAPI is generated from it. Must not decide anything: a
route raises `Problem`, this file says how it reads.
"""

from __future__ import annotations

import http
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from service import telemetry
from workers.encoding import dumps

MEDIA_TYPE = "application/problem+json"
_MAX_ECHO_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One kind of problem. `code` never changes meaning; `example` stands in OpenAPI."""

    code: str
    status: int
    title: str
    example: str


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing wrong with the input: where, what was given, the rule it breaks, and what to send instead."""

    field: str
    value: Any
    rule: str
    remedy: str


MALFORMED_JSON = ProblemKind("malformed_json", 422, "The body is not JSON", "expected a value at line 1, column 9")
INVALID_REQUEST = ProblemKind("invalid_request", 422, "The request breaks a rule", "mesh.dp: 0 is not at least 1")
KEY_REUSED = ProblemKind(
    "idempotency_key_reused",
    422,
    "The Idempotency-Key was used for another request",
    "the key was first used with another body; use a new key for a new request",
)
UNAUTHENTICATED = ProblemKind(
    "unauthenticated", 401, "No good API key", "send `Authorization: Bearer KEY`; `gradgate keys create` makes one"
)
FORBIDDEN = ProblemKind(
    "forbidden",
    403,
    "The API key does not allow this",
    "this needs the scope drill; the key 'nightly' has validate",
)
RATE_LIMITED = ProblemKind(
    "rate_limited", 429, "Too many requests", "the key 'nightly' asks more often than 600 times a minute; slow down"
)
TOO_MANY_ACTIVE = ProblemKind(
    "too_many_active_validations",
    429,
    "Too many validations that have not ended",
    "100 validations of the key 'nightly' have not ended, the most allowed; wait for some or cancel them",
)
VALIDATION_NOT_FOUND = ProblemKind(
    "validation_not_found", 404, "No such validation", "no validation has the id val_unknown"
)
DETAILS_EXPIRED = ProblemKind(
    "details_expired",
    410,
    "Retention has removed the details",
    "events and per-rank rows of this validation were removed on 2026-01-01, 90 days after its week; its verdict stays",
)
NOT_FOUND = ProblemKind("not_found", 404, "No such path", "nothing is served at /validation")
METHOD_NOT_ALLOWED = ProblemKind("method_not_allowed", 405, "Method not allowed", "PUT is not allowed here")
NOT_ACCEPTABLE = ProblemKind("not_acceptable", 406, "Not acceptable", "this resource is application/json or text/csv")
INFEASIBLE = ProblemKind(
    "infeasible", 409, "The cluster is too small for this mesh", "the mesh needs 4096 ranks; cluster default has 8"
)
BODY_TOO_LARGE = ProblemKind("body_too_large", 413, "The body is too large", "a body has at most 65536 bytes")
UNSUPPORTED_MEDIA_TYPE = ProblemKind(
    "unsupported_media_type", 415, "Unsupported media type", "send the body as application/json"
)
INTERNAL_ERROR = ProblemKind("internal_error", 500, "Internal error", "the request id finds it in the server's log")
DATABASE_UNAVAILABLE = ProblemKind(
    "database_unavailable", 503, "The database is not reachable", "try again in a few seconds"
)
NOT_READY = ProblemKind("not_ready", 503, "Not ready", "the database is at another migration than this server")

KINDS: tuple[ProblemKind, ...] = (
    UNAUTHENTICATED,
    FORBIDDEN,
    RATE_LIMITED,
    TOO_MANY_ACTIVE,
    MALFORMED_JSON,
    INVALID_REQUEST,
    KEY_REUSED,
    VALIDATION_NOT_FOUND,
    DETAILS_EXPIRED,
    NOT_FOUND,
    METHOD_NOT_ALLOWED,
    NOT_ACCEPTABLE,
    INFEASIBLE,
    BODY_TOO_LARGE,
    UNSUPPORTED_MEDIA_TYPE,
    INTERNAL_ERROR,
    DATABASE_UNAVAILABLE,
    NOT_READY,
)
_BY_STATUS = {
    404: NOT_FOUND,
    405: METHOD_NOT_ALLOWED,
    406: NOT_ACCEPTABLE,
    413: BODY_TOO_LARGE,
    415: UNSUPPORTED_MEDIA_TYPE,
}


@dataclass(slots=True)
class Problem(Exception):  # noqa: N818 - RFC 9457 calls it a problem, and so do the API and its clients
    """What a route raises to answer with a problem document. `extra` are further members of that document."""

    kind: ProblemKind
    detail: str
    errors: tuple[FieldError, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def invalid(errors: Sequence[FieldError], kind: ProblemKind = INVALID_REQUEST) -> Problem:
    """The 422 for these errors; its detail is the first of them in a sentence."""
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Problem(kind, f"{first.field or 'body'}: {first.rule}; {first.remedy}{more}", tuple(errors))


def field_path(parts: Iterable[str | int]) -> str:
    """`mesh.dp`, `orderings[1]`, `labels["a.b"]`: how a place in the input is written."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("-", "_").isidentifier():
            path += f".{part}" if path else part
        else:
            path += "[" + dumps(part) + "]"
    return path


def echo(value: object) -> object:
    """The offending value, short enough to send back."""
    if isinstance(value, (dict, list, tuple)):
        value = dumps(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        value = f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _MAX_ECHO_CHARACTERS:
        return value[:_MAX_ECHO_CHARACTERS] + "..."
    return value


def document(problem: Problem, instance: str) -> dict[str, Any]:
    """The problem's members, RFC 9457's first."""
    kind = problem.kind
    body: dict[str, Any] = {
        "type": f"urn:gradgate:problem:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": problem.detail,
        "instance": instance,
        "code": kind.code,
        "request_id": telemetry.request_id.get(),
    }
    if problem.errors:
        body["errors"] = [
            {"field": error.field, "value": echo(error.value), "rule": error.rule, "remedy": error.remedy}
            for error in problem.errors
        ]
    return body | dict(problem.extra)


def respond(problem: Problem, instance: str) -> Response:
    """The HTTP response for a problem."""
    return Response(
        dumps(document(problem, instance)).encode(),
        status_code=problem.kind.status,
        media_type=MEDIA_TYPE,
        headers=dict(problem.headers),
    )


async def answer_problem(request: Request, error: Exception) -> Response:
    """Handles `Problem`."""
    assert isinstance(error, Problem)
    return respond(error, request.url.path)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Handles what the framework itself refuses: unknown paths and methods, and the like."""
    assert isinstance(error, HTTPException)
    kind = _BY_STATUS.get(error.status_code)
    if kind is None:
        phrase = http.HTTPStatus(error.status_code).phrase
        kind = ProblemKind(phrase.lower().replace(" ", "_"), error.status_code, phrase, "")
    detail = {
        404: f"nothing is served at {request.url.path}; GET /openapi.json lists the paths",
        405: f"{request.method} is not allowed on {request.url.path}; the Allow header lists what is",
    }.get(error.status_code, str(error.detail))
    return respond(Problem(kind, detail, headers=error.headers or {}), request.url.path)


async def answer_invalid_parameters(request: Request, error: Exception) -> Response:
    """Handles parameters of the path, query and headers that FastAPI refused."""
    assert isinstance(error, RequestValidationError)
    return respond(invalid([describe_error(item) for item in error.errors()]), request.url.path)


async def answer_database_error(request: Request, error: Exception) -> Response:
    """Handles a database that cannot be reached."""
    detail = (
        "the database did not answer; try again in a few seconds. Should its answer alone have been lost, the same "
        "Idempotency-Key stores nothing twice"
    )
    return respond(Problem(DATABASE_UNAVAILABLE, detail, headers={"Retry-After": "2"}), request.url.path)


_RULES: dict[str, tuple[str, str]] = {
    "extra_forbidden": ("is not a known field", "remove it, or check its spelling against GET /openapi.json"),
    "missing": ("is required", "add it"),
    "int_type": ("must be an integer", "send a JSON integer such as 2 (not 2.0, true or a string)"),
    "int_parsing": ("must be an integer", "send digits only"),
    "bool_type": ("must be a boolean", "send true or false"),
    "string_type": ("must be a string", "send a JSON string"),
    "list_type": ("must be an array", "send a JSON array"),
    "dict_type": ("must be an object", "send a JSON object"),
    "model_type": ("must be an object", "send a JSON object"),
    "too_short": ("has too few items: at least {min_length}", "add items, or leave the field out for its default"),
    "too_long": ("has too many items: at most {max_length}", "send fewer items"),
    "string_too_short": ("must have at least {min_length} characters", "send a longer string"),
    "string_too_long": ("must have at most {max_length} characters", "shorten it"),
    "string_pattern_mismatch": ("must match {pattern}", "use only the characters that the pattern allows"),
    "greater_than_equal": ("must be at least {ge}", "send a value of at least {ge}"),
    "less_than_equal": ("must be at most {le}", "send a value of at most {le}"),
    "enum": ("must be one of {expected}", "choose one of them"),
    "literal_error": ("must be one of {expected}", "choose one of them"),
}


def describe_error(error: Mapping[str, Any]) -> FieldError:
    """One pydantic error in our words. Location parts such as ~name and [key] name a branch or a role, not a field."""
    parts = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith(("~", "[")))]
    context = error.get("ctx") or {}
    rule, remedy = _RULES.get(error["type"], (str(error["msg"]), "see GET /openapi.json for what is allowed"))
    value = None if error["type"] == "missing" else error.get("input")
    return FieldError(field_path(parts), value, rule.format(**context), remedy.format(**context))
