"""GET /validations/{id}/ranks and /trace: the per-rank rows behind a verdict, as JSON or CSV, page by page."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from service.api.access import Reader, require_visible
from service.api.dependencies import ServicesDep, ValidationId, accepted
from service.api.details import require_details
from service.api.documents import CSV, JSON, RankPage, RankRow, TracePage, TraceRow, csv_response, json_response
from service.api.openapi import protected
from service.api.problems import DETAILS_EXPIRED, INVALID_REQUEST, VALIDATION_NOT_FOUND
from service.api.queries import RowQuery, bad_cursor
from service.domain.cursor import Page
from service.domain.errors import CursorError
from service.storage import validations

Row = dict[str, Any]

_LINK = {"Link": {"description": 'The next page, as rel="next".', "schema": {"type": "string"}}}
_CSV = {
    "schema": {"type": "string"},
    "example": "trial_index,probe,ordering,repeat,step,world_rank\r\n0,exact,buggy,0,0,0\r\n",
}

router = APIRouter(tags=["validations"])


def _rows_responses() -> dict[int | str, dict[str, Any]]:
    success: dict[str, Any] = {"description": "A page of rows.", "headers": _LINK, "content": {CSV: _CSV}}
    return {200: success, **protected(VALIDATION_NOT_FOUND, DETAILS_EXPIRED, INVALID_REQUEST)}


@router.get(
    "/validations/{validation_id}/ranks",
    operation_id="listRankDivergence",
    summary="Each rank's gradient divergence",
    response_model=RankPage,
    responses=_rows_responses(),
)
async def list_ranks(
    request: Request,
    services: ServicesDep,
    principal: Reader,
    validation_id: ValidationId,
    query: Annotated[RowQuery, Query()],
) -> Response:
    """One row per trial, step, rank and end, over the elements that the rank owns."""
    media_type = accepted(request, (JSON, CSV))
    async with services.database.read() as connection:
        await require_visible(connection, principal, validation_id)
        await require_details(connection, validation_id)
        try:
            page = await validations.ranks_page(connection, validation_id, **query.model_dump())
        except CursorError as error:
            raise bad_cursor(query.cursor) from error
    return _respond(request, page, RankRow, media_type)


@router.get(
    "/validations/{validation_id}/trace",
    operation_id="listTrace",
    summary="Sums, norms and digests after each sync phase",
    response_model=TracePage,
    responses=_rows_responses(),
)
async def list_trace(
    request: Request,
    services: ServicesDep,
    principal: Reader,
    validation_id: ValidationId,
    query: Annotated[RowQuery, Query()],
) -> Response:
    """One row per trial, step, phase, rank, end and dp shard of the tied weight."""
    media_type = accepted(request, (JSON, CSV))
    async with services.database.read() as connection:
        await require_visible(connection, principal, validation_id)
        await require_details(connection, validation_id)
        try:
            page = await validations.trace_page(connection, validation_id, **query.model_dump())
        except CursorError as error:
            raise bad_cursor(query.cursor) from error
    return _respond(request, page, TraceRow, media_type)


def _respond(request: Request, page: Page[Row], row: type[BaseModel], media_type: str) -> Response:
    columns = tuple(row.model_fields)
    headers = _next_link(request, page.next_cursor)
    if media_type == CSV:
        return csv_response(request, page.items, columns, headers)
    items = [{column: item[column] for column in columns} for item in page.items]
    return json_response(request, {"items": items, "next_cursor": page.next_cursor}, headers=headers)


def _next_link(request: Request, next_cursor: str | None) -> dict[str, str]:
    if next_cursor is None:
        return {}
    parameters = dict(request.query_params) | {"cursor": next_cursor}
    return {"Link": f'<{request.url.path}?{urlencode(parameters)}>; rel="next"'}
