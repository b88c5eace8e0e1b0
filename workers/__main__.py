"""`torchrun --nproc_per_node N -m workers`: the same trials without the service, for srun, a bare host or a GPU check.

Rank 0 prints the report as JSON on standard output. Exit code 0 pass, 1 fail, 2 inconclusive, 3 error; on all ranks.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from workers.contract import (
    NAMED_MODELS,
    SCHEMA_VERSION,
    BatchSpec,
    Device,
    Drill,
    Dtype,
    Fingerprint,
    Judgement,
    Mesh,
    ModelSpec,
    OrderingName,
    ProbeName,
    RankFailure,
    StepReport,
    Verdict,
)
from workers.encoding import dumps
from workers.plan import ExperimentSpec, Limits, resolve, trials, violations
from workers.session import RankSession, first_cause
from workers.verdict import VERDICT_RULES_VERSION, judge

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}
EXIT_ERROR = 3
_RESULT_WAIT_S = 15.0
"""How long rank 0 waits for the others' results once it has its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code."""
    options = _parser().parse_args(arguments)
    spec = _experiment(options)
    world_rank, world_size = _world(spec.mesh)
    found = violations(spec, Limits())
    if found:
        for violation in found:
            field = ".".join(map(str, violation.field))
            print(f"{field}: {violation.value!r}: {violation.rule}; {violation.remedy}", file=sys.stderr)
        return EXIT_ERROR
    spec = resolve(spec)
    device = _resolve_device(spec.device)
    store, _, _ = next(dist.rendezvous("env://", world_rank, world_size, timeout=timedelta(seconds=options.timeout_s)))
    store = dist.PrefixStore("gradgate", store)
    session = RankSession.join(store, world_rank, world_size, device, options.timeout_s)
    results = list(session.run(trials(spec, device)))
    store.set(f"result/{world_rank}", pickle.dumps((session.fingerprint(), results)).hex())
    code = _conclude(store, spec, device, options) if world_rank == 0 else _await_code(store, options.timeout_s)
    session.close()
    return code


def _conclude(store: dist.Store, spec: ExperimentSpec, device: Device, options: argparse.Namespace) -> int:
    """On rank 0: gather, judge, print, and tell the others the exit code."""
    fingerprints: list[Fingerprint] = []
    reports: list[StepReport] = []
    failures: list[RankFailure] = []
    absent: list[int] = []
    for world_rank in range(spec.mesh.world_size):
        gathered = _result_of(store, world_rank)
        if gathered is None:
            absent.append(world_rank)
            continue
        fingerprints.append(gathered[0])
        reports += [item for item in gathered[1] if isinstance(item, StepReport)]
        failures += [item for item in gathered[1] if isinstance(item, RankFailure)]
    judgement = None if failures or absent else judge(trials(spec, device), reports)
    code = EXIT_ERROR if judgement is None else EXIT_CODES[judgement.verdict]
    print(dumps(_document(spec, judgement, first_cause(failures), absent, fingerprints, reports, options.ranks)))
    store.set("exit_code", str(code))
    return code


def _document(
    spec: ExperimentSpec,
    judgement: Judgement | None,
    cause: RankFailure | None,
    absent: list[int],
    fingerprints: list[Fingerprint],
    reports: list[StepReport],
    with_ranks: bool,
) -> dict[str, object]:
    error: dict[str, object] | None = None
    if absent:
        error = {"code": "rank_lost", "message": f"no result from world ranks {absent}", "world_rank": absent[0]}
    if cause is not None and not (absent and cause.collateral):
        error = {"code": cause.code, "message": cause.message, "world_rank": cause.world_rank}
        error |= {"node": cause.node, "phase": cause.phase}
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "verdict_rules_version": VERDICT_RULES_VERSION,
        "verdict": judgement.verdict if judgement else None,
        "reasons": judgement.reasons if judgement else (),
        "request": spec,
        "trials": judgement.trials if judgement else (),
        "error": error,
        "fingerprint": fingerprints,
    }
    if with_ranks:
        document["ranks"] = reports
    return document


