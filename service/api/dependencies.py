"""What routes receive: the process's database, event hub and settings, and the headers that several of them read.

Nothing here opens a transaction: routes do, for as long as one statement group needs and never while they wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request

from service.api.problems import NOT_ACCEPTABLE, VALIDATION_NOT_FOUND, FieldError, Problem, invalid
from service.api.rates import Rates
from service.settings import Settings
from service.storage.events import EventHub
from service.storage.session import Database
from workers.plan import Limits

_ID = re.compile(r"val_[0-9a-hjkmnp-tv-z]{26}")
_MAX_KEY_CHARACTERS = 255
_WAIT = re.compile(r"""wait\s*=\s*"?([0-9]{1,9})"?""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Services:
    """What one API process holds; made by the app's lifespan."""

    settings: Settings
    limits: Limits
    database: Database
    hub: EventHub
    rates: Rates


def services(request: Request) -> Services:
    """The process's services."""
    held: Services = request.app.state.services
    return held


def known_id(
    validation_id: Annotated[str, Path(description="As POST /validate returned it.", examples=["val_" + "0" * 26])],
) -> str:
    """A validation's id; text of another shape is 404 without asking the database."""
    if not _ID.fullmatch(validation_id):
        raise not_found(validation_id)
    return validation_id


def not_found(validation_id: str) -> Problem:
    """The 404 for a validation."""
    detail = f"no validation has the id {validation_id[:80]}; GET /validations lists those there are"
    return Problem(VALIDATION_NOT_FOUND, detail)


def preferred_wait_s(request: Request) -> float | None:
    """N of `Prefer: wait=N` (RFC 7240); None where absent or not a whole number: a preference never fails."""
    for header in request.headers.getlist("prefer"):
        for preference in header.split(","):
            if match := _WAIT.fullmatch(preference.split(";")[0].strip()):
                return float(match[1])
    return None


def idempotency_key(request: Request) -> str | None:
    """The Idempotency-Key, with or without the quotes of a structured-field string. Raises Problem 422."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    key = given.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 0 < len(key) <= _MAX_KEY_CHARACTERS or not all(" " <= character <= "~" for character in key):
        rule = f"must have 1 to {_MAX_KEY_CHARACTERS} printable ASCII characters"
        raise invalid([FieldError("header.Idempotency-Key", given, rule, "send for example a UUID")])
    return key


def accepted(request: Request, offers: tuple[str, ...]) -> str:
    """Which of `offers` the Accept header wants most (the first of equals). Raises Problem 406."""
    header = ",".join(request.headers.getlist("accept")).strip() or "*/*"
    ranges = [_media_range(item) for item in header.split(",") if item.strip()]
    qualities = [(_quality(offer, ranges), -index, offer) for index, offer in enumerate(offers)]
    quality, _, best = max(qualities)
    if quality <= 0.0:
        raise Problem(NOT_ACCEPTABLE, f"Accept is {header[:200]}; this resource is available as {' or '.join(offers)}")
    return best


def _media_range(text: str) -> tuple[str, float]:
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                return name, 1.0
    return name, 1.0


def _quality(offer: str, ranges: list[tuple[str, float]]) -> float:
    """The quality of the most specific range that covers the offer; 0 where none does."""
    for covering in (offer, offer.split("/")[0] + "/*", "*/*"):
        for name, quality in ranges:
            if name == covering:
                return quality
    return 0.0


ServicesDep = Annotated[Services, Depends(services)]
ValidationId = Annotated[str, Depends(known_id)]
