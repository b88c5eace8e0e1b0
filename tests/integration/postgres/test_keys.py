"""`gradgate keys` against a real database, and `gradgate serve` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from service import cli
from service.home import choose_free_port


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def gradgate(postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command line in this process: a process of its own costs seconds."""
    monkeypatch.setenv("GRADGATE_DATABASE_URL", postgres_url)

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = cli.run(list(arguments))
        return Ended(code, *capsys.readouterr())

    return run


def test_from_no_key_to_a_protected_server_and_back(gradgate: Callable[..., Ended], postgres_url: str) -> None:
    port = choose_free_port("127.0.0.1")
    env = os.environ | {"GRADGATE_HOST": "0.0.0.0", "GRADGATE_PORT": str(port)}
    command = [sys.executable, "-m", "service.cli", "serve"]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 3
    assert "gradgate keys create" in refused.stderr

    made = gradgate("keys", "create", "--name", "ops", "--scope", "admin", "--expires-days", "1")
    assert made.code == 0, made.stderr
    secret = made.stdout.strip()
    assert secret.startswith("ggk_")
    assert secret not in made.stderr
    again = gradgate("keys", "create", "--name", "ops", "--scope", "read")
    assert (again.code, "choose another" in again.stderr) == (3, True)
    listed = gradgate("keys", "list")
    assert "ops  admin  all clusters  never used  expires" in listed.stdout
    assert secret not in listed.stdout

    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(base)
        assert httpx.get(f"{base}/validations").status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"{base}/validations", headers=headers).status_code == 200
        assert gradgate("keys", "revoke", "ops").code == 0
        assert httpx.get(f"{base}/validations", headers=headers).status_code == 401
        server.send_signal(signal.SIGTERM)
        log = server.communicate(timeout=60)[1]
    assert server.returncode == 0, log
    assert '"key": "ops"' in log
    assert secret not in log


def wait_until_ready(base: str) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        try:
            if httpx.get(f"{base}/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("the server did not get ready")


def test_mistakes_are_told_with_their_remedy(gradgate: Callable[..., Ended]) -> None:
    unnamed = gradgate("keys", "create", "--name", "a\nb", "--scope", "read")
    assert (unnamed.code, "choose for example" in unnamed.stderr) == (3, True)
    starred = gradgate("keys", "create", "--name", "all", "--scope", "read", "--cluster", "*")
    assert (starred.code, "leave it out" in starred.stderr) == (3, True)
    unknown = gradgate("keys", "revoke", "nobody")
    assert (unknown.code, "gradgate keys list" in unknown.stderr) == (3, True)
