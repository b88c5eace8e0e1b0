"""What requests may hold: strict models whose defaults are the documented ones, and their way into a plan.

Types, names and shapes are refused here; sizes that no worker could run are refused by `workers.plan`, whose
rules torchrun shares. Must not import torch or ray, and must not read the database.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from workers.contract import (
    REFERENCE_STACK,
    TINY,
    Device,
    Drill,
    Dtype,
    Launcher,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    Schedule,
)
from workers.faults import FAULTS
from workers.plan import ExperimentSpec, resolve

NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
LABEL_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$"
MAX_NODES = 65536
MAX_DEADLINE_S = 24 * 3600
MAX_LABELS = 32

ClusterName = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
StackName = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
NodeName = Annotated[str, Field(min_length=1, max_length=253)]
LabelName = Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL_PATTERN)]
LabelValue = Annotated[str, Field(max_length=256)]


class Strict(BaseModel):
    """No coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class MeshRequest(Strict):
    """dp x pp x tp ranks, vpp model chunks a rank."""

    dp: int = Field(default=2, json_schema_extra={"minimum": 1})
    """Data-parallel replicas."""
    pp: int = Field(default=2, json_schema_extra={"minimum": 1})
    """Pipeline ranks."""
    tp: int = Field(default=1, json_schema_extra={"minimum": 1})
    """Tensor-parallel ranks, with sequence parallelism. Must divide the model's heads, sequence and inner widths."""
    vpp: int = Field(default=1, json_schema_extra={"minimum": 1})
    """Model chunks a rank; with 2 or more, 1F1B is interleaved. Needs pp >= 2 and pp x vpp layers."""

    def spec(self) -> Mesh:
        """The same mesh for a plan."""
        return Mesh(**self.model_dump())


class ModelSizes(Strict):
    """A model by its sizes; what is left out is that of `tiny`. The feed-forward width is 4 x hidden_size."""

    vocab_size: int = Field(default=TINY.vocab_size, json_schema_extra={"minimum": 1})
    hidden_size: int = Field(default=TINY.hidden_size, json_schema_extra={"minimum": 1})
    num_layers: int = Field(default=TINY.num_layers, json_schema_extra={"minimum": 1})
    num_heads: int = Field(default=TINY.num_heads, json_schema_extra={"minimum": 1})
    """Must divide hidden_size."""
    seq_len: int = Field(default=TINY.seq_len, json_schema_extra={"minimum": 1})

    def spec(self) -> ModelSpec:
        """The same sizes for a plan."""
        return ModelSpec(**self.model_dump())


def _model_kind(value: Any) -> str:
    return "~name" if isinstance(value, str) else "~sizes"


ModelChoice = Annotated[
    Annotated[str, Field(max_length=64), Tag("~name")] | Annotated[ModelSizes, Tag("~sizes")],
    Discriminator(_model_kind),
]


class BatchRequest(Strict):
    """Sequences a microbatch and microbatches a step, for each data-parallel replica."""

    micro_batch_size: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    num_microbatches: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """At least pp for 1F1B; a multiple of pp where vpp > 1."""


class PlacementRequest(Strict):
    """Where ranks go."""

    nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """How many nodes to spread over; null leaves it to the strategy."""
    exclude: list[NodeName] = Field(default_factory=list, max_length=1024)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    devices_per_node: int | None = Field(default=None, ge=1, le=1024)


