"""What started this process told it: its rank, the number of ranks, and where they meet.

Reads the variables of torchrun, of Slurm's srun, or set by hand (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Starts no
process and knows nothing of trials.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.contract import Device, Mesh
from workers.errors import WorkerError

_NUM_SLURM_PORTS = 20_000
_FIRST_SLURM_PORT = 20_000


class LaunchError(WorkerError):
    """This process was not started as one rank of the mesh, or cannot have the device it was promised."""

    code = "launch"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among all, and among those of its host."""

    world_rank: int
    world_size: int
    local_rank: int
    num_local: int
    master_host: str
    master_port: int


def read_place(environment: Mapping[str, str], mesh: Mesh) -> Place:
    """This process's place in `mesh`. Raises LaunchError where the launcher said nothing, or started other ranks."""
    world_rank = _number(environment, "RANK", "SLURM_PROCID")
    world_size = _number(environment, "WORLD_SIZE", "SLURM_NTASKS")
    if world_rank is None or world_size is None:
        raise LaunchError(
            "neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set: start the ranks with "
            f"`torchrun --nproc_per_node {mesh.world_size} -m workers ...` or `srun -n {mesh.world_size} ...`"
        )
    if world_size != mesh.world_size:
        raise LaunchError(
            f"{world_size} ranks were started for a mesh of dp {mesh.dp} x pp {mesh.pp} = {mesh.world_size}: start "
            f"{mesh.world_size}, or change --dp and --pp"
        )
    host, port = _meeting_point(environment)
    local_rank = _number(environment, "LOCAL_RANK", "SLURM_LOCALID") or 0
    num_local = _number(environment, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE") or local_rank + 1
    return Place(world_rank, world_size, local_rank, num_local, host, port)


def speaks(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one of its world that prints; true where it cannot know."""
    return (environment.get("RANK") or environment.get("SLURM_PROCID") or "0") == "0"


def open_store(environment: Mapping[str, str], place: Place, timeout_s: float) -> dist.Store:
    """The store at which the ranks meet: torchrun's own, else one that world_rank 0 hosts. LaunchError without it."""
    theirs = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            place.master_host,
            place.master_port,
            is_master=place.world_rank == 0 and not theirs,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        raise LaunchError(
            f"world_rank {place.world_rank} could not meet the others at {place.master_host}:{place.master_port} "
            f"within {timeout_s} s: {error}; check that world_rank 0 runs there and that the port is open"
        ) from error
    # A restarted attempt must not read what an earlier one left behind.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"gradgate/{attempt}", store)


def take_device(device: Device, place: Place, backend: str | None) -> Device:
    """Resolve `auto` and take this rank's GPU. With gloo several ranks may share one; NCCL needs one for each."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is Device.AUTO:
        device = Device.CUDA if num_gpus >= place.num_local else Device.CPU
    if device is Device.CPU:
        torch.set_num_threads(1)
        return device
    if num_gpus == 0:
        raise LaunchError("device cuda: torch sees no GPU here; use --device cpu, or the CUDA build of torch")
    if place.local_rank >= num_gpus and backend != "gloo":
        raise LaunchError(
            f"device cuda: local rank {place.local_rank} on a host with {num_gpus} GPUs, and NCCL needs one for each "
            "rank; start fewer ranks a host, or let them share with --backend gloo"
        )
    torch.cuda.set_device(place.local_rank % num_gpus)
    return device


def _meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    job = _number(environment, "SLURM_JOB_ID")
    if job is not None:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
        host = host or first_node(nodes)
        port = port or _FIRST_SLURM_PORT + job % _NUM_SLURM_PORTS
    if not host or not port:
        raise LaunchError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}: set both to a host and a free port of world_rank 0"
        )
    return host, port


def first_node(node_list: str) -> str | None:
    """The first host of a Slurm node list such as "gpu[003-007,9],login1"; None of an empty one."""
    match = re.match(r"([^,\[\]]+)(?:\[([^\],-]+))?", node_list)
    return match[1] + (match[2] or "") if match else None


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environment.get(name)
        if text:
            if not text.isdecimal():
                raise LaunchError(f"{name} is {text!r}; it must be a whole number, as launchers set it")
            return int(text)
    return None
