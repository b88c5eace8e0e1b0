"""API keys in the database. Secrets never get here: only their hashes do (`service.domain.keys`)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Row, exists, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from service.domain.errors import KeyNameTaken
from service.domain.keys import ApiKey, Scope, new_key_id
from service.storage.session import Connection
from service.storage.tables import api_keys

LAST_USE_RESOLUTION = timedelta(minutes=1)
"""A key's last use is written at most this often: reading must not cost a write."""


async def create(
    connection: Connection,
    *,
    name: str,
    secret_hash: bytes,
    scopes: Iterable[Scope],
    clusters: Iterable[str] | None = None,
    expires_at: datetime | None = None,
) -> ApiKey:
    """Store a new key. Raises KeyNameTaken; names of revoked keys stay taken, so that a log's name means one key."""
    statement = (
        api_keys.insert()
        .values(
            id=new_key_id(),
            name=name,
            secret_hash=secret_hash,
            scopes=sorted(set(scopes)),
            clusters=None if clusters is None else sorted(set(clusters)),
            expires_at=expires_at,
        )
        .returning(api_keys)
    )
    try:
        return _to_key((await connection.execute(statement)).one())
    except IntegrityError as error:
        if "uq_api_keys_name" not in str(error.orig):
            raise
        raise KeyNameTaken(f"{name!r} is the name of a key already, perhaps a revoked one; choose another") from error


async def any_exist(connection: Connection) -> bool:
    """Whether a key was ever made, good or not: from then on nothing opens without one."""
    return bool(await connection.scalar(select(exists().select_from(api_keys))))


async def find(connection: Connection, secret_hash: bytes) -> ApiKey | None:
    """The key with this secret, good or not.

    How long the look-up takes says something of a hash at most, and nobody can choose a secret by its hash: so there is
    nothing here to compare in constant time.
    """
    row = (await connection.execute(select(api_keys).where(api_keys.c.secret_hash == secret_hash))).one_or_none()
    return _to_key(row) if row else None


async def touch(connection: Connection, key_id: str) -> None:
    """Note that a key was used."""
    stale = or_(
        api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < func.clock_timestamp() - LAST_USE_RESOLUTION
    )
    await connection.execute(
        update(api_keys).where(api_keys.c.id == key_id, stale).values(last_used_at=func.clock_timestamp())
    )


async def list_all(connection: Connection) -> list[ApiKey]:
    """Every key, oldest first."""
    return [_to_key(row) for row in (await connection.execute(select(api_keys).order_by(api_keys.c.id))).all()]


async def revoke(connection: Connection, name_or_id: str) -> ApiKey | None:
    """End a key for good; None where there is none of this name or id. Revoking again changes nothing."""
    named = or_(api_keys.c.name == name_or_id, api_keys.c.id == name_or_id)
    statement = (
        update(api_keys)
        .where(named)
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.clock_timestamp()))
        .returning(api_keys)
    )
    row = (await connection.execute(statement)).one_or_none()
    return _to_key(row) if row else None


def _to_key(row: Row[tuple[object, ...]]) -> ApiKey:
    return ApiKey(
        id=row.id,
        name=row.name,
        scopes=frozenset(map(Scope, row.scopes)),
        clusters=None if row.clusters is None else frozenset(row.clusters),
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
