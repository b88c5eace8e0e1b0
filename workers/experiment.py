"""What a validation asks of a gang, and the trials that it comes to.

Pure and shared by the service and `torchrun -m workers`. It fills defaults in; `workers.plan` says what is not allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workers.contract import (
    NAMED_MODELS,
    REFERENCE_STACK,
    BatchSpec,
    Device,
    Drill,
    Dtype,
    ForeignOrdering,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    Schedule,
    TrialOrdering,
    TrialSpec,
)
from workers.errors import SpecError


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """What a validation asks of a gang; every field has a default. `batch` None means: chosen by `resolve`."""

    mesh: Mesh = field(default_factory=Mesh)
    model: str | ModelSpec = "tiny"
    batch: BatchSpec | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    overlap: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    normalization: Normalization = Normalization.MICROBATCHES
    probes: tuple[ProbeName, ...] = (ProbeName.EXACT, ProbeName.GPT)
    orderings: tuple[OrderingName, ...] = (OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET)
    steps: int = 2
    repeats: int = 1
    dtype: Dtype = Dtype.FLOAT32
    grad_reduce_dtype: Dtype = Dtype.FLOAT32
    device: Device = Device.AUTO
    seed: int = 0
    drill: Drill | None = None
    stack: str = REFERENCE_STACK
    """Whose stack is put under each probe besides the orderings, which always run on the reference."""


def resolve(spec: ExperimentSpec) -> ExperimentSpec:
    """The same experiment with its defaults filled in; the pipeline needs as many microbatches as it has stages."""
    if spec.batch is not None:
        return spec
    return replace(spec, batch=default_batch(spec.mesh))


def default_batch(mesh: Mesh) -> BatchSpec:
    """What `batch` is where none is asked for."""
    return BatchSpec(micro_batch_size=1, num_microbatches=_microbatches_for(mesh, 2))


def _microbatches_for(mesh: Mesh, least: int) -> int:
    """At least `least`, and as many as the pipeline needs: pp, or a multiple of it where chunks are interleaved."""
    if mesh.vpp > 1 and mesh.pp > 1:
        return -(-least // mesh.pp) * mesh.pp
    return max(least, mesh.pp)


def trials(spec: ExperimentSpec, device: Device) -> tuple[TrialSpec, ...]:
    """The trials in the order in which a gang runs them: by repeat, then probe, then ordering, a foreign
    stack last.

    Repeat r uses seed + r. `device` is what `auto` was resolved to. Raises SpecError for an unknown model.
    """
    spec = resolve(spec)
    return tuple(
        _trial(spec, probe, ordering, repeat, device)
        for repeat in range(spec.repeats)
        for probe in spec.probes
        for ordering in _ways(spec)
    )


def _ways(spec: ExperimentSpec) -> tuple[TrialOrdering, ...]:
    foreign = () if spec.stack == REFERENCE_STACK else (ForeignOrdering.STACK,)
    return (*spec.orderings, *foreign)


def probe_model(spec: ExperimentSpec, probe: ProbeName) -> ModelSpec:
    """The model of a probe: the requested one; with a name, exact keeps its own default."""
    if isinstance(spec.model, ModelSpec):
        return spec.model
    if probe is ProbeName.EXACT:
        return _small_exact_model(spec) if spec.grad_reduce_dtype is Dtype.BFLOAT16 else _exact_model(spec)
    if spec.model not in NAMED_MODELS:
        raise SpecError(f"model {spec.model!r} is unknown; name one of {sorted(NAMED_MODELS)}, or give sizes")
    return NAMED_MODELS[spec.model]


def _exact_model(spec: ExperimentSpec) -> ModelSpec:
    return ModelSpec(vocab_size=64, hidden_size=32, num_layers=max(4, spec.mesh.num_stages), num_heads=4, seq_len=16)


def _small_exact_model(spec: ExperimentSpec) -> ModelSpec:
    """Of so few tokens a step (16, unless the pipeline needs more) that two replicas' sums fit into 8 bits.

    With this hidden size the tied weight starts at a multiple of 3 and of 16, as some layouts assert of dp.
    """
    seq_len = max(1, 16 // probe_batch(spec, ProbeName.EXACT).num_microbatches)
    return ModelSpec(
        vocab_size=16, hidden_size=32, num_layers=max(2, spec.mesh.num_stages), num_heads=4, seq_len=seq_len
    )


def probe_batch(spec: ExperimentSpec, probe: ProbeName) -> BatchSpec:
    """The batch of a probe: the requested one; with a named model, exact keeps its own default."""
    if probe is ProbeName.EXACT and not isinstance(spec.model, ModelSpec):
        least = 2 if spec.grad_reduce_dtype is Dtype.BFLOAT16 else 4
        return BatchSpec(micro_batch_size=1, num_microbatches=_microbatches_for(spec.mesh, least))
    return spec.batch or default_batch(spec.mesh)


def _trial(spec: ExperimentSpec, probe: ProbeName, ordering: TrialOrdering, repeat: int, device: Device) -> TrialSpec:
    return TrialSpec(
        probe=probe,
        ordering=ordering,
        mesh=spec.mesh,
        model=probe_model(spec, probe),
        batch=probe_batch(spec, probe),
        schedule=spec.schedule,
        overlap=spec.overlap,
        bucket_size=spec.bucket_size,
        average_in_collective=spec.average_in_collective,
        normalization=spec.normalization,
        # The exact probe's integers need float32, whatever dtype the gpt is to train in.
        dtype=Dtype.FLOAT32 if probe is ProbeName.EXACT else spec.dtype,
        grad_reduce_dtype=spec.grad_reduce_dtype,
        device=device,
        steps=spec.steps,
        repeat=repeat,
        seed=spec.seed + repeat,
        drill=spec.drill,
        stack=spec.stack if isinstance(ordering, ForeignOrdering) else REFERENCE_STACK,
    )
