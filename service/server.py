"""`gradgate serve`: the application under uvicorn, with a shutdown that ends streams instead of waiting for them."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import uvicorn

from service.app import create_app
from service.telemetry import configure_logging
from service.tracing import configure_tracing

if TYPE_CHECKING:
    from fastapi import FastAPI

    from service.settings import Settings

_GRACE_S = 5
"""Requests in flight get this long once streams and waits were told to end."""
_log = logging.getLogger("service.server")


class Server(uvicorn.Server):
    """Tells waiting requests and event streams to end before it waits for connections to close."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self.app = app
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end streams, finish requests, close the lifespan."""
        self.app.state.stopping.set()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Exits with a message where the address is taken or the database cannot open."""
    configure_logging()
    configure_tracing("gradgate-serve")
    app = create_app(settings)
    _log.info("serving", extra={"host": settings.host, "port": settings.port})
    Server(app, settings).run()
