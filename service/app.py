"""The ASGI application: routes, error answers, OpenAPI, and a lifespan that opens and closes what the process holds.

Holds no state of its own beyond connections: any number of these processes serve one database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from service.api import events, examples, health, metrics, openapi, orderings, predict, problems, rows, validations
from service.api.dependencies import Services
from service.api.rates import Rates
from service.api.requests import RequestLog
from service.api.schemas import ValidateRequest
from service.settings import Settings
from service.storage.events import EventHub
from service.storage.session import Database
from workers.plan import Limits

DESCRIPTION = """May a large training run start on this cluster? Gradgate answers with an experiment.

`POST /validate` queues short dp x pp training steps under several orderings of gradient synchronisation; each
rank's gradient divergence is stored and judged. Errors are RFC 9457 problem documents with a stable `code`.
Non-finite floats are the strings "NaN", "Infinity" and "-Infinity"."""

_REF = "#/components/schemas/{model}"


def create_app(settings: Settings) -> FastAPI:
    """The application for these settings; connects to nothing before its lifespan begins."""
    app = FastAPI(
        title="Gradgate",
        version=_version(),
        description=DESCRIPTION,
        lifespan=_lifespan(settings),
        redirect_slashes=False,
        # Their pages load scripts from elsewhere; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    for module in (validations, rows, events, orderings, predict, health, metrics):
        app.include_router(module.router)
    app.state.metrics = metrics.HttpMetrics()
    app.add_middleware(RequestLog, metrics=app.state.metrics)
    app.add_exception_handler(problems.Problem, problems.answer_problem)
    app.add_exception_handler(HTTPException, problems.answer_http_exception)
    app.add_exception_handler(RequestValidationError, problems.answer_invalid_parameters)
    for error in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(error, problems.answer_database_error)
    app.openapi = _openapi(app, _limits(settings))  # type: ignore[method-assign]
    return app


def _lifespan(settings: Settings) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = settings.database_url
        if url is None:
            raise RuntimeError("no database: set GRADGATE_DATABASE_URL, or start everything with `gradgate up`")
        app.state.stopping = asyncio.Event()
        database = Database(
            url,
            pool_size=settings.database_pool_size,
            timeout_s=settings.database_timeout_s,
            through_pooler=settings.through_pooler,
        )
        try:
            async with EventHub(settings.session_url or url) as hub:
                app.state.services = Services(
                    settings, _limits(settings), database, hub, Rates(settings.max_requests_per_minute)
                )
                yield
                app.state.stopping.set()
        finally:
            await database.close()

    return lifespan


def _limits(settings: Settings) -> Limits:
    return Limits(max_world_size=settings.max_world_size)


def _version() -> str:
    try:
        return version("gradgate")
    except PackageNotFoundError:
        return "0+unknown"


def _openapi(app: FastAPI, limits: Limits) -> Callable[[], dict[str, Any]]:
    """Builds the document once: FastAPI's, plus the request bodies that routes parse themselves, and the limits."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _request_schemas()
            schemas[openapi.SCHEMA_NAME] = openapi.SCHEMA
            # Here and not in the model: FastAPI would leave out its nulls.
            schemas["ValidationDocument"]["example"] = examples.VALIDATION
            _state_limits(schemas, limits)
            _remove_default_refusals(document)
            app.openapi_schema = document
        return app.openapi_schema

    return build


def _remove_default_refusals(document: dict[str, Any]) -> None:
    """Take out the 422 that FastAPI adds to routes with parameters: ours are problems, and stand where they occur."""
    for path in document["paths"].values():
        for operation in path.values():
            if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _request_schemas() -> dict[str, Any]:
    models = [(ValidateRequest, "validation"), (predict.PredictRequest, "validation")]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    found: dict[str, Any] = definitions["$defs"]
    return found


def _state_limits(schemas: dict[str, Any], limits: Limits) -> None:
    """Write the configured limits of POST /validate into its schemas, where clients look for them."""
    request = schemas["ValidateRequest"]
    request["description"] += (
        f" Limits: dp x pp x tp <= {limits.max_world_size} ranks, steps x repeats <= {limits.max_steps_x_repeats}, "
        f"at most {limits.max_stage_elements} parameter elements a rank, num_microbatches >= pp, num_layers >= pp."
    )
    request["properties"]["steps"]["maximum"] = limits.max_steps
    request["properties"]["repeats"]["maximum"] = limits.max_repeats
    request["properties"]["seed"] |= {"minimum": 0, "maximum": limits.max_seed}
