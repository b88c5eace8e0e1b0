"""Request bodies: strict JSON into strict models, or a problem that says what to send instead.

Stricter than the parser underneath: no duplicate names, no NaN or Infinity (also not by overflow), no
characters that the database cannot hold, a size limit that holds while the body arrives, UTF-8 only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.api.problems import (
    BODY_TOO_LARGE,
    MALFORMED_JSON,
    UNSUPPORTED_MEDIA_TYPE,
    FieldError,
    Problem,
    describe_error,
    field_path,
    invalid,
)

MAX_BODY_BYTES = 64 * 1024
_MAX_FIELD_ERRORS = 20

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]


async def read_model(request: Request, model: type[Model]) -> Model:
    """The request's body as `model`; an empty body is `{}`. Raises Problem 413, 415 or 422."""
    body = await _read_limited(request)
    if not body.strip():
        return parse_model(b"{}", model)
    _require_json(request)
    return parse_model(body, model)


def parse_model(body: bytes, model: type[Model]) -> Model:
    """Strict JSON bytes as `model`. Raises Problem 422 naming every field at fault."""
    errors = list(_strictness_errors((), _parse(body)))
    if errors:
        raise invalid(errors[:_MAX_FIELD_ERRORS])
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)[:_MAX_FIELD_ERRORS]
        raise invalid([describe_error(item) for item in found]) from error


async def _read_limited(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large() -> Problem:
    return Problem(
        BODY_TOO_LARGE,
        f"the body is larger than {MAX_BODY_BYTES} bytes; send a smaller one",
        headers={"Connection": "close"},
    )


def _require_json(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding} is not supported; send the body unencoded")
    given = request.headers.get("content-type")
    message = Message()
    message["content-type"] = given or ""
    subtype = message.get_content_type()
    if given is None or not (subtype == "application/json" or subtype.endswith("+json")):
        detail = f"the body's Content-Type is {given or 'missing'}; send JSON as Content-Type: application/json"
        raise Problem(UNSUPPORTED_MEDIA_TYPE, detail, headers={"Accept-Post": "application/json"})


class _Object(dict[str, Any]):
    """A parsed object that remembers the names it was given more than once."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        found.repeated = tuple(name for name in found if names.count(name) > 1)
    return found


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _malformed(None, f"byte {error.start} is not UTF-8", "send the body as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"at line {error.lineno}, column {error.colno}"
        excerpt = error.doc[max(0, error.pos - 20) : error.pos + 20]
        raise _malformed(excerpt, f"{error.msg.lower()} {place}", "send one JSON object") from error
    except (ValueError, RecursionError) as error:
        raise _malformed(None, "a number is too long or the nesting too deep", "send a plain request object") from error


def _malformed(excerpt: str | None, rule: str, remedy: str) -> Problem:
    return invalid([FieldError("", excerpt, rule, remedy)], MALFORMED_JSON)


def _strictness_errors(path: Path, value: Any) -> Iterator[FieldError]:
    if isinstance(value, _Object):
        for name in value.repeated:
            yield FieldError(field_path((*path, name)), None, "is given more than once", "keep one of them")
        for name, item in value.items():
            if not _is_storable(name):
                yield _unstorable(path, name)
            yield from _strictness_errors((*path, name), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strictness_errors((*path, index), item)
    elif isinstance(value, float) and not math.isfinite(value):
        rule = "must be a finite number: JSON has no NaN or Infinity, and larger numbers overflow"
        yield FieldError(field_path(path), value, rule, "send a finite number")
    elif isinstance(value, str) and not _is_storable(value):
        yield _unstorable(path, value)


def _unstorable(path: Path, value: str) -> FieldError:
    return FieldError(field_path(path), value, "must not hold U+0000 or a lone surrogate", "remove that character")


def _is_storable(text: str) -> bool:
    return (text.isascii() and "\0" not in text) or not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text)
