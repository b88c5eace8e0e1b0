"""POST /validate and everything under /validations: store, read, list, cancel, page through the rows.

A request that waits holds a subscription and no database session, and reads again after subscribing, so that news
between its write and its subscription cannot be lost.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from service.api import examples
from service.api.access import Principal, Reader, Starter, load_visible, require_visible
from service.api.bodies import read_model
from service.api.dependencies import (
    Services,
    ServicesDep,
    ValidationId,
    accepted,
    idempotency_key,
    not_found,
    preferred_wait_s,
)
from service.api.documents import (
    JSON,
    DetailedValidation,
    ValidationDocument,
    ValidationPage,
    attempt_documents,
    json_response,
    validation_document,
)
from service.api.feasibility import shortfall
from service.api.openapi import body_schema, protected
from service.api.problems import (
    BODY_TOO_LARGE,
    INFEASIBLE,
    INVALID_REQUEST,
    KEY_REUSED,
    MALFORMED_JSON,
    TOO_MANY_ACTIVE,
    UNSUPPORTED_MEDIA_TYPE,
    VALIDATION_NOT_FOUND,
    FieldError,
    Problem,
    field_path,
    invalid,
)
from service.api.queries import LABEL_PATTERN, ListQuery, bad_cursor
from service.api.schemas import ValidateRequest
from service.api.waiting import Wakeup, interruptible
from service.domain.errors import CursorError, IdempotencyConflict
from service.domain.keys import Scope
from service.domain.validation import TERMINAL, Validation, new_validation_id
from service.execution.messages import Placement
from service.execution.order import to_placement
from service.storage import capacity, ledger, removals, validations
from service.storage.session import Connection
from service.tracing import current_traceparent
from workers.contract import Device
from workers.encoding import plain
from workers.plan import Limits, violations
from workers.stacks.registry import SETTING as STACKS_SETTING

_REREAD_S = 5.0
"""A wait reads again this often even without news: a notification is a hint, the row is the truth."""
_REREAD_UNHEARD_S = 0.5
"""The same while the connection that listens is down."""

router = APIRouter(tags=["validations"])


@dataclass(frozen=True, slots=True)
class Order:
    """A request that passed every rule, ready to be stored."""

    request: dict[str, Any]
    labels: dict[str, str]
    cluster: str
    num_ranks: int
    placement: Placement
    device: Device
    stack: str
    deadline_s: int
    key: str | None

    @property
    def request_hash(self) -> str:
        """Equal for requests that ask for the same, however they were written."""
        return hashlib.sha256(json.dumps(plain(self.request), sort_keys=True).encode()).hexdigest()


def plan_order(asked: ValidateRequest, limits: Limits, key: str | None) -> Order:
    """Fill in the defaults and apply every limit. Raises Problem 422 naming each field at fault."""
    spec = asked.spec()
    broken = [FieldError(field_path(v.field), v.value, v.rule, v.remedy) for v in violations(spec, limits)]
    if broken:
        raise invalid(broken)
    return Order(
        request=asked.stored(spec),
        labels=dict(asked.labels),
        cluster=asked.cluster,
        num_ranks=spec.mesh.world_size,
        placement=to_placement(asked.placement.model_dump()),
        device=asked.device,
        stack=spec.stack,
        deadline_s=asked.deadline_s,
        key=key,
    )


_HEADER_PARAMETERS = [
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "`wait=N`: answer at the validation's end, or after N seconds (capped, see Preference-Applied).",
        "schema": {"type": "string", "examples": ["wait=30"]},
    },
    {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "Repeating a request with its key returns the validation first stored under it.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "examples": ['"nightly-2026-01-01"']},
    },
]
_RESPONSE_HEADERS = {
    "Location": {"description": "The validation's path.", "schema": {"type": "string"}},
    "Preference-Applied": {"description": "The wait that was applied, after the cap.", "schema": {"type": "string"}},
    "Idempotency-Replayed": {"description": "`true`: nothing new was stored.", "schema": {"type": "string"}},
}


@router.post(
    "/validate",
    operation_id="createValidation",
    summary="Queue a validation",
    status_code=202,
    response_model=ValidationDocument,
    responses={
        200: {"description": "It ended within the wait.", "model": ValidationDocument, "headers": _RESPONSE_HEADERS},
        202: {"description": "Stored; it has not ended yet.", "headers": _RESPONSE_HEADERS},
        **protected(
            INVALID_REQUEST,
            MALFORMED_JSON,
            KEY_REUSED,
            INFEASIBLE,
            BODY_TOO_LARGE,
            UNSUPPORTED_MEDIA_TYPE,
            TOO_MANY_ACTIVE,
        ),
    },
    openapi_extra={
        "requestBody": body_schema(ValidateRequest, examples.VALIDATE_REQUESTS),
        "parameters": _HEADER_PARAMETERS,
    },
)
async def create_validation(request: Request, services: ServicesDep, principal: Starter) -> Response:
    """Every field has a default: `{}` and an empty body are valid. With `Prefer: wait=N` the answer is 200 if it ends.

    An Idempotency-Key used again with another request is 422, as draft-ietf-httpapi-idempotency-key-header has it. Its
    409 for a request in flight has no occasion here: the second of two waits until the first is stored, or refused.
    A mesh larger than what the cluster's dispatcher last saw is 409; without a fresh sighting it is queued.
    """
    asked = await read_model(request, ValidateRequest)
    principal.require_cluster(asked.cluster)
    if asked.drill is not None:
        principal.require(Scope.DRILL)
    order = plan_order(asked, services.limits, idempotency_key(request))
    validation, created = await _store(services, principal, order)
    headers = {"Location": f"/validations/{validation.id}"}
    if not created:
        headers["Idempotency-Replayed"] = "true"
    wait_s = preferred_wait_s(request)
    if wait_s is None:
        return json_response(request, validation_document(validation), status=202, headers=headers)
    wait_s = min(wait_s, services.settings.max_wait_s)
    validation = await _wait_for_end(request, services, validation, wait_s)
    headers["Preference-Applied"] = f"wait={wait_s:g}"
    status = 200 if validation.state in TERMINAL else 202
    return json_response(request, validation_document(validation), status=status, headers=headers)


async def _store(services: Services, principal: Principal, order: Order) -> tuple[Validation, bool]:
    try:
        async with services.database.transaction() as connection:
            num_active = await validations.lock_active(connection, principal.id)
            stored, created = await validations.insert(
                connection,
                validation_id=new_validation_id(),
                cluster=order.cluster,
                request=order.request,
                labels=order.labels,
                num_ranks=order.num_ranks,
                deadline_s=order.deadline_s,
                created_by=principal.id,
                idempotency_key=order.key,
                request_hash=order.request_hash if order.key else None,
                traceparent=current_traceparent(),
            )
            # After the insert, so that repeating an accepted request never turns into a refusal; raising rolls back.
            if created:
                _refuse_too_many(services, principal, num_active)
                await _refuse_infeasible(connection, services, order)
            return stored, created
    except IdempotencyConflict as conflict:
        remedy = "use a new key for a new request"
        error = FieldError("header.Idempotency-Key", order.key, "is already used for another request", remedy)
        raise invalid([error], KEY_REUSED) from conflict


def _refuse_too_many(services: Services, principal: Principal, num_active: int) -> None:
    if num_active >= services.settings.max_active_validations:
        whose = f"of the key {principal.key.name!r} " if principal.key else ""
        detail = f"{num_active} validations {whose}have not ended, the most allowed; wait for some or cancel them"
        raise Problem(TOO_MANY_ACTIVE, detail, headers={"Retry-After": "5"})


async def _refuse_infeasible(connection: Connection, services: Services, order: Order) -> None:
    """What a fresh snapshot shows to be impossible: a stack that the cluster does not know, a mesh without room."""
    snapshot = await capacity.latest(connection, order.cluster, services.settings.snapshot_max_age_s)
    if snapshot and order.stack not in snapshot.stacks:
        rule = f"cluster {order.cluster} knows {', '.join(snapshot.stacks)}"
        remedy = f"name one of them, or have its operator install the package or set {STACKS_SETTING}"
        raise invalid([FieldError("stack", order.stack, rule, remedy)])
    if snapshot and (problem := shortfall(order.num_ranks, order.device, order.placement, snapshot)):
        raise problem


async def _wait_for_end(request: Request, services: Services, validation: Validation, wait_s: float) -> Validation:
    end_s = time.monotonic() + wait_s
    async with services.hub.subscribe_end(validation.id) as subscription, interruptible(request) as interruption:
        while validation.state not in TERMINAL:
            validation = await _load(services, validation.id)
            remaining_s = end_s - time.monotonic()
            if validation.state in TERMINAL or remaining_s <= 0:
                break
            reread_s = _REREAD_S if services.hub.connected else _REREAD_UNHEARD_S
            if await interruption.wait(subscription, min(remaining_s, reread_s)) is Wakeup.STOP:
                break
    return validation


async def _load(services: Services, validation_id: str) -> Validation:
    async with services.database.read() as connection:
        validation = await validations.get(connection, validation_id)
    if validation is None:
        raise not_found(validation_id)
    return validation


@router.get(
    "/validations",
    operation_id="listValidations",
    summary="Validations, newest first",
    response_model=ValidationPage,
    responses=protected(INVALID_REQUEST),
)
async def list_validations(
    request: Request, services: ServicesDep, principal: Reader, query: Annotated[ListQuery, Query()]
) -> Response:
    """Filtered and paged by keyset: new validations never shift a page. A key sees its own clusters' only."""
    accepted(request, (JSON,))
    if query.cluster is not None:
        principal.require_cluster(query.cluster)
    filters = query.model_dump() | {"labels": _parse_labels(query.label)}
    del filters["label"]
    try:
        async with services.database.read() as connection:
            page = await validations.list_page(connection, visible=principal.clusters, **filters)
    except CursorError as error:
        raise bad_cursor(query.cursor) from error
    items = [validation_document(item) | {"fingerprint": None} for item in page.items]
    return json_response(request, {"items": items, "next_cursor": page.next_cursor})


