"""`gradgate serve`: the application under uvicorn, with a shutdown that ends streams instead of waiting for them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from service.api.access import is_loopback
from service.app import create_app
from service.domain.errors import UnprotectedAddress
from service.storage import keys
from service.storage.session import Database
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
    """Serve until SIGINT or SIGTERM. Exits with a message where the address is taken or the database cannot open.

    Raises UnprotectedAddress where anybody could reach a server that has no keys.
    """
    configure_logging()
    configure_tracing("gradgate-serve")
    asyncio.run(_refuse_unprotected(settings))
    server = Server(create_app(settings), settings)
    # uvicorn stops on SIGTERM and then raises it once more for whoever was there before: the end asked for is no
    # error. Before uvicorn listens for it, this is what stops the server.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    _log.info("serving", extra={"host": settings.host, "port": settings.port})
    server.run()


async def _refuse_unprotected(settings: Settings) -> None:
    """A database that cannot be asked yet is not an answer: then every request is refused that brings no key."""
    if is_loopback(settings.host) or settings.database_url is None:
        return
    database = Database(settings.database_url, pool_size=1, timeout_s=settings.database_timeout_s)
    try:
        async with database.read() as connection:
            protected = await keys.any_exist(connection)
    except SQLAlchemyError as error:
        _log.warning("could not ask for keys; nothing opens without one", extra={"reason": str(error)})
        return
    finally:
        await database.close()
    if not protected:
        raise UnprotectedAddress(
            f"GRADGATE_HOST={settings.host}: beyond loopback every caller needs a key, and there is none; make one "
            "first: `gradgate keys create --name NAME --scope admin` (a database that `gradgate up` brings: while that "
            "runs on 127.0.0.1)"
        )