class DrillRequest(Strict):
    """A fault injected on purpose; a validation with one never counts for admission."""

    fault: str = Field(max_length=64, json_schema_extra={"enum": list(FAULTS)})
    world_rank: int | None = Field(default=None, json_schema_extra={"minimum": 0})
    """The rank that is struck; 0 where neither this nor `node` is given."""
    step: int = Field(default=0, json_schema_extra={"minimum": 0})
    """In which step of every trial."""
    node: NodeName | None = None
    """Strike every rank on this node instead, wherever ranks are placed. Named as in `fingerprint`."""
    probability: float = Field(default=1.0, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    """Of a strike on one rank in one trial; drawn from the seed, so that the same request strikes alike."""

    def spec(self) -> Drill:
        """The same drill for a plan, bound to something."""
        unbound = self.world_rank is None and self.node is None
        return Drill(**self.model_dump() | ({"world_rank": 0} if unbound else {}))


class ValidateRequest(Strict):
    """One validation. Every field has a default, so that `{}` is valid."""

    cluster: ClusterName = "default"
    mesh: MeshRequest = MeshRequest()
    model: ModelChoice = Field(default="tiny", json_schema_extra={"examples": ["tiny"]})
    """A known name, or sizes. Sizes apply to both probes; with a name, `exact` keeps its own default."""
    batch: BatchRequest | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """`1f1b` is interleaved where mesh.vpp > 1; `gpipe` runs all forwards before all backwards, and needs vpp 1."""
    overlap: bool = False
    """Start each bucket's gradient sync in the midst of backward. `fixed` cannot tie in time then and is a control."""
    bucket_size: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Elements at which a bucket closes, with overlap, on the first stage; null takes Megatron-LM's 40,000,000."""
    average_in_collective: bool = False
    """Let the collective average, instead of scaling every gradient by 1/dp before its sum: a wrong element then holds
    its rank's own share undivided."""
    normalization: Normalization = Normalization.MICROBATCHES
    """What gradients are divided by: microbatches and replicas, or with `num_tokens` the valid tokens of the whole step
    (sequences are padded then, by rank). The ordering `mean_of_means` needs `num_tokens`."""
    probes: list[ProbeName] = [ProbeName.EXACT, ProbeName.GPT]
    orderings: list[OrderingName] = [OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET]
    steps: int = Field(default=2, json_schema_extra={"minimum": 1})
    repeats: int = Field(default=1, json_schema_extra={"minimum": 1})
    dtype: Dtype = Dtype.FLOAT32
    """Of `gpt`'s parameters and activations; main_grad is float32 in any case."""
    grad_reduce_dtype: Dtype = Dtype.FLOAT32
    """In what gradients are summed over dp. With `bfloat16` each bucket is cast before its sum and back after it; the
    tied weight is still added between the ends in float32. `exact` then takes a smaller model of its own."""
    device: Device = Device.AUTO
    placement: PlacementRequest = PlacementRequest()
    launcher: Launcher = Launcher.POOL
    stack: StackName = REFERENCE_STACK
    """Whose code synchronises in one more trial a probe: the name of a stack that the cluster's operator has installed
    (entry-point group `gradgate.stacks`, or `GRADGATE_STACKS`). The orderings always run on `reference`."""
    seed: int = 0
    deadline_s: int = Field(default=120, ge=1, le=MAX_DEADLINE_S)
    """From the moment a dispatcher takes it up."""
    drill: DrillRequest | None = None
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict, max_length=MAX_LABELS)

    def spec(self) -> ExperimentSpec:
        """The experiment in it, its batch filled in."""
        spec = ExperimentSpec(
            mesh=self.mesh.spec(),
            model=self.model if isinstance(self.model, str) else self.model.spec(),
            schedule=self.schedule,
            overlap=self.overlap,
            bucket_size=self.bucket_size,
            average_in_collective=self.average_in_collective,
            normalization=self.normalization,
            probes=tuple(self.probes),
            orderings=tuple(self.orderings),
            steps=self.steps,
            repeats=self.repeats,
            dtype=self.dtype,
            grad_reduce_dtype=self.grad_reduce_dtype,
            device=self.device,
            seed=self.seed,
            drill=self.drill.spec() if self.drill else None,
            stack=self.stack,
        )
        chosen = self.batch.model_dump(exclude_none=True) if self.batch else {}
        filled = resolve(spec)
        return replace(filled, batch=replace(filled.batch, **chosen)) if filled.batch else filled

    def stored(self, spec: ExperimentSpec) -> dict[str, Any]:
        """The request as it is stored and given back: every default filled in."""
        filled = {
            "batch": asdict(spec.batch) if spec.batch else None,
            "drill": asdict(spec.drill) if spec.drill else None,
        }
        return self.model_dump(mode="json") | filled
