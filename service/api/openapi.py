"""The parts of the OpenAPI document that FastAPI cannot derive: problems and self-parsed bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from service.api.bodies import MAX_BODY_BYTES
from service.api.problems import (
    DATABASE_UNAVAILABLE,
    DETAILS_EXPIRED,
    FORBIDDEN,
    INFEASIBLE,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    KEY_REUSED,
    KINDS,
    MALFORMED_JSON,
    MEDIA_TYPE,
    NOT_ACCEPTABLE,
    RATE_LIMITED,
    UNAUTHENTICATED,
    FieldError,
    Problem,
    ProblemKind,
    document,
)

SCHEMA_NAME = "Problem"


def body_schema(model: type[BaseModel], examples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI request body of a route that reads `model` with `read_model`; its schema goes into components."""
    content = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}, "examples": examples}
    description = f"Strict JSON of at most {MAX_BODY_BYTES} bytes; unknown fields are refused. Empty means {{}}."
    return {"required": False, "description": description, "content": {"application/json": content}}


def responses(*kinds: ProblemKind) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for what a route can answer besides success: `kinds`, and what every route can."""
    by_status: dict[int, list[ProblemKind]] = {}
    for kind in (*kinds, NOT_ACCEPTABLE, INTERNAL_ERROR, DATABASE_UNAVAILABLE):
        known = by_status.setdefault(kind.status, [])
        if kind not in known:
            known.append(kind)
    return {status: _openapi_response(found) for status, found in sorted(by_status.items())}


def protected(*kinds: ProblemKind) -> dict[int | str, dict[str, Any]]:
    """The same for a route that asks who asks."""
    return responses(UNAUTHENTICATED, FORBIDDEN, RATE_LIMITED, *kinds)


def _openapi_response(kinds: Sequence[ProblemKind]) -> dict[str, Any]:
    examples = {kind.code: {"summary": kind.title, "value": _example(kind)} for kind in kinds}
    content = {"schema": {"$ref": f"#/components/schemas/{SCHEMA_NAME}"}, "examples": examples}
    description = "; ".join(f"`{kind.code}`: {kind.title}" for kind in kinds)
    return {"description": description, "content": {MEDIA_TYPE: content}}


def _example(kind: ProblemKind) -> dict[str, Any]:
    problem = Problem(kind, kind.example, _EXAMPLE_ERRORS.get(kind, ()), _EXAMPLE_MEMBERS.get(kind, {}))
    return document(problem, "/validate") | _EXAMPLE_ID


_EXAMPLE_ID = {"request_id": "5f0c3d9a2b7e4c6f8a1d0e9b3c2f7a64"}
_EXAMPLE_MEMBERS: dict[ProblemKind, dict[str, Any]] = {
    INFEASIBLE: {
        "needs": {"num_ranks": 4096, "device": "cuda", "num_nodes": 1},
        "has": {"num_nodes": 1, "num_cpus": 64.0, "num_gpus": 8.0, "observed_at": "2026-01-01T00:00:00Z"},
    },
    DETAILS_EXPIRED: {"removed_at": "2026-01-01T00:00:00Z", "retention_days": 90},
}
_EXAMPLE_ERRORS = {
    INVALID_REQUEST: (FieldError("mesh.dp", 0, "must be at least 1", "send a value of at least 1"),),
    MALFORMED_JSON: (FieldError("", '{"mesh":}', "expecting value at line 1, column 9", "send one JSON object"),),
    KEY_REUSED: (
        FieldError(
            "header.Idempotency-Key",
            "nightly-1",
            "is already used for another request",
            "use a new key for a new request",
        ),
    ),
}

SCHEMA: dict[str, Any] = {
    "title": SCHEMA_NAME,
    "description": "RFC 9457. `code` is stable; `errors` is there where input is at fault.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance", "code", "request_id"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "code": {"type": "string", "enum": [kind.code for kind in KINDS]},
        "request_id": {"type": ["string", "null"]},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["field", "value", "rule", "remedy"],
                "properties": {
                    "field": {
                        "type": "string",
                        "description": "`mesh.dp`, `orderings[1]`; empty: the whole body.",
                    },
                    "value": {"description": "What was given, shortened."},
                    "rule": {"type": "string"},
                    "remedy": {"type": "string"},
                },
            },
        },
        "needs": {"type": "object", "description": "With `infeasible`: what the request needs."},
        "has": {"type": "object", "description": "With `infeasible`: what the cluster has, and when that was seen."},
        "removed_at": {"type": "string", "format": "date-time", "description": "With `details_expired`."},
        "retention_days": {"type": "integer", "description": "With `details_expired`: the setting then in force."},
    },
}
