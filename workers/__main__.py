"""`torchrun --nproc_per_node N -m workers`: the same trials without the service, for srun, a bare host or a GPU check.

World rank 0 prints the report as JSON on standard output. Every rank exits with 0 pass, 1 fail, 2 inconclusive, 3
error, which srun and direct starts hand on; torchrun makes 1 of any but 0, so the report says it too (`exit_code`).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NoReturn

from workers.checks.fingerprint import node_name
from workers.contract import (
    NAMED_MODELS,
    REFERENCE_STACK,
    SCHEMA_VERSION,
    BatchSpec,
    Device,
    Drill,
    Dtype,
    Judgement,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    Position,
    ProbeName,
    RankFailure,
    RankPhase,
    Schedule,
    Verdict,
)
from workers.encoding import dumps
from workers.errors import SpecError
from workers.evidence import sign_fingerprints
from workers.experiment import ExperimentSpec, default_batch, resolve, trials
from workers.faults import DRILL_FORM, read_drill
from workers.launch import LaunchError, Place, open_store, read_place, speaks, take_device
from workers.plan import Limits, violations
from workers.rollcall import ERROR_CODE, RollCall, Word, leave, waiting
from workers.session import RankSession, failure_of, first_cause
from workers.verdict import VERDICT_RULES_VERSION, judge
from workers.virtual import VirtualSession

MAX_VIRTUAL_WORLD_SIZE = 1 << 17
"""Ranks that `--virtual` accepts in this one process."""
EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code."""
    options = _parser().parse_args(arguments)
    spec = resolve(_experiment(options))
    if options.virtual:
        return _run_virtually(spec, options)
    try:
        place = read_place(os.environ, spec.mesh)
        found = violations(spec)
        if found:
            return _refuse(violation.message for violation in found)
        store = open_store(os.environ, place, options.timeout_s)
    except LaunchError as error:
        return _refuse([str(error)])
    rank = _Rank(spec, options, place)
    rollcall = RollCall(store, place.world_rank, place.world_size, options.timeout_s, rank.conclude, rank.interrupted)
    rollcall.watch()
    code = rollcall.finish(rank.run(store, rollcall))
    if code == ERROR_CODE:
        leave(code)
    rank.close()
    return code


def _run_virtually(spec: ExperimentSpec, options: argparse.Namespace) -> int:
    """Run all ranks in this process, print, and return the exit code. Nothing is learned about a cluster."""
    spec = replace(spec, device=Device.CPU)
    found = violations(spec, Limits(max_world_size=MAX_VIRTUAL_WORLD_SIZE))
    if found:
        return _refuse(violation.message for violation in found)
    runs = trials(spec, Device.CPU)
    try:
        reports = tuple(VirtualSession().run(runs))
    except SpecError as error:
        return _refuse([str(error)])
    judgement = judge(runs, reports, is_virtual=True)
    code = EXIT_CODES[judgement.verdict]
    words = (Word(0, None, reports),)
    print(dumps(_document(spec, judgement, None, code, words, options.ranks) | {"virtual": True}), flush=True)
    return code


class _Rank:
    """This process as one rank: runs the trials, and on world_rank 0 concludes for all."""

    def __init__(self, spec: ExperimentSpec, options: argparse.Namespace, place: Place) -> None:
        self._spec = spec
        self._options = options
        self._place = place
        self._session: RankSession | None = None
        self._device = spec.device

    def run(self, store: Any, rollcall: RollCall) -> Word:
        """Join and run. Collective over the world; a failure is the last item of the word, never raised."""
        place, options = self._place, self._options
        try:
            resolved = take_device(self._spec.device, place, options.backend)
            # Hosts may differ: where one rank has no GPU, `auto` means the CPU for all.
            said = rollcall.collect("device", resolved.value)
            self._device = resolved if set(said) == {resolved.value} else Device.CPU
            if self._spec.device is Device.AUTO and self._device is not resolved:
                take_device(Device.CPU, place, options.backend)
            self._session = RankSession.join(
                store, place.world_rank, place.world_size, self._device, options.timeout_s, backend=options.backend
            )
            items = tuple(self._session.run(trials(self._spec, self._device)))
            return Word(place.world_rank, self._session.fingerprint(), items)
        except Exception as error:
            return Word(place.world_rank, None, (failure_of(error, self._position(), node_name()),))

    def interrupted(self, why: str) -> Word:
        """The word of this rank while it is stuck."""
        fingerprint = self._session.fingerprint() if self._session else None
        return Word(self._place.world_rank, fingerprint, (waiting(self._position(), node_name(), why),))

    def conclude(self, words: tuple[Word, ...]) -> int:
        """Judge, print the report, and return the exit code."""
        failures = [failure for word in words for failure in word.failures]
        absent = sorted(set(range(self._place.world_size)) - {word.world_rank for word in words})
        judgement: Judgement | None = None
        if not failures and not absent:
            reports = [report for word in words for report in word.reports]
            nodes = {word.world_rank: word.fingerprint.node for word in words if word.fingerprint}
            judgement = judge(trials(self._spec, self._device), reports, nodes)
        error = _error(failures, absent)
        code = ERROR_CODE if judgement is None else EXIT_CODES[judgement.verdict]
        print(dumps(_document(self._spec, judgement, error, code, words, self._options.ranks)), flush=True)
        if error:
            _complain([f"{error['code']}: {error['message']}"])
        return code

    def close(self) -> None:
        """Leave the world."""
        if self._session:
            self._session.close()

    def _position(self) -> Position:
        if self._session:
            return self._session.position()
        return Position(self._place.world_rank, RankPhase.FORMING, None, None, 0)


