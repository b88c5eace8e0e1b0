"""Who asks, and what they may do: API keys as `Authorization: Bearer`, or an open server on loopback.

Fails closed. A server is open only while no key was ever made and it listens on loopback; then it serves this machine
alone, and refuses what a proxy hands on, and what a browser sends on behalf of another site.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.dependencies import Services, ServicesDep, not_found
from service.api.problems import FORBIDDEN, RATE_LIMITED, UNAUTHENTICATED, Problem
from service.domain.keys import ApiKey, Scope, hash_secret
from service.domain.validation import Validation
from service.storage import keys, validations
from service.storage.session import Connection

_bearer = HTTPBearer(
    auto_error=False, description="A key of `gradgate keys create`. Not needed on loopback while no key was ever made."
)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="gradgate"'}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Without keys it is everybody on this machine."""

    key: ApiKey | None

    @property
    def id(self) -> str:
        """The key's id; empty on an open server."""
        return "" if self.key is None else self.key.id

    @property
    def clusters(self) -> frozenset[str] | None:
        """The only clusters within reach; None: all."""
        return None if self.key is None else self.key.clusters

    def require(self, scope: Scope) -> None:
        """Raise Problem 403 where the key lacks a scope."""
        if self.key is not None and not self.key.scopes & {scope, Scope.ADMIN}:
            held = ", ".join(sorted(self.key.scopes))
            detail = f"this needs the scope {scope}, and the key {self.key.name!r} has {held}; use a key that has it"
            raise Problem(FORBIDDEN, detail)

    def reaches(self, cluster: str) -> bool:
        """Whether a cluster is within reach."""
        return self.clusters is None or cluster in self.clusters

    def require_cluster(self, cluster: str) -> None:
        """Raise Problem 403 where a cluster is not within reach."""
        if self.key is not None and not self.reaches(cluster):
            reached = ", ".join(sorted(self.clusters or ()))
            detail = f"the key {self.key.name!r} reaches {reached} only, not cluster {cluster}"
            raise Problem(FORBIDDEN, detail)


async def identify(
    request: Request,
    services: ServicesDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Principal:
    """Who asks. Raises Problem 401 without a good key where one is needed, 429 for one that asks too often."""
    if credentials is None:
        return await _without_key(request, services)
    key = await _find(services, credentials.credentials)
    request.state.key = key.name  # for the log
    if (wait_s := services.rates.take(key.id)) > 0:
        detail = f"the key {key.name!r} asks more often than {services.settings.max_requests_per_minute} times a minute"
        raise Problem(RATE_LIMITED, f"{detail}; slow down", headers={"Retry-After": f"{math.ceil(wait_s)}"})
    return Principal(key)


async def _find(services: Services, secret: str) -> ApiKey:
    secret_hash = hash_secret(secret)
    if secret_hash is None:
        raise _unauthenticated("the Authorization header holds no key of this service; keys begin with ggk_")
    async with services.database.read() as connection:
        key = await keys.find(connection, secret_hash)
    if key is None:
        raise _unauthenticated("no key has this secret; `gradgate keys create` makes one")
    if refusal := key.why_refused(datetime.now(UTC)):
        raise _unauthenticated(f"{refusal}; `gradgate keys create` makes another")
    if key.last_used_at is None or datetime.now(UTC) - key.last_used_at > keys.LAST_USE_RESOLUTION:
        async with services.database.transaction() as connection:
            await keys.touch(connection, key.id)
    return key


async def _without_key(request: Request, services: Services) -> Principal:
    if not is_loopback(services.settings.host):
        raise _unauthenticated("send `Authorization: Bearer KEY`; `gradgate keys create` makes one")
    async with services.database.read() as connection:
        if await keys.any_exist(connection):
            raise _unauthenticated("send `Authorization: Bearer KEY`: this server has keys, so nothing opens without")
    _refuse_other_sites(request)
    return Principal(None)


def _refuse_other_sites(request: Request) -> None:
    """A page from elsewhere, open in a browser on this machine, must neither read nor start anything here.

    The Host header betrays a site whose name was pointed at loopback (its pages are of one origin with this server
    then), and a proxy that lets others in.
    """
    host = request.headers.get("host", "")
    if not is_loopback(_hostname(host)):
        remedy = "ask for localhost, or make a key: `gradgate keys create`"
        raise Problem(FORBIDDEN, f"without keys this server is for its own machine, not for {host[:100]!r}; {remedy}")
    origin = request.headers.get("origin")
    if request.method in _SAFE_METHODS or origin is None:
        return
    if origin.partition("://")[2] != host:
        raise Problem(FORBIDDEN, f"a page of {origin[:100]} may not change anything on this server")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _unauthenticated(detail: str) -> Problem:
    return Problem(UNAUTHENTICATED, detail, headers=_CHALLENGE)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


PrincipalDep = Annotated[Principal, Depends(identify)]


def _allowed(scope: Scope) -> Callable[[Principal], Awaitable[Principal]]:
    async def allowed(principal: PrincipalDep) -> Principal:
        principal.require(scope)
        return principal

    return allowed


Reader = Annotated[Principal, Depends(_allowed(Scope.READ))]
"""Whoever may read."""
Starter = Annotated[Principal, Depends(_allowed(Scope.VALIDATE))]
"""Whoever may start and cancel validations."""


async def require_visible(connection: Connection, principal: Principal, validation_id: str) -> None:
    """Raise Problem 404 unless there is such a validation within reach: what is out of reach is not there."""
    cluster = await validations.cluster_of(connection, validation_id)
    if cluster is None or not principal.reaches(cluster):
        raise not_found(validation_id)


async def load_visible(connection: Connection, principal: Principal, validation_id: str) -> Validation:
    """A validation, as far as the asker may see it. Raises Problem 404: what is out of reach is not there."""
    validation = await validations.get(connection, validation_id)
    if validation is None or not principal.reaches(validation.cluster):
        raise not_found(validation_id)
    return validation
