"""`gradgate keys` and `gradgate serve` against a real database, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
import pytest

from service.home import choose_free_port


def gradgate(arguments: Sequence[str], url: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli", *arguments]
    full = os.environ | {"GRADGATE_DATABASE_URL": url} | env
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60, check=False)


def test_from_no_key_to_a_protected_server_and_back(postgres_url: str) -> None:
    port = choose_free_port("127.0.0.1")
    place = {"GRADGATE_HOST": "0.0.0.0", "GRADGATE_PORT": str(port)}
    refused = gradgate(["serve"], postgres_url, **place)
    assert refused.returncode == 3
    assert "gradgate keys create" in refused.stderr

    made = gradgate(["keys", "create", "--name", "ops", "--scope", "admin", "--expires-days", "1"], postgres_url)
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert secret.startswith("ggk_")
    assert secret not in made.stderr
    again = gradgate(["keys", "create", "--name", "ops", "--scope", "read"], postgres_url)
    assert (again.returncode, "choose another" in again.stderr) == (3, True)

    listed = gradgate(["keys", "list"], postgres_url)
    assert "ops  admin  all clusters  never used  expires" in listed.stdout
    assert secret not in listed.stdout

    command = [sys.executable, "-m", "service.cli", "serve"]
    env = os.environ | {"GRADGATE_DATABASE_URL": postgres_url} | place
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(base)
        assert httpx.get(f"{base}/validations").status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"{base}/validations", headers=headers).status_code == 200
        assert gradgate(["keys", "revoke", "ops"], postgres_url).returncode == 0
        assert httpx.get(f"{base}/validations", headers=headers).status_code == 401
        server.send_signal(signal.SIGTERM)
        log = server.communicate(timeout=30)[1]
    assert server.returncode == 0, log
    assert secret not in log


def wait_until_ready(base: str) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            if httpx.get(f"{base}/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("the server did not get ready")


def test_mistakes_are_told_with_their_remedy(postgres_url: str) -> None:
    unnamed = gradgate(["keys", "create", "--name", "a\nb", "--scope", "read"], postgres_url)
    assert (unnamed.returncode, "choose for example" in unnamed.stderr) == (3, True)
    unknown = gradgate(["keys", "revoke", "nobody"], postgres_url)
    assert (unknown.returncode, "gradgate keys list" in unknown.stderr) == (3, True)
