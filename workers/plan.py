"""From an experiment as it is asked for to the trials that a gang runs, once it breaks no rule.

Pure rules shared by the service and `torchrun -m workers`; types are checked by whoever parses. No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from workers.contract import (
    NAMED_MODELS,
    BatchSpec,
    Device,
    Drill,
    Dtype,
    Mesh,
    ModelSpec,
    OrderingName,
    ProbeName,
    Schedule,
    TrialSpec,
)
from workers.errors import LayoutAssertionError, SpecError
from workers.parameters import stage_parameters
from workers.prediction import ordering_layouts

DRILL_FAULTS = tuple(f"{how}_{moment}_collective" for how in ("raise", "kill") for moment in ("before", "in", "after"))
"""Names of `workers.faults`, repeated here because a plan must not load torch."""

FieldPath = tuple[str | int, ...]
"""Path of a field inside a request, as in ("mesh", "dp")."""


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """What a validation asks of a gang; every field has a default. `batch` None means: chosen by `resolve`."""

    mesh: Mesh = field(default_factory=Mesh)
    model: str | ModelSpec = "tiny"
    batch: BatchSpec | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    overlap: bool = False
    bucket_size: int | None = None
    probes: tuple[ProbeName, ...] = (ProbeName.EXACT, ProbeName.GPT)
    orderings: tuple[OrderingName, ...] = (OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET)
    steps: int = 2
    repeats: int = 1
    dtype: Dtype = Dtype.FLOAT32
    device: Device = Device.AUTO
    seed: int = 0
    drill: Drill | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest values that are accepted; the service puts its configured ones here."""

    max_world_size: int = 1024
    max_dp: int = 1024
    max_pp: int = 128
    max_steps: int = 100
    max_repeats: int = 100
    max_steps_x_repeats: int = 100
    max_vocab_size: int = 262_144
    max_hidden_size: int = 16_384
    max_num_layers: int = 1_024
    max_num_heads: int = 1_024
    max_seq_len: int = 8_192
    max_micro_batch_size: int = 256
    max_num_microbatches: int = 4_096
    max_stage_elements: int = 2**28
    """Elements of one rank's parameters; each costs about 20 bytes there (weight, main_grad, Adam, statistics)."""
    max_seed: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of an experiment that breaks a rule, and what to do about it."""

    field: FieldPath
    value: object
    rule: str
    remedy: str

    @property
    def message(self) -> str:
        """Field, value, rule and remedy in one sentence."""
        path = ".".join(str(part) for part in self.field)
        return f"{path} is {self.value!r}; {self.rule}; {self.remedy}"


DEFAULT_LIMITS = Limits()


def resolve(spec: ExperimentSpec) -> ExperimentSpec:
    """The same experiment with its defaults filled in; the pipeline needs as many microbatches as it has stages."""
    if spec.batch is not None:
        return spec
    return replace(spec, batch=default_batch(spec.mesh))


def default_batch(mesh: Mesh) -> BatchSpec:
    """What `batch` is where none is asked for."""
    return BatchSpec(micro_batch_size=1, num_microbatches=max(2, mesh.pp))


def trials(spec: ExperimentSpec, device: Device) -> tuple[TrialSpec, ...]:
    """The trials in the order in which a gang runs them: by repeat, then probe, then ordering.

    Repeat r uses seed + r. `device` is what `auto` was resolved to. Raises SpecError for an unknown model.
    """
    spec = resolve(spec)
    return tuple(
        _trial(spec, probe, ordering, repeat, device)
        for repeat in range(spec.repeats)
        for probe in spec.probes
        for ordering in spec.orderings
    )


def probe_model(spec: ExperimentSpec, probe: ProbeName) -> ModelSpec:
    """The model of a probe: the requested one; with a name, exact keeps its own default."""
    if isinstance(spec.model, ModelSpec):
        return spec.model
    if probe is ProbeName.EXACT:
        return ModelSpec(vocab_size=64, hidden_size=32, num_layers=max(4, spec.mesh.pp), num_heads=4, seq_len=16)
    if spec.model not in NAMED_MODELS:
        raise SpecError(f"model {spec.model!r} is unknown; name one of {sorted(NAMED_MODELS)}, or give sizes")
    return NAMED_MODELS[spec.model]


def probe_batch(spec: ExperimentSpec, probe: ProbeName) -> BatchSpec:
    """The batch of a probe: the requested one; with a named model, exact keeps its own default."""
    if probe is ProbeName.EXACT and not isinstance(spec.model, ModelSpec):
        return BatchSpec(micro_batch_size=1, num_microbatches=max(4, spec.mesh.pp))
    return spec.batch or default_batch(spec.mesh)


def violations(spec: ExperimentSpec, limits: Limits = DEFAULT_LIMITS) -> tuple[Violation, ...]:
    """Every rule that the experiment breaks; empty when a gang may be formed for it."""
    found = [
        *_mesh_violations(spec, limits),
        *_model_violations(spec, limits),
        *_batch_violations(spec, limits),
        *_choice_violations(spec),
        *_run_violations(spec, limits),
        *_drill_violations(spec),
    ]
    # Layouts can be computed only once every size is in range.
    return tuple(found) or (*_size_violations(spec, limits), *_layout_violations(spec))


def _trial(spec: ExperimentSpec, probe: ProbeName, ordering: OrderingName, repeat: int, device: Device) -> TrialSpec:
    return TrialSpec(
        probe=probe,
        ordering=ordering,
        mesh=spec.mesh,
        model=probe_model(spec, probe),
        batch=probe_batch(spec, probe),
        schedule=spec.schedule,
        # The exact probe's integers need float32, whatever dtype the gpt is to train in.
        dtype=Dtype.FLOAT32 if probe is ProbeName.EXACT else spec.dtype,
        device=device,
        steps=spec.steps,
        repeat=repeat,
        seed=spec.seed + repeat,
        drill=spec.drill,
    )


def _mesh_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    mesh = spec.mesh
    yield from _in_range(("mesh", "dp"), mesh.dp, 1, limits.max_dp)
    yield from _in_range(("mesh", "pp"), mesh.pp, 1, limits.max_pp)
    for name, size in (("tp", mesh.tp), ("vpp", mesh.vpp)):
        if size != 1:
            yield Violation(("mesh", name), size, f"{name} other than 1 is not supported yet", f"set {name} to 1")
    if mesh.world_size > limits.max_world_size:
        rule = f"dp x pp x tp may be at most {limits.max_world_size} ranks"
        yield Violation(("mesh",), mesh.world_size, rule, "ask for a smaller mesh, or raise the configured maximum")
    if spec.overlap:
        yield Violation(
            ("overlap",), True, "overlapping the gradient sync is not supported yet", "set overlap to false"
        )
    if spec.bucket_size is not None:
        rule = "buckets are cut by size only with overlap, which is not supported yet"
        yield Violation(("bucket_size",), spec.bucket_size, rule, "set bucket_size to null")


def _model_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    model = spec.model
    if isinstance(model, str):
        yield from _named_model_violations(spec, model)
        return
    yield from _in_range(("model", "vocab_size"), model.vocab_size, 2, limits.max_vocab_size)
    yield from _in_range(("model", "hidden_size"), model.hidden_size, 2, limits.max_hidden_size)
    yield from _in_range(("model", "num_layers"), model.num_layers, 1, limits.max_num_layers)
    yield from _in_range(("model", "num_heads"), model.num_heads, 1, limits.max_num_heads)
    yield from _in_range(("model", "seq_len"), model.seq_len, 1, limits.max_seq_len)
    if model.num_heads >= 1 and model.hidden_size % model.num_heads:
        rule = f"num_heads must divide hidden_size, which is {model.hidden_size}"
        yield Violation(("model", "num_heads"), model.num_heads, rule, "choose a divisor of hidden_size")
    yield from _stages_have_layers(spec, model)


def _named_model_violations(spec: ExperimentSpec, name: str) -> Iterator[Violation]:
    if name not in NAMED_MODELS:
        rule = f"the known models are {', '.join(sorted(NAMED_MODELS))}"
        yield Violation(("model",), name, rule, "name one of them, or give an object of sizes")
    elif ProbeName.GPT in spec.probes:
        yield from _stages_have_layers(spec, NAMED_MODELS[name])


def _stages_have_layers(spec: ExperimentSpec, model: ModelSpec) -> Iterator[Violation]:
    if spec.mesh.pp > model.num_layers >= 1:
        rule = f"every pipeline stage needs a layer and the model has {model.num_layers}"
        yield Violation(("mesh", "pp"), spec.mesh.pp, rule, "lower pp, or give a model with at least pp layers")


def _batch_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    batch = spec.batch
    if batch is None:
        return
    yield from _in_range(("batch", "micro_batch_size"), batch.micro_batch_size, 1, limits.max_micro_batch_size)
    yield from _in_range(("batch", "num_microbatches"), batch.num_microbatches, 1, limits.max_num_microbatches)
    if 1 <= batch.num_microbatches < spec.mesh.pp:
        rule = f"1F1B needs at least as many microbatches as pipeline stages, here {spec.mesh.pp}"
        remedy = f"ask for {spec.mesh.pp} or more, or leave batch out"
        yield Violation(("batch", "num_microbatches"), batch.num_microbatches, rule, remedy)


def _choice_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    yield from _distinct("probes", spec.probes)
    yield from _distinct("orderings", spec.orderings)


def _distinct(name: str, chosen: tuple[str, ...]) -> Iterator[Violation]:
    if not chosen:
        yield Violation((name,), [], f"at least one of {name} must run", "leave the field out for the default")
    for index, value in enumerate(chosen):
        if value in chosen[:index]:
            yield Violation((name, index), str(value), f"each of {name} runs once", "use `repeats` to run more often")


def _run_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    yield from _in_range(("steps",), spec.steps, 1, limits.max_steps)
    yield from _in_range(("repeats",), spec.repeats, 1, limits.max_repeats)
    yield from _in_range(("seed",), spec.seed, 0, limits.max_seed)
    if spec.steps >= 1 and spec.repeats >= 1 and spec.steps * spec.repeats > limits.max_steps_x_repeats:
        rule = f"steps x repeats may be at most {limits.max_steps_x_repeats} and is {spec.steps * spec.repeats}"
        yield Violation(("repeats",), spec.repeats, rule, "ask for fewer steps or repeats")


def _drill_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    drill = spec.drill
    if drill is None:
        return
    if drill.fault not in DRILL_FAULTS:
        yield Violation(("drill", "fault"), drill.fault, f"faults are {', '.join(DRILL_FAULTS)}", "name one of them")
    yield from _in_range(("drill", "world_rank"), drill.world_rank, 0, max(0, spec.mesh.world_size - 1))
    yield from _in_range(("drill", "step"), drill.step, 0, max(0, spec.steps - 1))


def _size_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    """What a rank would have to hold."""
    if not isinstance(spec.model, ModelSpec):
        return
    largest = max(
        _stage_elements(spec, probe, pp_rank) for probe in spec.probes for pp_rank in _outer_stages(spec.mesh)
    )
    if largest > limits.max_stage_elements:
        rule = f"a rank may hold at most {limits.max_stage_elements} parameter elements and one would hold {largest}"
        yield Violation(("model",), largest, rule, "use a smaller model, or a larger pp")


def _layout_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    """Orderings whose modelled Megatron version would stop on this mesh with an assertion of its own."""
    for trial in trials(replace(spec, repeats=1), Device.CPU):
        try:
            ordering_layouts(trial)
        except LayoutAssertionError as error:
            path = ("orderings", spec.orderings.index(trial.ordering))
            rule = f"with the {trial.probe.value} probe's model, {error}"
            yield Violation(path, trial.ordering.value, rule, "leave this ordering out, or change dp or the sizes")


def _stage_elements(spec: ExperimentSpec, probe: ProbeName, pp_rank: int) -> int:
    return sum(p.numel for p in stage_parameters(probe, probe_model(spec, probe), spec.mesh, pp_rank))


def _outer_stages(mesh: Mesh) -> Iterable[int]:
    """The ends hold the embedding and the first holds the most layers, so that one of them is the largest."""
    return {0, mesh.pp - 1}


def _in_range(path: FieldPath, value: int, least: int, most: int) -> Iterator[Violation]:
    if value < least:
        yield Violation(path, value, f"the least value allowed is {least}", f"ask for {least} or more")
    elif value > most:
        yield Violation(path, value, f"the largest value allowed is {most}", f"ask for {most} or less")
