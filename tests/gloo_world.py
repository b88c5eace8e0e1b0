"""Real ranks for tests: processes forked from a server that has torch loaded, joined through a real store.

On CPU over gloo; on one CUDA device over gloo (all ranks share it) or NCCL (a single rank).
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from workers.contract import Device, RankFailure, StepReport, TrialSpec

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["workers.session", "workers.verdict", "torch.distributed.pipelining"])
TIMEOUT_S = 120.0


def run_world(
    world_size: int,
    target: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
    device: Device = Device.CPU,
    backend: str = "gloo",
    nodes: Sequence[str] | None = None,
) -> list[Any]:
    """Call `target(session, *arguments)` on every rank; results by world_rank. Raises what the first rank raised.

    `nodes` names the node of each rank; without it all are on this machine's.
    """
    from workers.session import host_store

    _store, port = host_store("127.0.0.1", timeout_s)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = []
    for world_rank, (_, sender) in enumerate(pipes):
        node = nodes[world_rank] if nodes else None
        process = CONTEXT.Process(
            target=_rank_main,
            args=(port, world_rank, world_size, sender, target, arguments, device, backend, node),
            daemon=True,
        )
        process.start()
        sender.close()
        processes.append(process)
    try:
        return [_receive(world_rank, receiver, timeout_s) for world_rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def run_trials(trials: Sequence[TrialSpec], backend: str = "gloo") -> list[list[StepReport]]:
    """Run trials on as many ranks as their mesh has; the reports by world_rank. AssertionError on a failure."""
    first = trials[0]
    results = run_world(first.mesh.world_size, rank_run, list(trials), device=first.device, backend=backend)
    for items in results:
        for item in items:
            assert not isinstance(item, RankFailure), item
    return results


def rank_run(session: Any, trials: Sequence[TrialSpec]) -> list[StepReport | RankFailure]:
    return list(session.run(trials))


def _receive(world_rank: int, receiver: Connection, timeout_s: float) -> Any:
    if not receiver.poll(timeout_s):
        raise TimeoutError(f"world_rank {world_rank} said nothing for {timeout_s} s")
    ok, value = receiver.recv()
    if not ok:
        raise AssertionError(f"world_rank {world_rank} raised:\n{value}")
    return value


def _rank_main(
    port: int,
    world_rank: int,
    world_size: int,
    sender: Connection,
    target: Callable[..., Any],
    arguments: Any,
    device: Device,
    backend: str,
    node: str | None,
) -> None:
    import torch

    from workers.session import RankSession, connect_store

    torch.set_num_threads(1)
    try:
        store = connect_store("127.0.0.1", port, TIMEOUT_S)
        if device is Device.CUDA:
            torch.cuda.set_device(0)
        session = RankSession.join(store, world_rank, world_size, device, 60.0, node, backend)
        sender.send((True, target(session, *arguments)))
        session.close()
    except BaseException:
        sender.send((False, traceback.format_exc()))
