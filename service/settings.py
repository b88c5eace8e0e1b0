"""Every setting of the product, from `GRADGATE_*` variables. Reads nothing and connects nowhere when imported."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.errors import StackError
from workers.stacks.registry import parse_setting

_SCHEMES = ("postgresql://", "postgresql+psycopg://", "postgres://")


def default_home() -> Path:
    """`~/.gradgate`; as root `/var/lib/gradgate`: the embedded database's own user cannot enter root's home."""
    return Path("/var/lib/gradgate") if os.geteuid() == 0 else Path.home() / ".gradgate"


def default_dispatcher_id() -> str:
    """Host and process: enough to tell two dispatchers of one cluster apart in leases and logs."""
    return f"{socket.gethostname()}:{os.getpid()}"


def default_local_ray_cpus() -> int:
    """At least 16: a CPU rank of a small probe needs a fraction of a core, and 4x4 has 16 of them."""
    return max(16, os.cpu_count() or 1)


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _postgres_url(url: str | None) -> str | None:
    if url and not url.startswith(_SCHEMES):
        scheme = url.split("://", 1)[0]
        raise ValueError(f"{scheme!r} is not a Postgres URL; use postgresql://user:password@host:port/database")
    return url or None


def _stacks(text: str) -> str:
    try:
        parse_setting(text)
    except StackError as error:
        raise ValueError(str(error)) from None
    return text


class Settings(BaseSettings):
    """Settings of one process. `Settings.load()` reads the environment; the caller keeps the result."""

    model_config = SettingsConfigDict(
        env_prefix="GRADGATE_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        # A mistyped database URL may hold a password.
        hide_input_in_errors=True,
    )

    home: Annotated[Path, AfterValidator(_absolute)] = Field(default_factory=default_home)
    """Data of the embedded database, logs, Ray's token."""
    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65535)
    cluster: str = Field(default="default", min_length=1, max_length=63)

    database_url: Annotated[str | None, AfterValidator(_postgres_url)] = Field(default=None, repr=False)
    """None: the embedded database under `home`. Never printed: it may hold a password."""
    listen_url: Annotated[str | None, AfterValidator(_postgres_url)] = Field(default=None, repr=False)
    """Where LISTEN and the leader's lock go, which need a session of their own: the same database without the
    transaction pooler that `database_url` may then lead through. None: `database_url`."""
    database_pool_size: int = Field(default=10, ge=1, le=200)
    database_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long to wait for a connection, from the pool or from the server."""

    retention_days: int | None = Field(default=None, ge=1, le=36_500)
    """Whole weeks of per-rank rows and events that ended longer ago than this are removed; verdicts stay. None: nothing
    is ever removed, since nobody should lose evidence by not having set something."""

    ray_address: str | None = None
    """None: a local Ray started by `gradgate up`."""
    local_ray_cpus: int = Field(default_factory=default_local_ray_cpus, ge=1, le=4096)
    """Logical CPUs of that local Ray, one a rank. They bound how many ranks share the machine, not its cores."""
    node_label: str = "gradgate.node"
    """The Ray node label that maps a node to its Kubernetes or Slurm name."""
    stacks: Annotated[str, AfterValidator(_stacks)] = ""
    """Stacks that requests may name besides those of installed packages: name=module:attribute, divided by commas."""
    dispatcher_id: str = Field(default_factory=default_dispatcher_id, min_length=1)

    max_world_size: int = Field(default=1024, ge=1)
    max_wait_s: float = Field(default=60.0, ge=0, le=3600)
    """Cap of `Prefer: wait`."""
    max_active_validations: int = Field(default=1000, ge=1)
    """Validations of one API key that have not ended."""
    max_requests_per_minute: int = Field(default=600, ge=1)
    """Of one API key, to one process."""
    snapshot_max_age_s: float = Field(default=30.0, gt=0)
    """Older capacity snapshots decide nothing."""

    pool_max_gangs: int = Field(default=4, ge=0)
    gang_idle_s: float = Field(default=600.0, ge=0)
    gpu_gang_idle_s: float = Field(default=30.0, ge=0)
    lease_s: float = Field(default=15.0, ge=1)
    """How long a validation stays with a dispatcher that says nothing."""
    queue_wait_s: float = Field(default=43200.0, gt=0)
    """How long a validation waits at most until a dispatcher takes it up. Half a day is more than a full queue takes:
    1000 validations, 4 at once, two minutes each."""
    poll_s: float = Field(default=1.0, gt=0)
    """The queue is polled this often; notifications only make it faster."""
    max_parallel: int = Field(default=4, ge=1)
    """Validations that one dispatcher runs at once."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where a dispatcher answers Prometheus; 0: nowhere. `serve` has /metrics beside the API."""

    @property
    def session_url(self) -> str | None:
        """The database for whoever needs a whole session."""
        return self.listen_url or self.database_url

    @property
    def through_pooler(self) -> bool:
        """Whether two statements of `database_url` may meet different sessions."""
        return self.listen_url is not None

    @classmethod
    def load(cls) -> Self:
        """Settings from the environment. Raises pydantic.ValidationError naming each bad variable."""
        return cls()
