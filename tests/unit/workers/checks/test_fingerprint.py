"""What a rank says of itself: real values of this host, and no secret among them."""

from __future__ import annotations

import os
import pickle
import socket

import pytest
import torch

from workers.checks.digest import workers_digest
from workers.checks.fingerprint import collective_settings, node_name, read_fingerprint
from workers.contract import Device


@pytest.mark.parametrize("name", ["NCCL_PLUGIN_TOKEN", "UCX_SECRET", "FI_PASSWORD", "GLOO_API_KEY", "NCCL_AUTH_INFO"])
def test_what_looks_like_a_secret_is_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter2")
    assert collective_settings()[name] == "***"


def test_a_password_inside_a_url_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CONFIG_URL", "https://me:hunter2@example.test/nccl.conf")
    assert collective_settings()["NCCL_CONFIG_URL"] == "https://***@example.test/nccl.conf"


def test_only_settings_of_collectives_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("GRADGATE_DATABASE_URL", "postgresql://me:hunter2@db/gradgate")
    settings = collective_settings()
    assert settings["NCCL_ALGO"] == "Ring"
    assert "GRADGATE_DATABASE_URL" not in settings
    assert "hunter2" not in str(settings)


def test_the_operator_s_name_for_a_node_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADGATE_NODE_NAME", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("GRADGATE_NODE_NAME", "rack7-a")
    assert node_name() == "rack7-a"
    assert read_fingerprint(0, Device.CPU, None).node == "rack7-a"
    assert read_fingerprint(0, Device.CPU, "chosen").node == "chosen"


def test_a_cpu_rank_has_no_gpu_fields() -> None:
    fingerprint = read_fingerprint(3, Device.CPU, None)
    assert (fingerprint.world_rank, fingerprint.pid, fingerprint.backend) == (3, os.getpid(), "gloo")
    assert (fingerprint.device_uuid, fingerprint.driver, fingerprint.backend_version) == (None, None, None)
    assert fingerprint.torch == torch.__version__
    assert fingerprint.workers_digest == workers_digest()
    assert fingerprint.boot_id
    assert fingerprint.device


def test_a_fingerprint_is_read_without_torch() -> None:
    """The dispatcher unpickles it: a value of a torch type would cost it seconds and memory."""
    fingerprint = read_fingerprint(0, Device.CPU, "node-1")
    assert b"torch." not in pickle.dumps(fingerprint).replace(b"torch.version", b"")