def _result_of(store: dist.Store, world_rank: int) -> tuple[Fingerprint, list[StepReport | RankFailure]] | None:
    key = f"result/{world_rank}"
    try:
        store.wait([key], timedelta(seconds=_RESULT_WAIT_S))
    except dist.DistError:
        return None
    # Written by this job's own ranks into this job's own store.
    gathered: tuple[Fingerprint, list[StepReport | RankFailure]] = pickle.loads(bytes.fromhex(store.get(key).decode()))
    return gathered


def _await_code(store: dist.Store, timeout_s: float) -> int:
    try:
        store.wait(["exit_code"], timedelta(seconds=timeout_s))
        return int(store.get("exit_code"))
    except (dist.DistError, RuntimeError):
        return EXIT_ERROR


def _world(mesh: Mesh) -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun or srun tells them."""
    world_rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    world_size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS")
    if world_rank is None or world_size is None:
        _stop(
            "neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set: start the ranks with "
            f"`torchrun --nproc_per_node {mesh.world_size} -m workers ...` or `srun -n {mesh.world_size} ...`"
        )
    if int(world_size) != mesh.world_size:
        _stop(
            f"{world_size} ranks were started for a mesh of dp {mesh.dp} x pp {mesh.pp} = {mesh.world_size}: start "
            f"{mesh.world_size} or change --dp and --pp"
        )
    return int(world_rank), int(world_size)


def _resolve_device(device: Device) -> Device:
    """`auto` takes one GPU a rank where this host has that many, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    if device is Device.AUTO:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= num_local
        device = Device.CUDA if enough else Device.CPU
    if device is Device.CUDA:
        if not torch.cuda.is_available():
            _stop("device cuda: torch sees no CUDA device here; use --device cpu or install the CUDA build of torch")
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)
    return device


def _experiment(options: argparse.Namespace) -> ExperimentSpec:
    batch = None
    if options.num_microbatches is not None or options.micro_batch_size is not None:
        batch = BatchSpec(options.micro_batch_size or 1, options.num_microbatches or max(2, options.pp))
    return ExperimentSpec(
        mesh=Mesh(options.dp, options.pp),
        model=options.model,
        batch=batch,
        probes=tuple(options.probes),
        orderings=tuple(options.orderings),
        steps=options.steps,
        repeats=options.repeats,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
        drill=options.drill,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--model", type=_model, default="tiny", help="a name, or VOCAB,HIDDEN,LAYERS,HEADS,SEQ")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--num-microbatches", type=int)
    parser.add_argument("--probes", type=ProbeName, nargs="+", default=list(ProbeName))
    parser.add_argument("--orderings", type=OrderingName, nargs="+", default=list(OrderingName)[:3])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32)
    parser.add_argument("--device", type=Device, default=Device.AUTO)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drill", type=_drill, help="FAULT:WORLD_RANK[:STEP], to see a failure on purpose")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of each collective, in seconds")
    parser.add_argument("--ranks", action="store_true", help="print every rank's report too")
    return parser


def _model(text: str) -> str | ModelSpec:
    if text in NAMED_MODELS:
        return text
    sizes = text.split(",")
    if len(sizes) != 5 or not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use one of {sorted(NAMED_MODELS)} or VOCAB,HIDDEN,LAYERS,HEADS,SEQ"
        )
    return ModelSpec(*map(int, sizes))


def _drill(text: str) -> Drill:
    fault, _, rest = text.partition(":")
    world_rank, _, step = rest.partition(":")
    if not world_rank.isdecimal() or (step and not step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: use FAULT:WORLD_RANK[:STEP], say raise_in_collective:1")
    return Drill(fault, int(world_rank), int(step or 0))


def _stop(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(EXIT_ERROR)


if __name__ == "__main__":
    sys.exit(main())
