"""Structured logs for every service process: one JSON object a line, with the id of the request or attempt behind it.

Must not know the API, the database or Ray: `serve`, `dispatch` and the CLI all import it. Values go in as
`extra={...}`, never into the message, so that a message is a stable string to search for.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request being served in this context; None outside one."""

attempt: ContextVar[tuple[str, int] | None] = ContextVar("attempt", default=None)
"""The validation's id and the attempt that this task works on; None where it works on none."""

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def choose_request_id(offered: str | None) -> str:
    """The caller's id where it is short and plain (it ends up in logs and headers), else a new one."""
    if offered is not None and _ACCEPTABLE_ID.fullmatch(offered):
        return offered
    return uuid.uuid4().hex


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON.

    at, level, logger, message; request_id, validation_id and attempt where there is one; extras; error.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; a value JSON does not know becomes its text."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        if (work := attempt.get()) is not None:
            line["validation_id"], line["attempt"] = work
        extras = ((key, value) for key, value in vars(record).items() if key not in _OWN_FIELDS)
        line.update((key, value) for key, value in extras if not key.startswith("_"))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all of this process's logs to `stream` (stderr by default) as JSON lines; safe to call again."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # One line a request comes from the API itself; these two would each add another.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpcore").setLevel(logging.WARNING)
