"""How often a clean run is called wrong: every right ordering over a matrix of meshes, dtypes, sizes and seeds.

    python tests/bench/false_alarms.py [live] [virtual] [--matrix plain|composed] [--limit-s S] [--state FILE]
    python tests/bench/false_alarms.py --case KEY

A case is one mesh, probe, dtype, size and seed in one world: on real gloo ranks, or on virtual ones. It runs every
right ordering for a step, and every judge must be silent. `plain` is 5 meshes, 2 probes, 2 dtypes, 5 sizes, 10 seeds:
1,000 cases a world. `composed` is the same questions asked of overlap, interleaved chunks, gpipe, averaging in the
collective, token counts, bfloat16 sums and tensor parallelism, at 2 sizes. The exact probe is float32 by nature: its
second dtype is ten further seeds.

With --state finished cases are kept in a file and not run again; use another file for another commit. Prints how many
ran and how many alarmed, and each alarm as it comes with the key that runs it again; exits with 1 where one did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
from gloo_world import run_trials
from rich.console import Console
from rich.table import Table

from workers.contract import (
    Dtype,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    Reason,
    Role,
    Schedule,
    StepReport,
    TrialSpec,
)
from workers.experiment import Device, ExperimentSpec, resolve, trials
from workers.orderings import ordering_of
from workers.plan import violations
from workers.verdict import judge
from workers.virtual import VirtualSession

RIGHT = (OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE)
MESHES = {
    "live": (Mesh(2, 2), Mesh(3, 2), Mesh(2, 3), Mesh(4, 2), Mesh(2, 4)),
    "virtual": (Mesh(2, 2), Mesh(3, 2), Mesh(7, 3), Mesh(16, 4), Mesh(32, 2)),
}
SIZES = (
    ModelSpec(64, 32, 4, 4, 16),
    ModelSpec(401, 12, 4, 3, 5),
    ModelSpec(11, 10, 4, 5, 7),
    ModelSpec(1024, 48, 4, 6, 24),
    ModelSpec(130, 66, 5, 3, 9),
)
SMALL_SIZES = SIZES[1:3]
"""The exact probe's sums stay integers in bfloat16."""
SIZES_FOR_TP = (SIZES[0], SIZES[3])
"""tp=2 divides their heads and their sequence."""
SEEDS = range(10)
DTYPES = tuple(Dtype)
CASES_A_LAUNCH = 40
"""Live cases of one mesh that share one set of processes."""


@dataclass(frozen=True)
class Composition:
    """What a run has besides its mesh and sizes, and where it can run."""

    mesh: Mesh
    settings: Mapping[str, Any]
    worlds: tuple[str, ...] = ("live", "virtual")
    sizes: tuple[ModelSpec, ...] = SIZES[:2]


COMPOSITIONS: Mapping[str, Composition] = MappingProxyType(
    {
        "overlap": Composition(Mesh(2, 2), {"overlap": True, "bucket_size": 500}, ("live",)),
        "overlap, vpp": Composition(Mesh(2, 2, vpp=2), {"overlap": True}, ("live",)),
        "vpp": Composition(Mesh(3, 2, vpp=2), {}),
        "gpipe": Composition(Mesh(2, 3), {"schedule": Schedule.GPIPE}, ("live",)),
        "average": Composition(Mesh(3, 2), {"average_in_collective": True}),
        "num_tokens": Composition(Mesh(3, 2), {"normalization": Normalization.NUM_TOKENS}),
        "num_tokens, vpp": Composition(Mesh(2, 2, vpp=2), {"normalization": Normalization.NUM_TOKENS}),
        "two steps": Composition(Mesh(3, 2), {"steps": 2}, ("live",)),
        "bf16 sums": Composition(Mesh(3, 2), {"grad_reduce_dtype": Dtype.BFLOAT16, "steps": 2}, ("live",), SMALL_SIZES),
        "tp": Composition(Mesh(2, 2, tp=2), {}, ("live",), SIZES_FOR_TP),
    }
)
PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    world: str
    composition: str
    mesh: Mesh
    probe: ProbeName
    dtype: Dtype
    model: ModelSpec
    seed: int

    @property
    def key(self) -> str:
        """All of it as text; `--case` takes this."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_key(cls, key: str) -> Case:
        fields = json.loads(key)
        enums = {"probe": ProbeName(fields["probe"]), "dtype": Dtype(fields["dtype"])}
        return cls(**(fields | enums | {"mesh": Mesh(**fields["mesh"]), "model": ModelSpec(**fields["model"])}))

    def trials(self) -> tuple[TrialSpec, ...]:
        """One a right ordering. An ordering that the composition turns wrong is left out."""
        repeats_the_dtype = self.probe is ProbeName.EXACT and self.dtype is not Dtype.FLOAT32
        settings = {} if self.composition == PLAIN else COMPOSITIONS[self.composition].settings
        asked = ExperimentSpec(
            mesh=self.mesh,
            model=self.model,
            probes=(self.probe,),
            orderings=RIGHT,
            dtype=self.dtype,
            seed=self.seed + len(SEEDS) * repeats_the_dtype,
            **({"steps": 1} | dict(settings)),
        )
        assert not violations(asked), violations(asked)
        return tuple(spec for spec in trials(resolve(asked), Device.CPU) if ordering_of(spec).role is Role.SUBJECT)


def matrix(worlds: Iterable[str], kinds: Iterable[str] = (PLAIN,)) -> Iterator[Case]:
    """Seeds outermost: a limit takes a slice through everything else."""
    for seed, world, kind in product(SEEDS, worlds, kinds):
        for composition, mesh, sizes in rows(world, kind):
            for probe, dtype, model in product(ProbeName, DTYPES, sizes):
                yield Case(world, composition, mesh, probe, dtype, model, seed)


def rows(world: str, kind: str) -> Iterator[tuple[str, Mesh, Sequence[ModelSpec]]]:
    if kind == PLAIN:
        for mesh in MESHES[world]:
            yield PLAIN, mesh, SIZES
    else:
        for name, composition in COMPOSITIONS.items():
            if world in composition.worlds:
                yield name, composition.mesh, composition.sizes


Ran = Callable[[Case, int, list[Reason]], None]
"""Told of each case, the number of its trials, and what was said against it."""


def run_cases(cases: Iterable[Case], ran: Ran) -> None:
    """Run cases one mesh after another, and tell of each."""
    for (world, _), alike in groupby(cases, lambda case: (case.world, case.mesh)):
        while batch := list(islice(alike, CASES_A_LAUNCH)):
            specs = [case.trials() for case in batch]
            together = [spec for of_case in specs for spec in of_case]
            reports = run_live(together) if world == "live" else list(VirtualSession().run(together))
            first = 0
            for case, mine in zip(batch, specs, strict=True):
                ran(case, len(mine), alarms_of(mine, own_reports(reports, first, len(mine)), world == "virtual"))
                first += len(mine)


def run_live(specs: Sequence[TrialSpec]) -> list[StepReport]:
    return [report for reports in run_trials(specs) for report in reports]


def own_reports(reports: Sequence[StepReport], first: int, num_trials: int) -> list[StepReport]:
    """One case's reports, its trials counted from 0."""
    return [
        replace(report, trial_index=index)
        for report in reports
        if 0 <= (index := report.trial_index - first) < num_trials
    ]


