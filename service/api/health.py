"""GET /healthz and /readyz: is the process alive; can it serve. Probes for people who run it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from service.api.dependencies import Services, ServicesDep
from service.api.documents import Document, json_response
from service.api.openapi import responses
from service.api.problems import DATABASE_UNAVAILABLE, NOT_READY, Problem
from service.storage import migration

_PROBE_TIMEOUT_S = 2.0

router = APIRouter(tags=["operations"])


class HealthDocument(Document):
    """What is well."""

    status: str


@router.get(
    "/healthz",
    operation_id="getHealth",
    summary="Whether the process answers",
    response_model=HealthDocument,
    responses=responses(),
)
async def get_health(request: Request) -> Response:
    """Touches nothing: an unreachable database must not get this process restarted."""
    return json_response(request, {"status": "ok"})


@router.get(
    "/readyz",
    operation_id="getReadiness",
    summary="Whether the process can serve",
    response_model=HealthDocument,
    responses=responses(NOT_READY),
)
async def get_readiness(request: Request, services: ServicesDep) -> Response:
    """The database is reachable and at the migration that this server expects."""
    if request.app.state.stopping.is_set():
        raise Problem(NOT_READY, "the server is shutting down; use another one")
    try:
        current = await asyncio.wait_for(_is_migrated(services), _PROBE_TIMEOUT_S)
    except (TimeoutError, SQLAlchemyError, OSError) as error:
        raise Problem(DATABASE_UNAVAILABLE, f"the database does not answer: {type(error).__name__}") from error
    if not current:
        raise Problem(NOT_READY, "the database is at another migration than this server; run `gradgate migrate`")
    return json_response(request, {"status": "ready"})


async def _is_migrated(services: Services) -> bool:
    async with services.database.read() as connection:
        return await migration.is_current(connection)
