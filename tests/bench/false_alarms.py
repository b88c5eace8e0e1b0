"""How often a clean run is called wrong: every right ordering over a matrix of meshes, dtypes, sizes and seeds.

    python tests/bench/false_alarms.py [live|virtual ...] [--limit CASES] [--seconds BUDGET] [--state FILE]

A case is one mesh, probe, dtype, size and seed; it runs fixed, own_bucket and all_reduce, whose every judge must be
silent. Five meshes, two probes, two dtypes, five sizes and ten seeds are 1,000 cases in each world: on real gloo ranks
and on virtual ones. The exact probe is float32 by nature: its second dtype is ten further seeds. With --state finished
cases are kept in a file and not run again. Prints how many ran and how many alarmed; exits with 1 where one did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
from gloo_world import run_trials

from workers.contract import Dtype, Mesh, ModelSpec, OrderingName, ProbeName, Reason, Role, StepReport, TrialSpec
from workers.experiment import Device, ExperimentSpec, default_batch, resolve, trials
from workers.orderings import ORDERINGS
from workers.verdict import judge
from workers.virtual import VirtualSession

SUBJECTS = (OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE)
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
SEEDS = range(10)
DTYPES = tuple(Dtype)
CASES_A_LAUNCH = 20
"""Live cases that share one set of processes."""


@dataclass(frozen=True)
class Case:
    world: str
    mesh: Mesh
    probe: ProbeName
    dtype: Dtype
    model: ModelSpec
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def trials(self) -> tuple[TrialSpec, ...]:
        repeats_the_dtype = self.probe is ProbeName.EXACT and self.dtype is not Dtype.FLOAT32
        spec = ExperimentSpec(
            mesh=self.mesh,
            model=self.model,
            batch=default_batch(self.mesh),
            probes=(self.probe,),
            orderings=SUBJECTS,
            steps=1,
            dtype=self.dtype,
            seed=self.seed + len(SEEDS) * repeats_the_dtype,
        )
        return trials(resolve(spec), Device.CPU)


def matrix(worlds: Iterable[str]) -> Iterator[Case]:
    """Seeds outermost: a limit takes a slice through everything else."""
    for seed, world in product(SEEDS, worlds):
        for mesh, probe, dtype, model in product(MESHES[world], ProbeName, DTYPES, SIZES):
            yield Case(world, mesh, probe, dtype, model, seed)


Alarms = list[tuple[Case, list[Reason]]]


def run_cases(cases: Iterable[Case], ran: Callable[[Case, int], None] = lambda case, alarms: None) -> Alarms:
    """Every case that was called wrong, with the reasons. `ran` is told of each case and its number of alarms."""
    found: Alarms = []
    for (world, _), alike in groupby(cases, lambda case: (case.world, case.mesh)):
        together = list(alike)
        for first in range(0, len(together), CASES_A_LAUNCH):
            batch = together[first : first + CASES_A_LAUNCH]
            specs = [spec for case in batch for spec in case.trials()]
            reports = run_live(specs) if world == "live" else list(VirtualSession().run(specs))
            for case, mine in zip(batch, split(batch, reports), strict=True):
                reasons = alarms_of(case.trials(), mine)
                ran(case, len(reasons))
                if reasons:
                    found.append((case, reasons))
    return found


def run_live(specs: Sequence[TrialSpec]) -> list[StepReport]:
    return [report for reports in run_trials(specs) for report in reports]


def split(cases: Sequence[Case], reports: Sequence[StepReport]) -> Iterator[list[StepReport]]:
    """Each case's reports, counted from its own first trial."""
    for first in range(0, len(cases) * len(SUBJECTS), len(SUBJECTS)):
        yield [
            replace(report, trial_index=index)
            for report in reports
            if 0 <= (index := report.trial_index - first) < len(SUBJECTS)
        ]


def alarms_of(specs: Sequence[TrialSpec], reports: Sequence[StepReport]) -> list[Reason]:
    """What a verdict would say against these subjects. That no control ran is no alarm: none was asked for."""
    assert all(ORDERINGS[spec.ordering].role is Role.SUBJECT for spec in specs)
    judgement = judge(specs, reports)
    summed = sum(summary.compared_elements for summary in judgement.trials)
    assert summed > 0, "nothing was compared"
    return [reason for reason in judgement.reasons if reason.code not in ("no_control", "clean")]


def main() -> int:
    options = parse()
    done = read_state(options.state)
    cases = [case for case in matrix(options.worlds or list(MESHES)) if case.key not in done]
    started_s = time.monotonic()

    def within_budget() -> Iterator[Case]:
        for (_, _), alike in groupby(cases[: options.limit], lambda case: (case.world, case.mesh)):
            if time.monotonic() - started_s > options.seconds:
                return
            yield from alike

    def ran(case: Case, num_alarms: int) -> None:
        done[case.key] = num_alarms
        if options.state:
            with options.state.open("a") as file:
                print(json.dumps([case.key, num_alarms]), file=file)

    torch.set_num_threads(1)
    alarms = run_cases(within_budget(), ran)
    for case, reasons in alarms:
        print(case, *reasons, sep="\n    ")
    return tell(done, options.worlds or list(MESHES))


def tell(done: dict[str, int], worlds: Sequence[str]) -> int:
    """Print the numbers by world and probe; 1 where anything alarmed."""
    ran, alarmed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for case in matrix(worlds):
        if case.key in done:
            ran[case.world, case.probe] += 1
            alarmed[case.world, case.probe] += done[case.key] > 0
    for (world, probe), number in sorted(ran.items()):
        print(
            f"{world:8} {probe:6} {number:5} cases, {number * len(SUBJECTS):5} trials, {alarmed[world, probe]} alarmed"
        )
    print(f"together        {ran.total():5} cases, {ran.total() * len(SUBJECTS):5} trials, {alarmed.total()} alarmed")
    return int(alarmed.total() > 0)


def read_state(state: Path | None) -> dict[str, int]:
    if state is None or not state.exists():
        return {}
    return dict(json.loads(line) for line in state.read_text().splitlines())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", choices=[*MESHES, []])
    parser.add_argument("--limit", type=int, help="cases at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop at the next mesh after this long")
    parser.add_argument("--state", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
