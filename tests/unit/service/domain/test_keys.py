from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from service.domain.keys import ApiKey, Scope, hash_secret, new_key_id, new_secret

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def make_key(**overrides: object) -> ApiKey:
    values: dict[str, object] = {
        "id": new_key_id(),
        "name": "ci",
        "scopes": frozenset({Scope.READ}),
        "clusters": None,
        "created_at": NOW,
        "expires_at": None,
        "last_used_at": None,
        "revoked_at": None,
    }
    return ApiKey(**(values | overrides))  # type: ignore[arg-type]


def test_secrets_are_256_bits_that_differ_and_hash_to_32_bytes() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(len(secret) == len("ggk_") + 43 for secret in secrets)
    assert len({hash_secret(secret) for secret in secrets}) == 100
    assert {len(hash_secret(secret) or b"") for secret in secrets} == {32}


@pytest.mark.parametrize(
    "text", ["", "ggk_", "ggk_" + "a" * 42, "ggk_" + "a" * 44, "ghk_" + "a" * 43, "ggk_" + "é" * 43]
)
def test_what_cannot_be_a_secret_has_no_hash(text: str) -> None:
    assert hash_secret(text) is None


def test_a_key_is_good_until_it_expires_or_is_revoked() -> None:
    assert make_key().why_refused(NOW) is None
    lasting = make_key(expires_at=NOW + timedelta(seconds=1))
    assert lasting.why_refused(NOW) is None
    assert "expired at 2026-01-02 03:04Z" in (lasting.why_refused(NOW + timedelta(seconds=1)) or "")
    assert "revoked at 2026-01-02 03:04Z" in (make_key(revoked_at=NOW).why_refused(NOW) or "")