def alarms_of(specs: Sequence[TrialSpec], reports: Sequence[StepReport], is_virtual: bool) -> list[Reason]:
    """What a verdict would say against these subjects. That no control ran is no alarm: none was asked for."""
    assert specs
    assert all(ordering_of(spec).role is Role.SUBJECT for spec in specs)
    judgement = judge(specs, reports, is_virtual=is_virtual)
    assert all(summary.compared_elements > 0 for summary in judgement.trials), "nothing was compared"
    return [reason for reason in judgement.reasons if reason.code not in ("no_control", "clean")]


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    done = read_state(options.state)
    asked = [Case.of_key(options.case)] if options.case else list(matrix(options.worlds or MESHES, options.matrix))
    started_s = time.monotonic()

    def left() -> Iterator[Case]:
        for case in asked:
            if time.monotonic() - started_s > options.limit_s:
                return
            if case.key not in done:
                yield case

    def ran(case: Case, num_trials: int, alarms: list[Reason]) -> None:
        done[case.key] = num_trials, len(alarms)
        if options.state:
            with options.state.open("a") as file:
                print(json.dumps([case.key, num_trials, len(alarms)]), file=file)
        if alarms:
            print(f"ALARM --case '{case.key}'", *alarms, sep="\n    ", flush=True)

    run_cases(left(), ran)
    return tell(asked, done)


Done = dict[str, tuple[int, int]]
"""By a case's key, how many trials ran and how many alarms there were."""


def tell(asked: Sequence[Case], done: Done) -> int:
    """Print the numbers; 1 where anything alarmed."""
    counted: dict[tuple[str, str, str], Counter[str]] = {}
    for case in asked:
        row = counted.setdefault((case.world, case.composition, case.probe), Counter())
        num_trials, num_alarms = done.get(case.key, (0, 0))
        row.update(asked=1, ran=int(num_trials > 0), trials=num_trials, alarmed=int(num_alarms > 0))
    columns = ("asked", "ran", "trials", "alarmed")
    table = Table("world", "run", "probe", *columns)
    for labels, row in counted.items():
        table.add_row(*labels, *(str(row[column]) for column in columns))
    together: Counter[str] = sum(counted.values(), Counter())
    table.add_row("together", "", "", *(str(together[column]) for column in columns))
    Console(width=100).print(table)
    return int(together["alarmed"] > 0)


def read_state(state: Path | None) -> Done:
    if state is None or not state.exists():
        return {}
    rows_read = map(json.loads, state.read_text().splitlines())
    return {key: (num_trials, num_alarms) for key, num_trials, num_alarms in rows_read}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", choices=[*MESHES, []])
    parser.add_argument("--matrix", nargs="+", choices=[PLAIN, "composed"], default=[PLAIN, "composed"])
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no case after this long")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--case", help="run this one alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