def _parse_labels(given: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name or "\0" in text or len(text) > 512:
            rule = f"must read name=value, with a name that matches {LABEL_PATTERN}"
            raise invalid([FieldError("query.label", text, rule, "send for example label=team=research")])
        labels[name] = value
    return labels


@router.get(
    "/validations/{validation_id}",
    operation_id="getValidation",
    summary="One validation",
    response_model=DetailedValidation,
    responses={304: {"description": "As tagged by If-None-Match."}, **protected(VALIDATION_NOT_FOUND)},
)
async def get_validation(
    request: Request, services: ServicesDep, principal: Reader, validation_id: ValidationId
) -> Response:
    """Carries a strong ETag: poll with If-None-Match."""
    accepted(request, (JSON,))
    async with services.database.read() as connection:
        validation = await load_visible(connection, principal, validation_id)
        tenures = await ledger.of_validation(connection, validation_id)
        removal = await removals.of_validation(connection, validation_id)
    document = validation_document(validation) | {
        "attempts": attempt_documents(tenures),
        "details_removed_at": plain(removal and removal.removed_at),
    }
    return json_response(request, document)


@router.post(
    "/validations/{validation_id}/cancel",
    operation_id="cancelValidation",
    summary="Ask for a validation to end",
    status_code=202,
    response_model=ValidationDocument,
    responses={
        200: {"description": "It is final already, or was still queued.", "model": ValidationDocument},
        202: {"description": "Asked; it is `cancelled` once its gang is gone."},
        **protected(VALIDATION_NOT_FOUND),
    },
)
async def cancel_validation(
    request: Request, services: ServicesDep, principal: Starter, validation_id: ValidationId
) -> Response:
    """Idempotent. What waits is cancelled at once; what runs when its gang is gone; what is final stays as it is."""
    async with services.database.transaction() as connection:
        await require_visible(connection, principal, validation_id)
        validation = await validations.request_cancel(connection, validation_id)
    if validation is None:
        raise not_found(validation_id)
    status = 200 if validation.state in TERMINAL else 202
    headers = {"Location": f"/validations/{validation_id}"}
    return json_response(request, validation_document(validation), status=status, headers=headers)
