"""API keys: what a key may do, and how its secret is made and recognised.

Pure. A secret is shown once, when it is made; only its SHA-256 is kept. That is enough for 256 random bits, which
nobody guesses: slow hashes protect what people choose.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from service.domain.ids import sortable_id

SECRET_PREFIX = "ggk_"
_SECRET = re.compile(re.escape(SECRET_PREFIX) + r"[A-Za-z0-9_-]{43}")
KEY_ID_PREFIX = "key_"
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,62}")
"""What a key may be called."""


class Scope(StrEnum):
    """What a key allows. `admin` includes the others."""

    READ = "read"
    """Every GET, and POST /predict."""
    VALIDATE = "validate"
    """Start and cancel validations."""
    DRILL = "drill"
    """Start validations with an injected fault; needs `validate` too."""
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as stored; its secret is not."""

    id: str
    name: str
    scopes: frozenset[Scope]
    clusters: frozenset[str] | None
    """The only clusters that it reaches; None: all."""
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None

    def why_refused(self, now: datetime) -> str | None:
        """Why it opens nothing any more, in words; None while it is good."""
        if self.revoked_at is not None:
            return f"the key {self.name!r} was revoked at {self.revoked_at:%Y-%m-%d %H:%M}Z"
        if self.expires_at is not None and self.expires_at <= now:
            return f"the key {self.name!r} expired at {self.expires_at:%Y-%m-%d %H:%M}Z"
        return None


def new_key_id() -> str:
    """A new key's id; sorts by the time of its making."""
    return sortable_id(KEY_ID_PREFIX)


def new_secret() -> str:
    """256 random bits in text, with a prefix that says what it is."""
    return SECRET_PREFIX + secrets.token_urlsafe(32)


def hash_secret(secret: str) -> bytes | None:
    """What is stored of a secret; None for text that cannot be one."""
    return hashlib.sha256(secret.encode()).digest() if _SECRET.fullmatch(secret) else None