def _document(
    spec: ExperimentSpec,
    judgement: Judgement | None,
    error: dict[str, object] | None,
    code: int,
    words: tuple[Word, ...],
    with_ranks: bool,
) -> dict[str, object]:
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "verdict_rules_version": VERDICT_RULES_VERSION,
        "exit_code": code,
        "verdict": judgement.verdict if judgement else None,
        "reasons": judgement.reasons if judgement else (),
        "observations": judgement.observations if judgement else (),
        "collectives": judgement.collectives if judgement else (),
        "request": spec,
        "trials": judgement.trials if judgement else (),
        "error": error,
        "fingerprint": sign_fingerprints(
            (word.fingerprint for word in words if word.fingerprint),
            (report for word in words for report in word.reports),
        ),
    }
    if with_ranks:
        document["ranks"] = [report for word in words for report in word.reports]
    return document


def _error(failures: Sequence[RankFailure], absent: Sequence[int]) -> dict[str, object] | None:
    """The first cause: a rank that broke by itself, else one that is gone, else the first that noticed."""
    cause = first_cause(failures)
    if absent and (cause is None or cause.collateral):
        noticed = f"; world_rank {cause.world_rank} noticed in {cause.phase.value}" if cause else ""
        message = f"world ranks {list(absent)} are gone without a word{noticed}"
        return {"code": "rank_lost", "message": message, "world_rank": absent[0], "node": None, "phase": None}
    if cause is None:
        return None
    return {
        "code": cause.code,
        "message": cause.message,
        "world_rank": cause.world_rank,
        "node": cause.node,
        "phase": cause.phase,
    }


def _experiment(options: argparse.Namespace) -> ExperimentSpec:
    mesh, batch = Mesh(options.dp, options.pp, options.tp, options.vpp), None
    if options.num_microbatches is not None or options.micro_batch_size is not None:
        default = default_batch(mesh)
        batch = BatchSpec(
            default.micro_batch_size if options.micro_batch_size is None else options.micro_batch_size,
            default.num_microbatches if options.num_microbatches is None else options.num_microbatches,
        )
    return ExperimentSpec(
        mesh=mesh,
        model=options.model,
        batch=batch,
        schedule=options.schedule,
        overlap=options.overlap,
        bucket_size=options.bucket_size,
        average_in_collective=options.average_in_collective,
        normalization=options.normalization,
        probes=tuple(options.probes),
        orderings=tuple(options.orderings),
        steps=options.steps,
        repeats=options.repeats,
        dtype=options.dtype,
        grad_reduce_dtype=options.grad_reduce_dtype,
        device=options.device,
        seed=options.seed,
        drill=options.drill,
        stack=options.stack,
    )


class _Parser(argparse.ArgumentParser):
    """Argparse exits with 2, which means inconclusive here; and one rank speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_refuse([f"{message}; see --help"]))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m workers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a rank; 2 or more are interleaved")
    parser.add_argument("--model", type=_model, default="tiny", help="a name, or VOCAB,HIDDEN,LAYERS,HEADS,SEQ")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--num-microbatches", type=int)
    parser.add_argument("--schedule", type=_choice(Schedule), default=Schedule.ONE_F_ONE_B, help=", ".join(Schedule))
    parser.add_argument("--overlap", action="store_true", help="start the gradient sync in the midst of backward")
    parser.add_argument("--bucket-size", type=int, help="elements at which a bucket closes, with --overlap")
    parser.add_argument("--average-in-collective", action="store_true", help="instead of scaling before each sum")
    normalizations, default = ", ".join(Normalization), Normalization.MICROBATCHES
    parser.add_argument("--normalization", type=_choice(Normalization), default=default, help=normalizations)
    _add_choices(parser, "--probes", ProbeName, list(ProbeName))
    _add_choices(parser, "--orderings", OrderingName, list(OrderingName)[:3])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", type=_choice(Dtype), default=Dtype.FLOAT32, help=", ".join(Dtype))
    parser.add_argument("--grad-reduce-dtype", type=_choice(Dtype), default=Dtype.FLOAT32, help=", ".join(Dtype))
    parser.add_argument("--device", type=_choice(Device), default=Device.AUTO, help=", ".join(Device))
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl on cuda, gloo on cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drill", type=_drill, help=f"{DRILL_FORM}, to see a failure on purpose")
    stack_help = "an entry of gradgate.stacks or GRADGATE_STACKS, put under each probe besides the orderings"
    parser.add_argument("--stack", default=REFERENCE_STACK, help=stack_help)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of each collective, in seconds")
    parser.add_argument("--virtual", action="store_true", help="all ranks in this one process, whatever the mesh")
    parser.add_argument("--ranks", action="store_true", help="print every rank's report too")
    return parser


def _add_choices(parser: argparse.ArgumentParser, name: str, choices: type[StrEnum], default: list[Any]) -> None:
    parser.add_argument(name, type=_choice(choices), nargs="+", default=default, help=", ".join(choices))


def _choice(choices: type[StrEnum]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return choices(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; name one of {', '.join(choices)}") from None

    return read


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
    try:
        read = read_drill(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return Drill(**({"world_rank": 0} if "node" not in read else {}) | read)


def _refuse(sentences: Iterable[str]) -> int:
    """Say why nothing runs, once for all ranks; the exit code."""
    if speaks(os.environ):
        _complain(sentences)
    return ERROR_CODE


def _complain(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"gradgate: {sentence}", file=sys.stderr, flush=True)


def _main_or_error() -> int:
    """Python's own exit code for an exception, 1, would read as a verdict."""
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return ERROR_CODE


if __name__ == "__main__":
    sys.exit(_main_or_error())
