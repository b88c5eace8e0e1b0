"""The stack under fire: a Postgres that can go away, a Ray of three nodes, serve, and two dispatchers, all real.

Processes carry a mark in their environment, so that whatever they leave behind is found. Nothing here judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from psycopg.rows import dict_row

from service.home import choose_free_port
from service.storage import ledger, migration
from service.storage.session import Database, conninfo
from tests.stoppable import Server

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = "chaos"
LEASE_S = 5.0
NODES = {"node-0": 2, "node-1": 2, "node-2": 2}
"""CPUs by node; the first is the head."""
NUM_CPUS = sum(NODES.values())
DISPATCHERS = ("d0", "d1")
MARK = "GRADGATE_CHAOS_MARK"
EXIT_S = 30.0
READY_S = 60.0


class Stack:
    """Use `running`. Methods that break something say in their name what; those that mend are safe to call any time."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.mark = secrets.token_hex(8)
        os.environ |= {MARK: self.mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        from ray.cluster_utils import Cluster

        self.database = Server(home / "db")
        migration.upgrade(self.database.url)
        (head, num_cpus), *others = NODES.items()
        self.ray = Cluster(initialize_head=True, head_node_args=_node(head, num_cpus))
        self.nodes: dict[str, Any] = {name: self.ray.add_node(**_node(name, cpus)) for name, cpus in others}
        self.port = choose_free_port("127.0.0.1")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)

    def start(self, name: str) -> None:
        """`serve`, or a dispatcher by its name; nothing where it runs."""
        if name in self.processes and self.processes[name].poll() is None:
            return
        command = [sys.executable, "-m", "service.cli", "serve" if name == "serve" else "dispatch"]
        environment = os.environ | {
            "GRADGATE_DATABASE_URL": self.database.url,
            "GRADGATE_RAY_ADDRESS": self.ray.address,
            "GRADGATE_CLUSTER": CLUSTER,
            "GRADGATE_PORT": str(self.port),
            "GRADGATE_HOME": str(self.home),
            "GRADGATE_LEASE_S": str(LEASE_S),
            "GRADGATE_POLL_S": "0.3",
            "GRADGATE_GANG_IDLE_S": "3",
            "GRADGATE_MAX_PARALLEL": "3",
        }
        if name != "serve":
            environment["GRADGATE_DISPATCHER_ID"] = name
        with open(self.home / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def mend(self) -> None:
        """Bring back whatever is down."""
        self.database.start()
        for name, num_cpus in list(NODES.items())[1:]:
            if name not in self.nodes:
                self.nodes[name] = self.ray.add_node(**_node(name, num_cpus))
        for name in ("serve", *DISPATCHERS):
            with contextlib.suppress(KeyError):
                self.processes[name].send_signal(signal.SIGCONT)
            self.start(name)

    def wait_ready(self) -> None:
        """Until the API answers and knows its database."""
        until_s = time.monotonic() + READY_S
        while not self._is_ready():
            if time.monotonic() > until_s:
                raise AssertionError(f"the API is not ready after {READY_S:g} s: {self.tail('serve')}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self.api.get("/readyz").is_success
        except httpx.HTTPError:
            return False

    def tail(self, name: str, num_lines: int = 12) -> str:
        """The end of a process's log."""
        return "\n".join((self.home / f"{name}.log").read_text(errors="replace").splitlines()[-num_lines:])

    def query(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        """Rows of the database, on a connection of its own."""
        with psycopg.connect(conninfo(self.database.url), row_factory=dict_row) as connection:
            return connection.execute(statement, values).fetchall()

    def overlaps(self) -> list[tuple[str, int, int]]:
        """Attempts that the ledger says were held at the same time."""
        return asyncio.run(_overlaps(self.database.url))

    def drivers(self, name: str) -> list[psutil.Process]:
        """A dispatcher's driver child."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.processes[name].pid).children()
            return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        return []

    def ranks(self) -> list[psutil.Process]:
        """Processes of ranks, whoever started them."""
        return [process for process in self.marked() if _title(process).startswith("ray::RankActor")]

    def marked(self) -> list[psutil.Process]:
        """Every process that comes from this stack, but for this one."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def postmaster(self) -> psutil.Process:
        """Postgres' first process."""
        pid = int((self.home / "db" / "postgres" / "postmaster.pid").read_text().split()[0])
        return psutil.Process(pid)

    def remove_node(self, name: str) -> None:
        """Kill a worker node's raylet, and with it all that runs there."""
        if (node := self.nodes.pop(name, None)) is not None:
            self.ray.remove_node(node, allow_graceful=False)

    def look_at_ray(self) -> dict[str, Any]:
        """Total and free CPUs and the names of our placement groups, as a passing driver sees them."""
        command = [sys.executable, "-c", _LOOK, self.ray.address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return {"error": done.stderr[-500:]}
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen

    def stop(self) -> list[str]:
        """End everything in good order; what did not go as it should, in words."""
        complaints = []
        for name, process in self.processes.items():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                code = process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                complaints.append(f"{name} did not end within {EXIT_S:g} s of SIGTERM")
            else:
                complaints += [f"{name} ended with {code}"] if code else []
        complaints += [f"a rank outlived its dispatchers: {rank.pid} {_title(rank)}" for rank in self.ranks()]
        self.api.close()
        self.ray.shutdown()
        self.database.stop()
        until_s = time.monotonic() + EXIT_S
        while (left := self.marked()) and time.monotonic() < until_s:
            time.sleep(0.2)
        for process in left:
            complaints.append(f"left running: {process.pid} {_title(process)[:120]}")
            process.kill()
        return complaints


_LOOK = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED" and g["name"]]
print(json.dumps({
    "total": ray.cluster_resources().get("CPU", 0),
    "free": ray.available_resources().get("CPU", 0),
    "groups": [name for name in groups if name.startswith("gradgate:")],
}))
"""


@contextlib.contextmanager
def running() -> Iterator[Stack]:
    """A stack in a folder of its own. The caller calls `stop` and reads what it says; this only leaves nothing."""
    home = Path(tempfile.mkdtemp(prefix="gg-chaos-"))
    home.chmod(0o711)
    stack = Stack(home)
    try:
        yield stack
    finally:
        for process in stack.marked():
            with contextlib.suppress(psutil.Error):
                process.kill()
        stack.database.stop()
        shutil.rmtree(home, ignore_errors=True)


async def _overlaps(url: str) -> list[tuple[str, int, int]]:
    database = Database(url)
    try:
        async with database.read() as connection:
            return await ledger.overlaps(connection)
    finally:
        await database.close()


def _node(name: str, num_cpus: int) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "labels": {"gradgate.node": name},
        "object_store_memory": 80 * 2**20,
        "include_dashboard": False,
    }


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""
