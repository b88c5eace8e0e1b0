"""GET /validations/{id}/events: a validation's history as server-sent events, past and to come.

FastAPI's own event generator is not used: it turns non-finite floats into null, and its keepalive would not know
when this process shuts down. Only its wire format is. A stream holds a subscription and no database session; it
reads again after every notification, so a lost one costs a heartbeat and never an event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from service.api.access import Reader, load_visible
from service.api.dependencies import Services, ServicesDep, ValidationId, accepted
from service.api.details import require_details
from service.api.openapi import protected
from service.api.problems import (
    DETAILS_EXPIRED,
    INVALID_REQUEST,
    NOT_ACCEPTABLE,
    VALIDATION_NOT_FOUND,
    FieldError,
    invalid,
)
from service.api.waiting import Wakeup, interruptible
from service.domain.validation import TERMINAL, Event
from service.storage import events as stored_events
from workers.encoding import plain

HEARTBEAT_S = 15.0
_UNHEARD_S = 1.0
"""While the connection that listens is down, a stream looks this often."""
_BATCH = 500
_MAX_SEQ = 2**31 - 1
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_EXAMPLE = (
    "id: 6\nevent: step\n"
    'data: {"seq":6,"type":"step","at":"2026-01-01T00:00:00Z","data":{"probe":"exact","ordering":"buggy","step":0}}\n\n'
)

router = APIRouter(tags=["validations"])


class EventStream(StreamingResponse):
    """The media type of server-sent events."""

    media_type = "text/event-stream"


@router.get(
    "/validations/{validation_id}/events",
    operation_id="streamValidationEvents",
    summary="A validation's history, live",
    response_class=EventStream,
    responses={
        200: {"description": "Events in order, each once.", "content": {"text/event-stream": {"example": _EXAMPLE}}},
        204: {"description": "Nothing follows the given Last-Event-ID: the validation has ended. Do not reconnect."},
        **protected(VALIDATION_NOT_FOUND, DETAILS_EXPIRED, NOT_ACCEPTABLE, INVALID_REQUEST),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "The id of the last event seen; the stream continues after it.",
                "schema": {"type": "integer", "minimum": 0, "maximum": _MAX_SEQ},
            }
        ]
    },
)
async def stream_events(
    request: Request, services: ServicesDep, principal: Reader, validation_id: ValidationId
) -> Response:
    """Replays what has happened and then follows, up to and including the final event; comments keep it alive."""
    accepted(request, ("text/event-stream",))
    after_seq = _last_event_id(request)
    async with services.database.read() as connection:
        found = await load_visible(connection, principal, validation_id)
        if found.state in TERMINAL and after_seq >= found.last_event_seq:
            return Response(status_code=204)
        await require_details(connection, validation_id)
    return EventStream(_follow(request, services, validation_id, after_seq), headers=_HEADERS)


def _last_event_id(request: Request) -> int:
    given = request.headers.get("last-event-id", "").strip()
    if not given:
        return 0
    if given.isascii() and given.isdigit() and int(given[:11]) <= _MAX_SEQ:
        return int(given)
    rule = f"must be an event's id, an integer from 0 to {_MAX_SEQ}"
    raise invalid([FieldError("header.Last-Event-ID", given, rule, "leave it out to get all events")])


async def _follow(request: Request, services: Services, validation_id: str, after_seq: int) -> AsyncIterator[bytes]:
    async with (
        services.hub.subscribe(validation_id) as subscription,
        # The response watches for the client's leaving, and cancels this generator.
        interruptible(request, watch_client=False) as interruption,
    ):
        while True:
            entries, ended = await _read(services, validation_id, after_seq)
            for entry in entries:
                after_seq = entry.seq
                yield _encode(entry)
            if len(entries) == _BATCH:
                continue
            if ended:
                return
            match await interruption.wait(subscription, HEARTBEAT_S if services.hub.connected else _UNHEARD_S):
                case Wakeup.STOP:
                    return
                case Wakeup.TIMEOUT:
                    yield KEEPALIVE_COMMENT


async def _read(services: Services, validation_id: str, after_seq: int) -> tuple[tuple[Event, ...], bool]:
    """Events after `after_seq`, and whether no more can follow them."""
    async with services.database.read() as connection:
        entries = await stored_events.read(connection, validation_id, after_seq, _BATCH)
    return entries, bool(entries) and entries[-1].type in TERMINAL


def _encode(event: Event) -> bytes:
    document = {"seq": event.seq, "type": event.type, "at": event.created_at, "data": event.data}
    # ASCII only: clients that split lines as Unicode does would break at U+2028.
    text = json.dumps(plain(document), allow_nan=False, separators=(",", ":"))
    return format_sse_event(data_str=text, event=event.type, id=str(event.seq))
