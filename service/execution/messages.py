"""What the supervisor and its driver child say to each other over the pipe: frozen dataclasses, nothing else.

Statistics cross here, never gradients. An (id, attempt) pair names the work, so that a late message of a lost
attempt is recognised. Must import neither ray nor the database.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.domain.cause import Attribution, Seat
from service.domain.validation import FailureDetail
from workers.contract import Device, Fingerprint, Launcher, Reason, StepReport
from workers.plan import ExperimentSpec

STOP_TIMEOUT_S = 8.0
"""How long a driver may take to end in good order."""


@dataclass(frozen=True, slots=True)
class WorkKey:
    """One attempt at one validation."""

    validation_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks may go. `exclude` holds node names as the snapshot gives them; hashable, it is part of a pool key."""

    num_nodes: int | None = None
    exclude: tuple[str, ...] = ()
    strategy: str = "PACK"
    devices_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One Ray node that is alive: what it has in total, not what is free."""

    node_id: str
    name: str
    address: str
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """What the driver child needs to know; plain values, because it goes through a spawn."""

    cluster: str
    ray_address: str | None
    """None: start a local Ray that lives and dies with the driver child."""
    local_num_cpus: int
    local_ray_dir: str | None
    node_label: str
    storage_path: str
    """Where Ray Train keeps its run folders."""
    pool_max_gangs: int
    gang_idle_s: float
    gpu_gang_idle_s: float
    stacks: str = ""
    """`GRADGATE_STACKS` as the ranks get it."""
    snapshot_interval_s: float = 5.0
    alive_interval_s: float = 1.0
    dead_man_s: float = 30.0


# Supervisor to driver.


@dataclass(frozen=True, slots=True)
class Start:
    """Run this experiment. `remaining_s` is what is left of the validation's deadline."""

    key: WorkKey
    spec: ExperimentSpec
    placement: Placement
    launcher: Launcher
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this attempt and say `Cancelled` once its gang is gone."""

    key: WorkKey


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove what other drivers of this cluster left behind, but for these attempts, which somebody still holds."""

    held: frozenset[WorkKey]


@dataclass(frozen=True, slots=True)
class Stop:
    """End: kill every gang, leave Ray, exit."""


ToDriver = Start | Cancel | Sweep | Stop


# Driver to supervisor.


@dataclass(frozen=True, slots=True)
class Ready:
    """Connected to Ray; work may come."""

    ray_version: str
    pid: int


@dataclass(frozen=True, slots=True)
class Alive:
    """The driver's event loop turns. Says nothing of Ray: `Capacity` does."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the cluster has in total now; also the sign that Ray answers."""

    nodes: tuple[NodeCapacity, ...]
    num_idle_gangs: int = 0


@dataclass(frozen=True, slots=True)
class Reserved:
    """A gang has its resources. `device` is resolved; the trials follow from it."""

    key: WorkKey
    device: Device
    nodes: tuple[str, ...]
    warm: bool
    seconds: float
    why_device: str | None = None
    """Why `auto` became this device; None where it was asked for."""


@dataclass(frozen=True, slots=True)
class Formed:
    """All ranks have joined; the trials start now."""

    key: WorkKey
    fingerprints: tuple[Fingerprint, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports since the last such message, of any ranks, in order of arrival."""

    key: WorkKey
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, slots=True)
class Repeating:
    """Every rank has said everything and trials have failed: they start again with the ranks in other seats.

    The last reports of the first run ride along. Whatever happens from here on, they make the verdict.
    """

    key: WorkKey
    reports: tuple[StepReport, ...]
    trials: tuple[str, ...]
    suspects: tuple[int, ...]
    """World ranks that the failures point to."""
    nodes: tuple[str, ...]
    """By world_rank, where each is to sit."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """What a failed run followed, or why that is not known."""

    attribution: Attribution
    seats: tuple[Seat, ...] = ()
    """By world_rank, where each sat in the repeat; empty where there was none, or none that came to its end."""
    reasons: tuple[Reason, ...] = ()
    """What the repeat found."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Every rank has said everything. Its last reports ride along, and of a failed run what it followed.

    Said before anything is torn down, so that a teardown that hangs cannot lose it.
    """

    key: WorkKey
    reports: tuple[StepReport, ...]
    repeated: Repeated | None = None


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What did not go away after an attempt's last word, in words."""

    key: WorkKey
    leak: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed with its first cause, and its gang is gone (or `leak` says what is left)."""

    key: WorkKey
    detail: FailureDetail
    reports: tuple[StepReport, ...] = field(default=())
    leak: str | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The attempt was stopped on request, and its gang is gone (or `leak` says what is left)."""

    key: WorkKey
    leak: str | None = None


FromDriver = (
    Ready | Alive | Capacity | Reserved | Formed | Progress | Repeating | Finished | LeftBehind | Failed | Cancelled
)
