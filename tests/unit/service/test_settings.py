from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GRADGATE_")]:
        monkeypatch.delenv(name)


def test_without_variables_the_defaults_hold() -> None:
    settings = Settings.load()
    assert (settings.host, settings.port, settings.cluster) == ("127.0.0.1", 8470, "default")
    assert (settings.database_url, settings.ray_address) == (None, None)


@pytest.mark.parametrize(("uid", "home"), [(0, "/var/lib/gradgate"), (1000, "/home/someone/.gradgate")])
def test_root_has_another_home(monkeypatch: pytest.MonkeyPatch, uid: int, home: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings.load().home == Path(home)


def test_variables_are_read_when_asked_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in {"HOME": "~/data", "PORT": "0", "DATABASE_URL": "postgres://h/d", "LEASE_S": "2.5"}.items():
        monkeypatch.setenv(f"GRADGATE_{name}", value)
    settings = Settings.load()
    assert (settings.home, settings.port) == (Path("/home/someone/data"), 0)
    assert (settings.database_url, settings.lease_s) == ("postgres://h/d", 2.5)


def test_whole_sessions_go_past_the_pooler_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGATE_DATABASE_URL", "postgresql://pooler/d")
    assert (Settings.load().session_url, Settings.load().through_pooler) == ("postgresql://pooler/d", False)
    monkeypatch.setenv("GRADGATE_LISTEN_URL", "postgresql://server/d")
    assert (Settings.load().session_url, Settings.load().through_pooler) == ("postgresql://server/d", True)


def test_a_relative_home_does_not_follow_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADGATE_HOME", "here")
    assert Settings.load().home == tmp_path / "here"


@pytest.mark.parametrize("name", ["DATABASE_URL", "RAY_ADDRESS", "PORT"])
def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"GRADGATE_{name}", "")
    assert Settings.load() == Settings()
    assert Settings.load().database_url is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "65536"),
        ("PORT", "http"),
        ("LEASE_S", "inf"),
        ("LEASE_S", "nan"),
        ("MAX_WORLD_SIZE", "0"),
        ("POLL_S", "0"),
        ("CLUSTER", "x" * 64),
        ("DATABASE_URL", "sqlite:///x"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"GRADGATE_{name}", value)
    with pytest.raises(ValidationError) as caught:
        Settings.load()
    assert [error["loc"] for error in caught.value.errors()] == [(name.lower(),)]


def test_a_password_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGATE_DATABASE_URL", "postgresql://u:secret@h/d")
    assert "secret" not in repr(Settings.load())
    monkeypatch.setenv("GRADGATE_DATABASE_URL", "mysql://u:secret@h/d")
    with pytest.raises(ValidationError) as caught:
        Settings.load()
    assert "secret" not in str(caught.value)
    assert "'mysql' is not a Postgres URL" in str(caught.value)
