"""Does this build of the instrument see every fault of its catalogue, and name who, where and when?

Injects each fault on a real gang of local processes, for each rank in turn, and holds the verdict's reasons against
the attribution that the catalogue promises. Judges the judges; says nothing about a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from workers.contract import (
    Device,
    Drill,
    Judgement,
    JudgeName,
    Mesh,
    ModelSpec,
    OrderingName,
    ProbeName,
    RankPhase,
    Reason,
    StepReport,
    TrialSpec,
    Verdict,
)
from workers.errors import CollectiveMismatchError
from workers.experiment import ExperimentSpec, trials
from workers.faults import FAULTS, Fault, FaultName, Outcome, Place, is_struck, why_not
from workers.local_gang import LocalGang
from workers.local_gang import Outcome as GangOutcome
from workers.parameters import is_sequence_parallel, is_tied
from workers.session import first_cause
from workers.verdict import judge

RARE = (FaultName.BIT_IN_GRADIENT, FaultName.BIT_IN_WEIGHT, FaultName.BIT_IN_RECEIVE_BUFFER)
"""Faults that are also injected by chance, as a marginal device would have them."""
RARE_PROBABILITY, RARE_REPEATS = 0.3, 10
_PLACES = {
    Place.TIED: "the tied weight",
    Place.LAYERNORM: "a layernorm",
    Place.ONE: "one parameter",
    Place.MANY: None,
}
ORDERINGS = (OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET)
NUM_NODES = 2
TENSOR_MESH = Mesh(2, 1, 2)
"""Where faults of tensor-parallel ranks are injected when the self-test's own mesh has none."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """One fault on one rank."""

    fault: Fault
    world_rank: int
    probability: float = 1.0
    overlap: bool = False
    """The data-parallel sync starts during backward."""
    elsewhere: Mesh | None = None
    """Its mesh, where that is not the self-test's own."""

    @property
    def title(self) -> str:
        """How tables name it."""
        by_chance = "" if self.probability == 1 else f" p={self.probability} x{RARE_REPEATS}"
        mesh = self.elsewhere
        return f"{self.fault.name.value}{by_chance}" + (f" on {mesh.dp}x{mesh.pp}x{mesh.tp}" if mesh else "")

    def trials(self, mesh: Mesh) -> tuple[TrialSpec, ...]:
        """What the gang is to run."""
        drill = Drill(self.fault.name, self.world_rank, probability=self.probability)
        if self.fault.name is FaultName.COLLECTIVES_REORDERED:
            return trials(_of_twin_buckets(mesh, drill), Device.CPU)
        is_rare = self.probability < 1
        orderings, repeats = (ORDERINGS[-1:], RARE_REPEATS) if is_rare else (ORDERINGS, 1)
        spec = ExperimentSpec(mesh=mesh, orderings=orderings, steps=1, repeats=repeats, drill=drill)
        return trials(replace(spec, overlap=self.overlap), Device.CPU)


def _of_twin_buckets(mesh: Mesh, drill: Drill) -> ExperimentSpec:
    """On both end stages the tied weight's bucket is padded to the size of the other one, which it can be taken for."""
    model = ModelSpec(vocab_size=17, hidden_size=32, num_layers=mesh.num_stages, num_heads=4, seq_len=16)
    exact, own_bucket = (ProbeName.EXACT,), (OrderingName.OWN_BUCKET,)
    return ExperimentSpec(mesh=mesh, model=model, probes=exact, orderings=own_bucket, steps=1, drill=drill)


@dataclass(frozen=True, slots=True)
class Attribution:
    """Who found a fault, and where they say it is; None where several or nothing can be named."""

    judges: tuple[JudgeName, ...]
    world_rank: int | None
    node: str | None
    parameter: str | None
    phase: RankPhase | None


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one exercise, beside what had to."""

    title: str
    world_rank: int
    outcome: str
    """A verdict, or `error`, or why the fault cannot be exercised."""
    found: Attribution
    expected_outcome: Outcome
    expected: Attribution
    mismatches: tuple[str, ...]
    """What is not as expected, in words; empty where all is."""
    is_exercised: bool = True
    reported: str = ""
    """Observations about other ranks' settings or slowness, in words."""
    reported_as: str | None = None
    """The code of the observation that is expected."""

    @property
    def ok(self) -> bool:
        """Whether all is as expected."""
        return not self.mismatches


def place_nodes(mesh: Mesh) -> tuple[str, ...]:
    """Made-up nodes for a mesh's ranks, by world rank, so that naming one can be shown on one machine."""
    return tuple(f"node-{world_rank * NUM_NODES // mesh.world_size}" for world_rank in range(mesh.world_size))


