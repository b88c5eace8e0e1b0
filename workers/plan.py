"""What a gang may be formed for: every rule that an experiment can break, checked before any worker starts.

Pure rules shared by the service and `torchrun -m workers`; types are checked by whoever parses. No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from workers.contract import (
    NAMED_MODELS,
    REFERENCE_STACK,
    BatchSpec,
    Device,
    Drill,
    Dtype,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    Schedule,
)
from workers.errors import LayoutAssertionError
from workers.exactness import (
    EXACT_LIMIT,
    UNIT_RATIO,
    WIRE_LIMITS,
    code_digits,
    exact_bound,
    replicas_at_once,
    summed_replicas,
)
from workers.experiment import (
    ExperimentSpec,
    default_batch,
    probe_batch,
    probe_model,
    resolve,
    trials,
)
from workers.faults import FAULTS, FaultName, why_not
from workers.orderings import ORDERINGS
from workers.parameters import stage_parameters
from workers.prediction import ordering_layouts

__all__ = [
    "DEFAULT_LIMITS",
    "ExperimentSpec",
    "FieldPath",
    "Limits",
    "Violation",
    "default_batch",
    "exact_bound",
    "probe_batch",
    "probe_model",
    "resolve",
    "trials",
    "violations",
]

FieldPath = tuple[str | int, ...]
"""Path of a field inside a request, as in ("mesh", "dp")."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest values that are accepted; the service puts its configured ones here."""

    max_world_size: int = 1024
    max_vpp: int = 64
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
    max_activation_elements: int = 2**28
    """Elements of the largest tensor of one microbatch: logits, attention scores or the feed-forward's inside."""
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
    return tuple(found) or (*_size_violations(spec, limits), *_layout_violations(spec), *_exact_violations(spec))


def _mesh_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    mesh = spec.mesh
    yield from _in_range(("mesh", "dp"), mesh.dp, 1, None)
    yield from _in_range(("mesh", "pp"), mesh.pp, 1, None)
    yield from _in_range(("mesh", "vpp"), mesh.vpp, 1, limits.max_vpp)
    yield from _tensor_violations(spec)
    if mesh.vpp > 1 and mesh.pp == 1:
        rule = "chunks are interleaved over pipeline ranks, and pp is 1"
        yield Violation(("mesh", "vpp"), mesh.vpp, rule, "set vpp to 1, or pp to 2 or more")
    if mesh.vpp > 1 and spec.schedule is Schedule.GPIPE:
        rule = f"gpipe runs one chunk a rank and vpp is {mesh.vpp}; only 1f1b is interleaved"
        yield Violation(("schedule",), spec.schedule.value, rule, "set schedule to 1f1b, or vpp to 1")
    if mesh.world_size > limits.max_world_size:
        rule = f"dp x pp x tp may be at most {limits.max_world_size} ranks"
        yield Violation(("mesh",), mesh.world_size, rule, "ask for a smaller mesh, or raise the configured maximum")
    if spec.bucket_size is not None:
        if not spec.overlap:
            rule = "buckets are cut by size only with overlap, which is false"
            yield Violation(("bucket_size",), spec.bucket_size, rule, "set overlap to true, or bucket_size to null")
        yield from _in_range(("bucket_size",), spec.bucket_size, 1, None)


def _tensor_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    """Every width that tensor-parallel ranks share must come out equal; only the vocabulary is padded."""
    tp, path = spec.mesh.tp, ("mesh", "tp")
    yield from _in_range(path, tp, 1, None)
    if tp <= 1:
        return
    known = isinstance(spec.model, ModelSpec) or spec.model in NAMED_MODELS
    models = {probe: probe_model(spec, probe) for probe in spec.probes if known or probe is ProbeName.EXACT}
    for name, width in dict.fromkeys(width for probe, model in models.items() for width in _shared(probe, model)):
        if width % tp:
            rule = f"tensor-parallel ranks share {name}, which is {width}, in equal parts"
            yield Violation(path, tp, rule, f"choose a divisor of {width}, or give a model whose sizes tp divides")


