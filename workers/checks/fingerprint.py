"""What a rank runs on: versions, device, boot, image, collective settings. Only reads; runs no collective."""

from __future__ import annotations

import os
import platform
import re
import socket
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from workers.checks.digest import workers_digest
from workers.contract import ComputeSettings, Device, Fingerprint

_SETTING_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|_KEY$", re.IGNORECASE)
_URL_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def read_fingerprint(world_rank: int, device: Device, node: str | None) -> Fingerprint:
    """The fingerprint of this process. `node` is the operator's name for the machine; the host name where None."""
    cuda = device is Device.CUDA
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return Fingerprint(
        world_rank=world_rank,
        node=node or node_name(),
        pid=os.getpid(),
        boot_id=_read_line("/proc/sys/kernel/random/boot_id") or "unknown",
        device=torch.cuda.get_device_name() if cuda else (_cpu_name() or platform.machine()),
        device_uuid=f"GPU-{torch.cuda.get_device_properties().uuid}" if cuda else None,
        driver=_read_line("/proc/driver/nvidia/version") if cuda else None,
        backend="nccl" if nccl else "gloo",
        backend_version=".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        image=os.environ.get("GRADGATE_IMAGE"),
        python=platform.python_version(),
        torch=str(torch.__version__),  # a plain string: its own type would pull torch into whoever unpickles it
        workers_digest=workers_digest(),
        num_threads=torch.get_num_threads(),
        collective_settings=collective_settings(),
    )


def read_settings() -> ComputeSettings:
    """This process's settings as they stand now."""
    matmul = torch.backends.cuda.matmul
    return ComputeSettings(
        num_threads=torch.get_num_threads(),
        allow_tf32=matmul.allow_tf32,
        allow_bf16_reduction=bool(matmul.allow_bf16_reduced_precision_reduction),
    )


def node_name() -> str:
    """The operator's label for this machine (`GRADGATE_NODE_NAME`), else its host name."""
    return os.environ.get("GRADGATE_NODE_NAME") or socket.gethostname()


def collective_settings() -> dict[str, str]:
    """Environment variables that steer the collective library; values that look like secrets are masked."""
    return {
        name: "***" if _SECRET.search(name) else _URL_ACCOUNT.sub("***", value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTING_PREFIXES)
    }


def _read_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


@cache
def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
