"""Which process is which: identities that survive pid reuse, and ending exactly those processes.

A pid names a process only while it lives; pid, start time and boot together name one for good. Everything here
works on such identities, so that a stale pid file never costs an unrelated process its life. Linux only
(/proc), standard library only, and it must not decide *what* ought to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, never confused with a later one of the same pid."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and the start of the process."""
    boot_id: str


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """What /proc says about a process right now."""

    pid: int
    state: str
    parent_pid: int
    session: int
    start_ticks: int


def read_boot_id() -> str:
    """This boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_entry(pid: int) -> ProcessEntry | None:
    """The process of this pid, or None where there is none (or only its corpse)."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    if fields[0] in "ZX":
        return None
    return ProcessEntry(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def list_processes() -> dict[int, ProcessEntry]:
    """Every live process by pid."""
    entries = (read_entry(int(path.name)) for path in PROC.iterdir() if path.name.isdigit())
    return {entry.pid: entry for entry in entries if entry}


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the live process of this pid."""
    entry = read_entry(pid)
    return ProcessIdentity(pid, entry.start_ticks, read_boot_id()) if entry else None


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


def find_descendants(pid: int) -> list[ProcessIdentity]:
    """Children, their children and so on. Orphans are found too below a child subreaper."""
    entries = list_processes()
    found: list[ProcessIdentity] = []
    parents = {pid}
    while parents:
        level = [entry for entry in entries.values() if entry.parent_pid in parents]
        found += [ProcessIdentity(entry.pid, entry.start_ticks, read_boot_id()) for entry in level]
        parents = {entry.pid for entry in level}
    return found


def find_session_members(leader: ProcessIdentity, folders: Iterable[Path]) -> list[ProcessIdentity]:
    """Processes of the session that `leader` began, also after its death.

    Once a session is empty its number may be given away again, so a member of a dead leader's session counts
    only if it started after the leader in the same boot and uses a file in one of `folders`.
    """
    if leader.boot_id != read_boot_id():
        return []
    entries = [e for e in list_processes().values() if e.session == leader.pid and e.start_ticks >= leader.start_ticks]
    if not is_alive(leader):
        entries = [entry for entry in entries if entry.pid != leader.pid and uses_folder(entry.pid, folders)]
    return [ProcessIdentity(entry.pid, entry.start_ticks, leader.boot_id) for entry in entries]


def uses_folder(pid: int, folders: Iterable[Path]) -> bool:
    """Whether a process has a file below one of `folders` open, or names one in its command line."""
    prefixes = tuple(f"{folder}/" for folder in folders)
    paths: list[str] = []
    with contextlib.suppress(OSError):
        paths += (PROC / str(pid) / "cmdline").read_text(errors="replace").replace("=", "\0").split("\0")
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                paths.append(str(link.readlink()))
    return any(path.startswith(prefixes) for path in paths)


def send_signal(identity: ProcessIdentity, signal_number: signal.Signals) -> bool:
    """Signal this very process; False where it is gone. The pidfd closes the gap between look and shot."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(descriptor, signal_number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_for_end(identities: Iterable[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait until all are gone; returns those that are not when the time is up."""
    deadline = time.monotonic() + timeout_s
    alive = [identity for identity in identities if is_alive(identity)]
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = [identity for identity in alive if is_alive(identity)]
    return alive


def end_processes(identities: Iterable[ProcessIdentity], grace_s: float) -> list[ProcessIdentity]:
    """SIGTERM, then after `grace_s` SIGKILL. Returns what even that did not end."""
    targets = list(dict.fromkeys(identities))
    for identity in targets:
        send_signal(identity, signal.SIGTERM)
    survivors = wait_for_end(targets, grace_s)
    for identity in survivors:
        send_signal(identity, signal.SIGKILL)
    return wait_for_end(survivors, 5.0)