def exercises(faults: Sequence[FaultName], world_ranks: Sequence[int]) -> Iterator[Exercise]:
    """Every fault on every rank, those by chance after those that strike each time."""
    for name in faults:
        yield from (Exercise(FAULTS[name], world_rank) for world_rank in world_ranks)
        if name in RARE:
            yield from (Exercise(FAULTS[name], world_rank, RARE_PROBABILITY) for world_rank in world_ranks)


def exercises_elsewhere(mesh: Mesh, faults: Sequence[FaultName], world_ranks: Sequence[int]) -> list[Exercise]:
    """Those faults that `mesh` has no tensor-parallel ranks for, on `TENSOR_MESH`: on its ranks of the same numbers.

    On all of its ranks where it has none of them.
    """
    if mesh.tp > 1:
        return []
    there = range(TENSOR_MESH.world_size)
    ranks = [world_rank for world_rank in world_ranks if world_rank in there] or there
    needing = [FAULTS[name] for name in faults if FAULTS[name].in_tensor_group]
    return [Exercise(fault, world_rank, elsewhere=TENSOR_MESH) for fault in needing for world_rank in ranks]


def run_selftest(
    mesh: Mesh,
    faults: Sequence[FaultName],
    world_ranks: Sequence[int],
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """Run everything on a gang of this machine; one finding an exercise, in order. Raises nothing for a fault."""
    elsewhere = exercises_elsewhere(mesh, faults, world_ranks)
    moved = {exercise.fault.name for exercise in elsewhere}
    here = list(exercises([name for name in faults if name not in moved], world_ranks))
    return [
        *run_exercises(mesh, here, on_finding),
        *run_exercises(TENSOR_MESH, elsewhere, on_finding),
    ]


def run_exercises(
    mesh: Mesh, chosen: Sequence[Exercise], on_finding: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Run some exercises on one gang, whose ranks start with the first that there is something to run of."""
    nodes = place_nodes(mesh)
    findings = []
    with LocalGang(nodes) as gang:
        for exercise in chosen:
            finding = _exercise(gang, mesh, nodes, exercise)
            on_finding(finding)
            findings.append(finding)
    return findings


def _exercise(gang: LocalGang, mesh: Mesh, nodes: Sequence[str], exercise: Exercise) -> Finding:
    expected = expected_attribution(exercise, nodes)
    if why := why_not(exercise.fault, mesh, exercise.world_rank):
        nothing = Attribution((), None, None, None, None)
        outcome = exercise.fault.outcome
        return Finding(exercise.title, exercise.world_rank, why, nothing, outcome, expected, (), is_exercised=False)
    specs = exercise.trials(mesh)
    expected = replace(expected, judges=_judges_due(exercise, expected, specs, nodes))
    return conclude(exercise, expected, gang.run(specs), specs, nodes)


def _judges_due(
    exercise: Exercise, expected: Attribution, specs: Sequence[TrialSpec], nodes: Sequence[str]
) -> tuple[JudgeName, ...]:
    """The expected judges, without those whose probe chance has spared on every repeat."""
    struck = {spec.probe for spec in specs if is_struck(spec, exercise.world_rank, nodes[exercise.world_rank])}
    own_probe = {JudgeName.EXACT: ProbeName.EXACT, JudgeName.SYNC: ProbeName.GPT}
    return tuple(judge for judge in expected.judges if judge not in own_probe or own_probe[judge] in struck)


def expected_attribution(exercise: Exercise, nodes: Sequence[str]) -> Attribution:
    """What the catalogue promises of an exercise. `parameter` is a name of a place here, not of one parameter."""
    fault = exercise.fault
    named = exercise.world_rank if fault.names_rank and fault.outcome is not Outcome.HARMLESS else None
    parameter = _PLACES[fault.place]
    node = None if named is None else nodes[named]
    return Attribution(tuple(sorted(fault.judges)), named, node, parameter, fault.phase)


def conclude(
    exercise: Exercise, expected: Attribution, said: GangOutcome, specs: Sequence[TrialSpec], nodes: Sequence[str]
) -> Finding:
    """Hold what a gang said of an exercise against what is expected of it. Pure."""
    reported = ""
    if said.failures or said.absent:
        outcome, found = "error", _of_error(said, nodes)
        mismatches = list(_error_mismatches(exercise, said))
    else:
        judgement = judge(specs, said.reports, dict(enumerate(nodes)))
        outcome, found = judgement.verdict.value, attribution_of(judgement.reasons)
        mismatches = list(_verdict_mismatches(exercise, judgement, said.reports))
        told = {(each.code, each.world_rank) for each in judgement.observations}
        reported = ", ".join(f"{code} {world_rank}" for code, world_rank in sorted(told, key=str))
    mismatches += _place_mismatches(exercise.fault, expected, found)
    fault = exercise.fault
    return Finding(
        title=exercise.title,
        world_rank=exercise.world_rank,
        outcome=outcome,
        found=found,
        expected_outcome=fault.outcome,
        expected=expected,
        mismatches=tuple(mismatches),
        reported=reported if fault.reported_as else "",
        reported_as=fault.reported_as,
    )


def attribution_of(reasons: Sequence[Reason]) -> Attribution:
    """What a verdict's reasons say together; where they name different ones, nothing is named."""
    accusing = [reason for reason in reasons if reason.judge is not None]
    judges = tuple(sorted({reason.judge for reason in accusing if reason.judge is not None}))
    ranks, nodes = {reason.world_rank for reason in accusing}, {reason.node for reason in accusing}
    phases = {reason.phase for reason in accusing}
    # The probes' models differ, and so do the parameters that a fault strikes in them.
    parameters = list(dict.fromkeys(reason.parameter for reason in accusing))
    return Attribution(
        judges,
        ranks.pop() if len(ranks) == 1 else None,
        nodes.pop() if len(nodes) == 1 else None,
        None if None in parameters else ", ".join(filter(None, parameters)) or None,
        phases.pop() if len(phases) == 1 else None,
    )


def _of_error(said: GangOutcome, nodes: Sequence[str]) -> Attribution:
    """A rank that broke by itself; else one that is gone, in the phase in which another noticed."""
    cause = first_cause(said.failures)
    if cause is not None and not (said.absent and cause.collateral):
        return Attribution((), cause.world_rank, cause.node, None, cause.phase)
    lost = said.absent[0]
    return Attribution((), lost, nodes[lost], None, cause.phase if cause else None)


def _error_mismatches(exercise: Exercise, said: GangOutcome) -> Iterator[str]:
    fault = exercise.fault
    if fault.outcome is not Outcome.ERROR:
        yield f"the gang broke: {said.failures[:1]}"
    elif fault.differs_in is not None:
        cause = first_cause(said.failures)
        code, message = (cause.code, cause.message) if cause else ("", "")
        if code != CollectiveMismatchError.code:
            yield f"the error is {code or 'that nobody spoke'}, not {CollectiveMismatchError.code}"
        for told in (f"world_rank {exercise.world_rank} is about", f"{fault.differs_in} differs"):
            if told not in message:
                yield f"the error does not say that {told}: {message}"


def _verdict_mismatches(exercise: Exercise, judgement: Judgement, reports: Sequence[StepReport]) -> Iterator[str]:
    fault = exercise.fault
    if not any(report.drill_struck for report in reports):
        yield "it never struck"
    failed = judgement.verdict is Verdict.FAIL
    if fault.outcome is Outcome.ERROR:
        yield f"no rank broke, and the verdict is {judgement.verdict.value}"
    elif failed is not (fault.outcome is Outcome.FAIL):
        yield f"the verdict is {judgement.verdict.value}"
    if fault.reported_as is not None:
        named = {each.world_rank for each in judgement.observations if each.code == fault.reported_as}
        if named != {exercise.world_rank}:
            yield f"{fault.reported_as} names {sorted(map(str, named)) or 'nobody'}"


def _place_mismatches(fault: Fault, expected: Attribution, found: Attribution) -> Iterator[str]:
    if missed := sorted(set(expected.judges) - set(found.judges)):
        yield f"not seen by {', '.join(missed)}"
    if fault.outcome is Outcome.HARMLESS:
        return
    for what in ("world_rank", "node", "phase") if expected.phase else ("world_rank", "node"):
        if getattr(found, what) != getattr(expected, what) and not (what == "node" and expected.world_rank is None):
            yield f"{what} is {getattr(found, what)}"
    if not _is_in(fault.place, found.parameter):
        yield f"parameter is {found.parameter}"


def _is_in(place: Place, parameter: str | None) -> bool:
    if place is Place.MANY:
        return True
    names = parameter.split(", ") if parameter else []
    if place is Place.ONE:
        return bool(names)
    fits = is_sequence_parallel if place is Place.LAYERNORM else is_tied
    return bool(names) and all(map(fits, names))