def _shared(probe: ProbeName, model: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "seq_len", model.seq_len
    if probe is ProbeName.GPT:
        yield "num_heads", model.num_heads
    else:
        yield "half of hidden_size (the exact probe's inner width)", model.hidden_size // 2


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
    mesh = spec.mesh
    if mesh.num_stages > model.num_layers >= 1 and mesh.pp >= 1 and mesh.vpp > 1:
        rule = f"each of the pp x vpp = {mesh.num_stages} stages needs a layer and the model has {model.num_layers}"
        remedy = "lower vpp or pp, or give a model with at least pp x vpp layers"
        yield Violation(("mesh", "vpp"), mesh.vpp, rule, remedy)
    elif mesh.pp > model.num_layers >= 1:
        rule = f"every pipeline stage needs a layer and the model has {model.num_layers}"
        yield Violation(("mesh", "pp"), spec.mesh.pp, rule, "lower pp, or give a model with at least pp layers")


def _batch_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    batch = spec.batch
    if batch is None:
        return
    yield from _in_range(("batch", "micro_batch_size"), batch.micro_batch_size, 1, limits.max_micro_batch_size)
    yield from _in_range(("batch", "num_microbatches"), batch.num_microbatches, 1, limits.max_num_microbatches)
    mesh = spec.mesh
    if mesh.vpp > 1 and mesh.pp >= 1 and batch.num_microbatches % mesh.pp:
        rule = f"interleaved 1F1B needs a multiple of pp microbatches, and pp is {mesh.pp}"
        remedy = f"ask for a multiple of {mesh.pp}, or leave batch out"
        yield Violation(("batch", "num_microbatches"), batch.num_microbatches, rule, remedy)
    elif spec.schedule is Schedule.ONE_F_ONE_B and 1 <= batch.num_microbatches < mesh.pp:
        rule = f"1F1B needs at least as many microbatches as pipeline stages, here {mesh.pp}"
        remedy = f"ask for {mesh.pp} or more, or leave batch out"
        yield Violation(("batch", "num_microbatches"), batch.num_microbatches, rule, remedy)


def _choice_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    yield from _distinct("probes", spec.probes)
    yield from _distinct("orderings", spec.orderings)
    yield from _normalization_violations(spec)
    yield from _layernorm_violations(spec)
    yield from _stack_violations(spec)


def _stack_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    """What the protocol does not carry to somebody else's stack yet."""
    if spec.stack == REFERENCE_STACK:
        return
    if spec.mesh.tp > 1:
        rule = f"a foreign stack runs without tensor parallelism yet, and mesh.tp is {spec.mesh.tp}"
        yield Violation(("stack",), spec.stack, rule, "set mesh.tp to 1, or stack to reference")
    if spec.grad_reduce_dtype is not Dtype.FLOAT32:
        rule = f"a foreign stack is judged by sums in float32 yet, and grad_reduce_dtype is {spec.grad_reduce_dtype}"
        yield Violation(("stack",), spec.stack, rule, "set grad_reduce_dtype to float32, or stack to reference")


def _layernorm_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    tp = spec.mesh.tp
    for index, ordering in enumerate(spec.orderings):
        if not ORDERINGS[ordering].mistakes_layernorms:
            continue
        if tp == 1:
            rule = "it goes wrong where layernorm gradients are summed over tensor-parallel ranks, and mesh.tp is 1"
            yield Violation(("orderings", index), ordering.value, rule, "set mesh.tp to 2 or more, or leave it out")
        elif ordering is OrderingName.LAYERNORM_AVERAGED and ProbeName.EXACT in spec.probes and tp & (tp - 1):
            rule = f"the exact probe stays exact only where the mean divides by a power of two, and mesh.tp is {tp}"
            yield Violation(("orderings", index), ordering.value, rule, "leave it out, or run it with gpt alone")


def _normalization_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    by_tokens = spec.normalization is Normalization.NUM_TOKENS
    if by_tokens and spec.average_in_collective:
        rule = "with normalization num_tokens sums are divided by tokens, so that the collective must not average"
        remedy = "set average_in_collective to false, or normalization to microbatches"
        yield Violation(("average_in_collective",), True, rule, remedy)
    if OrderingName.MEAN_OF_MEANS not in spec.orderings:
        return
    path: FieldPath = ("orderings", spec.orderings.index(OrderingName.MEAN_OF_MEANS))
    if not by_tokens:
        rule = "it takes a wrong mean only where tokens are counted, and normalization is microbatches"
        remedy = "set normalization to num_tokens, or leave it out"
        yield Violation(path, OrderingName.MEAN_OF_MEANS.value, rule, remedy)
    if spec.overlap:
        rule = "each rank divides before the sum, which overlap starts before backward has ended"
        yield Violation(path, OrderingName.MEAN_OF_MEANS.value, rule, "set overlap to false, or leave it out")


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
    if drill.fault not in FAULTS:
        yield Violation(("drill", "fault"), drill.fault, f"faults are {', '.join(FAULTS)}", "name one of them")
    else:
        yield from _drill_place_violations(spec, drill)
    yield from _drill_binding_violations(spec, drill)
    yield from _in_range(("drill", "step"), drill.step, 0, max(0, spec.steps - 1))
    if not 0 < drill.probability <= 1:
        rule = "a probability is above 0 and at most 1"
        yield Violation(("drill", "probability"), drill.probability, rule, "ask for 1 to strike every time")


def _drill_place_violations(spec: ExperimentSpec, drill: Drill) -> Iterator[Violation]:
    fault = FAULTS[FaultName(drill.fault)]
    in_mesh = drill.world_rank is not None and 0 <= drill.world_rank < spec.mesh.world_size
    why = why_not(fault, spec.mesh, drill.world_rank if in_mesh else None)
    if why is not None:
        needs_tensor_ranks = fault.in_tensor_group and spec.mesh.tp == 1
        remedy = "set mesh.tp to 2 or more" if needs_tensor_ranks else "ask for another fault, mesh or rank"
        yield Violation(("drill", "fault"), drill.fault, f"it cannot be exercised here: {why}", remedy)
    if fault.name is FaultName.LAYERNORM_SKIPPED and set(spec.orderings) == {OrderingName.LAYERNORM_SKIPPED}:
        rule = f"{fault.name.value} takes a sum from one rank that no rank takes in any of these orderings"
        remedy = "add own_bucket to orderings, or ask for another fault"
        yield Violation(("orderings",), [OrderingName.LAYERNORM_SKIPPED.value], rule, remedy)
    if fault.name is FaultName.TIE_OVER_WRONG_GROUP and drill.node is not None:
        rule = f"{fault.name.value} takes several ranks of different nodes and is bound to one by its world_rank"
        yield Violation(("drill", "node"), drill.node, rule, "give world_rank instead")


def _drill_binding_violations(spec: ExperimentSpec, drill: Drill) -> Iterator[Violation]:
    if drill.world_rank is not None:
        yield from _in_range(("drill", "world_rank"), drill.world_rank, 0, max(0, spec.mesh.world_size - 1))
        if drill.node is not None:
            rule = (
                f"a drill is bound to a rank or to a node, and this one is bound to world_rank {drill.world_rank} too"
            )
            yield Violation(("drill", "node"), drill.node, rule, "leave out world_rank or node")
    elif drill.node is None:
        rule = "a drill is bound to a rank or to a node"
        yield Violation(("drill", "world_rank"), None, rule, "give world_rank or node")


def _size_violations(spec: ExperimentSpec, limits: Limits) -> Iterator[Violation]:
    """What a rank would have to hold."""
    for probe in spec.probes:
        held = max(_held_elements(spec, probe, pp_rank) for pp_rank in _outer_ranks(spec.mesh))
        if held > limits.max_stage_elements:
            rule = (
                f"a rank may hold at most {limits.max_stage_elements} parameter elements and {probe.value} needs {held}"
            )
            yield Violation(("model",), _shown(spec.model), rule, "use a smaller model, or a larger pp")
        largest = _largest_activation(probe_model(spec, probe), probe_batch(spec, probe))
        if largest > limits.max_activation_elements:
            allowed = limits.max_activation_elements
            rule = f"a microbatch's largest tensor may have {allowed} elements and {probe.value}'s has {largest}"
            yield Violation(("model",), _shown(spec.model), rule, "lower micro_batch_size, seq_len or vocab_size")


def _shown(model: str | ModelSpec) -> object:
    return model if isinstance(model, str) else asdict(model)


def _largest_activation(model: ModelSpec, batch: BatchSpec) -> int:
    per_token = max(model.vocab_size, 4 * model.hidden_size, model.num_heads * model.seq_len)
    return batch.micro_batch_size * model.seq_len * per_token


def _layout_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    """Orderings whose modelled Megatron version would stop on this mesh with an assertion of its own."""
    for trial in trials(replace(spec, repeats=1), Device.CPU):
        try:
            ordering_layouts(trial)
        except LayoutAssertionError as error:
            path = ("orderings", spec.orderings.index(trial.ordering))
            rule = f"with the {trial.probe.value} probe's model, {error}"
            yield Violation(path, trial.ordering.value, rule, "leave this ordering out, or change dp or the sizes")


def _exact_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    if ProbeName.EXACT not in spec.probes:
        return
    replicas = summed_replicas(spec.mesh.dp, spec.average_in_collective, spec.normalization)
    bound = exact_bound(probe_model(spec, ProbeName.EXACT), probe_batch(spec, ProbeName.EXACT), replicas)
    if bound > EXACT_LIMIT:
        path = ("probes", spec.probes.index(ProbeName.EXACT))
        rule = f"its sums could reach {bound}, above {EXACT_LIMIT}, where float32 stops being exact"
        yield Violation(path, ProbeName.EXACT.value, rule, "use fewer tokens a step, fewer layers or a smaller dp")
    elif spec.grad_reduce_dtype is not Dtype.FLOAT32:
        yield from _exact_wire_violations(spec)


def _exact_wire_violations(spec: ExperimentSpec) -> Iterator[Violation]:
    """Integers that one replica's terms outgrow, units that differ, or replicas whose turn would never come."""
    dtype, dp = spec.grad_reduce_dtype, spec.mesh.dp
    trial = trials(replace(spec, repeats=1, probes=(ProbeName.EXACT,)), Device.CPU)[0]
    limit, bound = WIRE_LIMITS[dtype], exact_bound(trial.model, trial.batch, 1)
    at_once = replicas_at_once(trial.model, trial.batch, dp, dtype)
    if at_once * bound > limit or at_once < min(dp, 2):
        rule = f"{dtype.value} sums are exact up to {limit} and the exact probe's could reach {min(dp, 2) * bound}"
        remedy = "name a model, use fewer tokens a step or layers, leave exact out, or set grad_reduce_dtype to float32"
        yield Violation(("grad_reduce_dtype",), dtype.value, rule, remedy)
    elif OrderingName.MEAN_OF_MEANS in spec.orderings and at_once * bound * UNIT_RATIO > limit:
        path = ("orderings", spec.orderings.index(OrderingName.MEAN_OF_MEANS))
        rule = f"ranks divide by their own tokens before sums that are exact up to {limit} only, in {dtype.value}"
        remedy = "leave it out, leave exact out, or set grad_reduce_dtype to float32"
        yield Violation(path, OrderingName.MEAN_OF_MEANS.value, rule, remedy)
    elif at_once * spec.steps < dp and not code_digits(trial):
        rule = f"in {dtype.value} the exact probe's {dp} replicas take turns, {at_once} a step, and all must have one"
        yield Violation(("steps",), spec.steps, rule, f"ask for {-(-dp // at_once)} steps or more")


def _held_elements(spec: ExperimentSpec, probe: ProbeName, pp_rank: int) -> int:
    model = probe_model(spec, probe)
    chunks = (stage_parameters(probe, model, spec.mesh, stage) for stage in spec.mesh.stages(pp_rank))
    return sum(parameter.numel for chunk in chunks for parameter in chunk)


def _outer_ranks(mesh: Mesh) -> Iterable[int]:
    """The ends hold the embedding and the first holds the most layers, so that one of them is the largest."""
    return {0, mesh.pp - 1}


def _in_range(path: FieldPath, value: int, least: int, most: int | None) -> Iterator[Violation]:
    if value < least:
        yield Violation(path, value, f"the least value allowed is {least}", f"ask for {least} or more")
    elif most is not None and value > most:
        yield Violation(path, value, f"the largest value allowed is {most}", f"ask for {most} or less")
