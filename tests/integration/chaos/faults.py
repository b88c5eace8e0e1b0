"""The faults: each breaks something real, at once or for some seconds, and says in words what it struck.

A fault draws whom it strikes from the run's generator and never mends more than it must for the next one to have a
meaning; `Stack.mend` follows it.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import psutil

from .stack import DISPATCHERS, EXIT_S, LEASE_S, NODES, Stack

APPEARS_S = 10.0
"""How long to wait for somebody to strike."""
Fault = Callable[[Stack, random.Random], str]


def _rank(stack: Stack, rng: random.Random, number: signal.Signals) -> str:
    draw = rng.random()
    until_s = time.monotonic() + APPEARS_S
    while not (ranks := stack.ranks()):
        if time.monotonic() > until_s:
            return "no rank was there"
        time.sleep(0.1)
    rank = ranks[int(draw * len(ranks))]
    with contextlib.suppress(psutil.Error):
        rank.send_signal(number)
    return f"pid {rank.pid}, one of {len(ranks)} ranks"


def kill_rank(stack: Stack, rng: random.Random) -> str:
    """SIGKILL, in whatever phase it is."""
    return _rank(stack, rng, signal.SIGKILL)


def stop_rank(stack: Stack, rng: random.Random) -> str:
    """SIGSTOP: alive and silent. Its validation's deadline ends it."""
    return _rank(stack, rng, signal.SIGSTOP)


def cancel(stack: Stack, rng: random.Random) -> str:
    """Through the API, whatever state it is in; twice, which must be the same as once."""
    draw = rng.random()
    active = stack.query("SELECT id, state FROM validations WHERE finished_at IS NULL ORDER BY id")
    if not active:
        return "nothing was active"
    chosen = active[int(draw * len(active))]
    answers = [stack.api.post(f"/validations/{chosen['id']}/cancel").status_code for _ in range(2)]
    return f"{chosen['id']}, then {chosen['state']}: HTTP {answers}"


def _leader(stack: Stack) -> str:
    """The dispatcher that has a driver; before one has, any."""
    until_s = time.monotonic() + APPEARS_S
    while time.monotonic() < until_s:
        if leading := [name for name in DISPATCHERS if stack.drivers(name)]:
            return leading[0]
        time.sleep(0.1)
    return DISPATCHERS[0]


def kill_dispatcher(stack: Stack, rng: random.Random) -> str:
    """SIGKILL the leader; its standby follows."""
    name = _leader(stack)
    stack.processes[name].kill()
    stack.processes[name].wait()
    time.sleep(rng.uniform(0, LEASE_S))
    return name


def end_dispatcher(stack: Stack, rng: random.Random) -> str:
    """SIGTERM the leader; it hands back, and exits with 0 within its grace."""
    name = _leader(stack)
    stack.processes[name].terminate()
    try:
        code = stack.processes[name].wait(EXIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{name} did not end within {EXIT_S:g} s of SIGTERM: {stack.tail(name)}") from None
    assert code == 0, f"{name} ended with {code} after SIGTERM: {stack.tail(name)}"
    return name


def stop_dispatcher(stack: Stack, rng: random.Random) -> str:
    """SIGSTOP the leader for up to two leases, then let it go on, believing what it believed."""
    name, away_s = _leader(stack), rng.uniform(0.5, 2 * LEASE_S)
    stack.processes[name].send_signal(signal.SIGSTOP)
    time.sleep(away_s)
    stack.processes[name].send_signal(signal.SIGCONT)
    return f"{name} for {away_s:.1f} s"


def _driver(stack: Stack, number: signal.Signals) -> str:
    name = _leader(stack)
    drivers = stack.drivers(name)
    for driver in drivers:
        with contextlib.suppress(psutil.Error):
            driver.send_signal(number)
    return f"{name}'s, pid {drivers[0].pid}" if drivers else f"{name} had none"


def kill_driver(stack: Stack, rng: random.Random) -> str:
    """SIGKILL the driver child."""
    return _driver(stack, signal.SIGKILL)


def stop_driver(stack: Stack, rng: random.Random) -> str:
    """SIGSTOP the driver child; its supervisor must notice."""
    return _driver(stack, signal.SIGSTOP)


def stop_driver_then_kill_dispatcher(stack: Stack, rng: random.Random) -> str:
    """The driver can hear nothing when its dispatcher dies."""
    name = _leader(stack)
    told = _driver(stack, signal.SIGSTOP)
    stack.processes[name].kill()
    stack.processes[name].wait()
    return told


def restart_postgres(stack: Stack, rng: random.Random) -> str:
    """Every connection breaks; it is back at once."""
    stack.database.stop()
    stack.database.start()
    return "fast shutdown"


def keep_postgres_away(stack: Stack, rng: random.Random) -> str:
    """Down for some seconds, up to more than a lease."""
    away_s = rng.uniform(1, 1.5 * LEASE_S)
    stack.database.stop()
    time.sleep(away_s)
    stack.database.start()
    return f"for {away_s:.1f} s"


def kill_postgres(stack: Stack, rng: random.Random) -> str:
    """SIGKILL the postmaster; the next start recovers from the log."""
    with contextlib.suppress(psutil.Error, OSError):
        stack.postmaster().kill()
    time.sleep(rng.uniform(0, 1))
    stack.database.stop()
    stack.database.start()
    return "SIGKILL"


def kill_node(stack: Stack, rng: random.Random) -> str:
    """A worker node's raylet; the node comes back."""
    name = rng.choice(list(NODES)[1:])
    stack.remove_node(name)
    time.sleep(rng.uniform(0, 3))
    return name


def kill_serve(stack: Stack, rng: random.Random) -> str:
    """SIGKILL the API."""
    stack.processes["serve"].kill()
    stack.processes["serve"].wait()
    return "SIGKILL"


FAULTS: Mapping[Fault, int] = MappingProxyType(
    {
        kill_rank: 6,
        stop_rank: 2,
        cancel: 6,
        kill_dispatcher: 3,
        end_dispatcher: 3,
        stop_dispatcher: 2,
        kill_driver: 3,
        stop_driver: 1,
        stop_driver_then_kill_dispatcher: 1,
        restart_postgres: 3,
        keep_postgres_away: 2,
        kill_postgres: 1,
        kill_node: 3,
        kill_serve: 2,
    }
)
"""By weight: what takes longer to come over comes less often."""


def draw_faults(rng: random.Random, num_faults: int) -> list[Fault]:
    """The sequence of a seed: each once in every `len(FAULTS)` and more, where that many are drawn, else by weight."""
    drawn = list(FAULTS) if num_faults >= len(FAULTS) else []
    rest = rng.choices(list(FAULTS), list(FAULTS.values()), k=num_faults - len(drawn))
    sequence = drawn + rest
    rng.shuffle(sequence)
    return sequence
