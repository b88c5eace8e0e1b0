"""What the rest of the product says to a worker, and what a worker says back.

Frozen dataclasses and enums of the standard library only: the API, the dispatcher, Ray and torchrun all
import this file, so it must never import torch, ray or anything of `service`.

Shape legend used across `workers`: P = elements of one parameter or shard (flat), C = contributors
(end, dp_rank), B = microbatch, S = sequence, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SCHEMA_VERSION = 1
"""Version of the stored request and result. A breaking change gets a new path prefix."""


class OrderingName(StrEnum):
    """A named pair of buffer layout and sequence of sync phases (`workers.orderings`)."""

    BUGGY = "buggy"
    FIXED = "fixed"
    OWN_BUCKET = "own_bucket"
    OWN_BUCKET_UNALIGNED = "own_bucket_unaligned"
    ALL_REDUCE = "all_reduce"
    MEAN_OF_MEANS = "mean_of_means"
    LAYERNORM_SKIPPED = "layernorm_skipped"
    LAYERNORM_AVERAGED = "layernorm_averaged"


class ForeignOrdering(StrEnum):
    """What a foreign stack's trial has in place of an ordering: no catalogue knows what such a stack does."""

    STACK = "stack"


TrialOrdering = OrderingName | ForeignOrdering
"""How a trial synchronises: by the catalogue, or as its stack does."""


def trial_ordering(name: str) -> TrialOrdering:
    """The member of that name. ValueError for any other."""
    return ForeignOrdering(name) if name == ForeignOrdering.STACK else OrderingName(name)


REFERENCE_STACK = "reference"
"""The stack of this package, which runs every ordering of the catalogue."""


class ProbeName(StrEnum):
    """The model and data of a trial."""

    EXACT = "exact"
    GPT = "gpt"


class Dtype(StrEnum):
    """Of a gpt trial's parameters and activations, or of sums over the replicas; main_grad is always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Device(StrEnum):
    """Where ranks compute. `auto` is resolved to one of the others before a gang forms."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Schedule(StrEnum):
    """The order of microbatches in a pipeline. With several chunks a rank (vpp) 1F1B is interleaved."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


class Normalization(StrEnum):
    """What gradients are divided by: microbatches and replicas (means of means), or all valid tokens of the step."""

    MICROBATCHES = "microbatches"
    NUM_TOKENS = "num_tokens"


class Launcher(StrEnum):
    """Who starts the ranks: our warm pool of Ray actors, or Ray Train's TorchTrainer."""

    POOL = "pool"
    RAY_TRAIN = "ray_train"


class End(StrEnum):
    """The two copies of the tied weight: the embedding on PP[0], the output layer on PP[-1]."""

    WTE = "wte"
    LM_HEAD = "lm_head"
    LAYERNORM = "layernorm"
    """No end: on every stage, with tp >= 2, the parameters of which each tp rank has a whole copy and a partial
    gradient (layernorms, biases behind row-parallel layers), one after another."""


class Phase(StrEnum):
    """What a traced gradient has been through. `final` is what the optimizer gets."""

    LOCAL = "local"
    SCATTERED = "scattered"
    LAYERNORM = "layernorm"
    TIED = "tied"
    NORMALIZED = "normalized"
    FINAL = "final"


class RankPhase(StrEnum):
    """Where a rank is right now; named in errors, so that a hang or a death has a place."""

    FORMING = "forming"
    COLLECTIVES = "collectives"
    BUILDING = "building"
    FORWARD_BACKWARD = "forward_backward"
    DP_SYNC = "dp_sync"
    LAYERNORM = "layernorm"
    TIE = "tie"
    NORMALIZE = "normalize"
    STATISTICS = "statistics"
    JUDGEMENT = "judgement"
    OPTIMIZER = "optimizer"
    IDLE = "idle"


class Primitive(StrEnum):
    """What a collective does."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"


class CollectiveOp(StrEnum):
    """What a reduction makes of its terms."""

    SUM = "sum"
    AVERAGE = "average"


class Role(StrEnum):
    """A control must diverge where predicted (it proves that the instrument sees); a subject must be clean."""

    CONTROL = "control"
    SUBJECT = "subject"


class Verdict(StrEnum):
    """The answer to: may a large training run start here?"""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in the mesh."""

    world_rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """dp x pp x tp ranks, vpp chunks a rank; world_rank = (pp_rank*dp + dp_rank)*tp + tp_rank."""

    dp: int = 2
    pp: int = 2
    tp: int = 1
    vpp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into: vpp for each pipeline rank."""
        return self.pp * self.vpp

    def stages(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, by chunk: pp_rank, pp_rank + pp, pp_rank + 2 pp ..."""
        return tuple(range(pp_rank, self.num_stages, self.pp))

    def world_rank(self, dp_rank: int, pp_rank: int, tp_rank: int = 0) -> int:
        """The world rank at these coordinates."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def coordinates(self, world_rank: int) -> Coordinates:
        """The coordinates of a world rank. Raises IndexError outside the mesh."""
        if not 0 <= world_rank < self.world_size:
            raise IndexError(f"world_rank {world_rank} is outside the mesh of {self.world_size} ranks")
        rest, tp_rank = divmod(world_rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(world_rank, dp_rank, pp_rank, tp_rank)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a probe's model; the feed-forward width is 4 x hidden_size."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Sequences a microbatch and microbatches a step, per dp rank."""

    micro_batch_size: int
    num_microbatches: int


TINY = ModelSpec(vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, seq_len=16)
"""The gpt of the reference figures (design, fact 7)."""

NAMED_MODELS: dict[str, ModelSpec] = {"tiny": TINY}


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault injected on purpose (`workers.faults`); a validation with one never counts for admission.

    `fault` is a name of the fault catalogue. It is bound to a rank, or to a node and then strikes on every rank there
    (wherever ranks are placed), in step `step` of every trial in which the draw of that trial says so.
    """

    fault: str
    world_rank: int | None = None
    step: int = 0
    node: str | None = None
    """As in `Fingerprint.node`."""
    probability: float = 1.0
    """Of a strike on one rank in one trial, drawn from the trial's seed: the same request strikes the same trials."""


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One probe under one ordering for `steps` steps. `device` is resolved (never `auto`)."""

    probe: ProbeName
    ordering: TrialOrdering
    mesh: Mesh
    model: ModelSpec
    batch: BatchSpec
    schedule: Schedule = Schedule.ONE_F_ONE_B
    overlap: bool = False
    """Whether each bucket's sync over dp starts in the midst of backward."""
    bucket_size: int | None = None
    """Elements at which a bucket closes, with overlap, on the first stage; None takes Megatron's default."""
    average_in_collective: bool = False
    """Whether the collective over dp averages, instead of every bucket being scaled before its sum."""
    normalization: Normalization = Normalization.MICROBATCHES
    dtype: Dtype = Dtype.FLOAT32
    grad_reduce_dtype: Dtype = Dtype.FLOAT32
    """What buckets are cast to for their sum over dp (`workers.wire`)."""
    device: Device = Device.CPU
    steps: int = 2
    repeat: int = 0
    seed: int = 0
    drill: Drill | None = None
    stack: str = REFERENCE_STACK
    """Whose code synchronises; any other than the reference goes with `ForeignOrdering.STACK`."""

    def is_replayable(self, step: int) -> bool:
        """Whether one process knows the weights of this step: gpt's later ones depend on the run under test."""
        return step == 0 or self.probe is ProbeName.EXACT


class DeviationKind(StrEnum):
    """What happened to elements that are not what they should be."""

    LOCAL = "local"
    """A contributor's own gradient is wrong before any synchronisation."""
    SCALE = "scale"
    """A multiple of what is expected: of the whole sum, or of the named contributors' shares."""
    WRONG_OWNER = "wrong_owner"
    """The sum of another owner's elements; the named contributor is that owner."""
    DROPPED = "dropped"
    """The named contributors' shares are missing."""
    DOUBLED = "doubled"
    """The named contributors' shares were added twice."""
    CORRUPT = "corrupt"
    """None of these: no combination of the shares gives this value."""


@dataclass(frozen=True, slots=True)
class Contributor:
    """One rank's copy of the tied weight, whose local gradient is one term of every sum."""

    end: End
    dp_rank: int
    world_rank: int


@dataclass(frozen=True, slots=True)
class Deviation:
    """One story about wrong elements of one shard, checked on every element that it counts (`workers.deviation`)."""

    kind: DeviationKind
    contributors: tuple[Contributor, ...]
    """The first few; empty where the story is about the whole sum, or nobody can be named for certain."""
    num_contributors: int
    factor: float | None
    """How often the share (or the whole sum) is in the value: 0 dropped, 2 doubled; None where there is no such."""
    uncertainty: float
    """Largest error of `factor` that rounding can cause; 0 for exact."""
    first_element: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class DivergenceRow:
    """What one rank's owned elements of one end show in one step (padding excluded).

    `expected` is the true sum: of all ranks' local gradients in float64 (gpt), of the int64 answer (exact).
    An element is diverged where `not (|value - expected| <= bound)`; the bound is 0 for exact.
    Index fields count elements of the tied weight, flat, row-major.
    """

    end: End
    owned_elements: int
    diverged_elements: int
    predicted_elements: int
    """How many of the owned elements must measure wrong under this ordering."""
    missed_elements: int
    """Predicted, but not diverged (or, for exact, diverged by another value than predicted)."""
    unexpected_elements: int
    """Diverged, but not in the ordering's misowned set."""
    nonfinite_elements: int
    first_diverged: int | None
    last_diverged: int | None
    max_abs_error: float
    relative_l2_error: float
    max_error_over_bound: float
    """Largest |value - expected| / bound; 0/0 counts as 0."""
    ratio_to_expected: float
    """Least-squares multiple of `expected` that the value is; 1.0 when right, NaN when expected is all zero."""
    reference_max_abs_error: float | None
    """Largest distance from the single-process run of the same global batch; None where none was run."""
    reference_exceeded_elements: int
    """Elements further from the single-process run than its floor allows."""
    min_detectable_share: float
    """The judge's power: largest bound over the largest single contribution, the least share it would see."""
    sum: float
    l2: float
    digest: str
    deviations: tuple[Deviation, ...] = ()
    """What the wrong elements consist of, most elements first; relative to the true sum, also where predicted."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One dp shard of one end on one rank, after one phase: the numbers of the report's tables."""

    phase: Phase
    end: End
    shard: int
    """Which dp rank owns this part of the tied weight."""
    num_elements: int
    sum: float
    l2: float
    digest: str


@dataclass(frozen=True, slots=True)
class TiedRow:
    """The two ends compared element by element after assembly from their owners; this rank's part."""

    num_elements: int
    unequal_elements: int
    max_abs_difference: float
    exceeded_elements: int
    """Elements whose difference is larger than rounding allows (any difference, where orders agree)."""
    weights_max_abs_difference: float
    weights_num_elements: int


@dataclass(frozen=True, slots=True)
class ParameterElement:
    """One element of one parameter, by name and flat, row-major index."""

    parameter: str
    element: int


@dataclass(frozen=True, slots=True)
class ParametersRow:
    """What the elements that one rank owns show in one step, over several parameters of its stage.

    `phase` tells which: `scattered` is the tied weight as the data-parallel sync left it, before the tie, and what
    tensor-parallel ranks are still to sum; `final` is every other parameter as the optimizer gets it.
    """

    phase: Phase
    total_elements: int
    """Of these parameters, owned by this rank or not."""
    owned_elements: int
    unexpected_elements: int
    """Further from what the ordering is predicted to leave (nearly always the true sum) than rounding allows."""
    nonfinite_elements: int
    first_unexpected: ParameterElement | None
    last_unexpected: ParameterElement | None
    max_abs_error: float
    """From what is predicted."""
    max_error_over_bound: float
    min_detectable_share: float
    """The judge's power, as in `DivergenceRow`."""
    reference_max_abs_error: float | None
    """None where there was no replay."""
    reference_exceeded_elements: int
    deviations: tuple[Deviation, ...]
    """What the wrong elements consist of, most elements first; elements count over all these parameters."""
    deviating_ranks: tuple[int, ...]
    """World ranks whose own gradient, before any collective, is further from its replay than that one's floor."""
    first_deviating: ParameterElement | None
    last_deviating: ParameterElement | None
    """Between which elements they are."""


@dataclass(frozen=True, slots=True)
class NonfiniteRow:
    """NaN or infinity in what a rank holds when a phase begins; for `optimizer`, in the weights that it has updated."""

    phase: RankPhase
    num_elements: int
    first: ParameterElement
    last: ParameterElement


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """Digests of what must be equal across dp ranks of one stage: weights after the all-gather."""

    initial_weights_digest: str
    weights_digest: str
    sent_digest: str | None = None
    """Of the weights that this rank updated and sent to its one replica; None unless there are exactly two."""
    kept_digest: str | None = None
    """Of the same weights as they stand after the step; equal to `sent_digest` unless they were damaged here."""
    received_digest: str | None = None
    """Of the replica's weights as they stand here after the step; equal to what that one sent unless damaged here."""
    tied_digest: str | None = None
    """Of the whole tied gradient once the ends are added, where that comes first: the same at both ends."""
    copies_digest: str | None = None
    """Of the weights that every tensor-parallel rank holds whole, so that they must be equal across tp ranks too; None
    where there is one."""


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """What may change rounding from one rank to another, as it stood in a step."""

    num_threads: int
    allow_tf32: bool
    allow_bf16_reduction: bool


class StackFault(StrEnum):
    """What can be wrong with somebody else's stack beyond the tied weight's gradient."""

    OWNERSHIP_GAP = "ownership_gap"
    OWNERSHIP_OVERLAP = "ownership_overlap"
    GRADIENT_WRONG = "gradient_wrong"
    UPDATE_WRONG = "update_wrong"
    WEIGHTS_DIFFER = "weights_differ"


@dataclass(frozen=True, slots=True)
class StackFinding:
    """One parameter that a stack got wrong on one rank. `detail` follows the parameter's name in a sentence."""

    fault: StackFault
    parameter: str
    num_elements: int
    detail: str


@dataclass(frozen=True, slots=True)
class StackOrigin:
    """Where a foreign stack's code comes from on one rank."""

    name: str
    target: str
    """`module:attribute` of its factory."""
    distribution: str | None
    """The installed package that brings it; None where only the operator's setting names it."""
    version: str | None

    def __str__(self) -> str:
        brought = f"{self.distribution} {self.version}" if self.distribution else "by setting"
        return f"{self.target}, {brought}"


@dataclass(frozen=True, slots=True)
class StackRow:
    """How one rank's part of a foreign stack's work was judged in one step, over every parameter of its stages."""

    origin: StackOrigin
    num_elements: int
    """Of the parameters of this rank's stages."""
    gradient_elements: int
    """Owned elements whose gradient was compared, the tied weight's aside: that has rows of its own."""
    update_elements: int
    """Owned elements whose new weight was compared; none for gpt."""
    findings: tuple[StackFinding, ...]


@dataclass(frozen=True, slots=True)
class NormRow:
    """The global gradient norm as this rank has it after the sync; every rank must have the same bits."""

    value: float
    reference: float | None
    """The norm of the same global batch's gradient, computed without the sync under test; on the first stage only."""
    allowed_error: float | None
    """Largest |value - reference| that rounding can explain; None exactly where `reference` is."""


@dataclass(frozen=True, slots=True)
class CollectiveFault:
    """The first wrong element that a rank saw in one self-tested collective."""

    num_elements: int
    element: int
    """Below 0 or past the last: the collective wrote outside of its tensor."""
    expected: float
    got: float
    world_rank: int | None
    """Whose share is not what it should be, where one element tells."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One rank's self-test of one primitive on one of its groups, over all sizes."""

    group: str
    """What the group is for: dp, pp, tie, ends, world; joined by + where one group serves several."""
    members: tuple[int, ...]
    primitive: Primitive
    op: CollectiveOp | None
    num_elements: tuple[int, ...]
    """Sizes tested; of one member's part where a primitive scatters or gathers."""
    size_bytes: int
    """Of this rank's tensors, all sizes together."""
    seconds: float
    wrong_elements: int
    first_wrong: CollectiveFault | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything one rank says about one step of one trial. Statistics only, never gradients."""

    trial_index: int
    probe: ProbeName
    ordering: TrialOrdering
    repeat: int
    step: int
    world_rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    divergence: tuple[DivergenceRow, ...]
    trace: tuple[TraceRow, ...]
    tied: TiedRow | None
    replica: ReplicaRow
    loss: float | None
    """Mean loss over this dp rank's microbatches; on the last stage only."""
    seconds: dict[str, float]
    """Time by RankPhase value, in seconds, from a monotonic clock."""
    nonfinite_elements: int = 0
    """Of this rank's gradients when a phase of the sync begins, and of the weights it updated; any parameter."""
    stack: StackRow | None = None
    """Of a trial of somebody else's stack."""
    grad_norm: NormRow | None = None
    """None where the step ended before the optimizer."""
    collectives: tuple[CollectiveRow, ...] = ()
    """The self-test before a run's first step; empty in every other report."""
    compute_seconds: dict[str, float] = field(default_factory=dict)
    """This rank's own work by RankPhase value, in seconds: never the time in which it waited for another rank."""
    parameters: tuple[ParametersRow, ...] = ()
    """What the judges of every other parameter, and of the tied weight between two phases, found."""
    nonfinite: tuple[NonfiniteRow, ...] = ()
    """Where `nonfinite_elements` are, phase by phase; empty where all is finite."""
    settings: ComputeSettings | None = None
    """With which this step was computed."""
    drill_struck: bool = False
    """Whether the trial's drill did anything on this rank in this step."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank runs on; a verdict covers only this."""

    world_rank: int
    node: str
    pid: int
    boot_id: str
    device: str
    device_uuid: str | None
    driver: str | None
    backend: str
    backend_version: str | None
    image: str | None
    python: str
    torch: str
    workers_digest: str
    num_threads: int
    collective_settings: dict[str, str]
    """NCCL_*, GLOO_* and similar variables; secrets are masked."""
    stack: StackOrigin | None = None
    """The foreign stack that this rank loaded; None where only the reference ran."""


@dataclass(frozen=True, slots=True)
class TrialSummary:
    """One probe under one ordering over all ranks, both ends, all steps and repeats."""

    probe: ProbeName
    ordering: TrialOrdering
    role: Role
    misowned_elements: int
    """Per step, both ends, from the layout alone."""
    predicted_diverged_elements: int
    diverged_elements: int
    missed_elements: int
    unexpected_elements: int
    compared_elements: int
    nonfinite_elements: int
    reference_exceeded_elements: int
    tied_unequal_elements: int
    tied_exceeded_elements: int
    tied_max_abs: float
    reference_max_abs: float | None
    max_abs_error: float
    weights_max_abs: float
    replicas_agree: bool
    grad_norm: float | None
    """Of the last step of the last repeat; None where none was reported."""
    grad_norm_max_error: float | None
    """Largest distance from the reference's norm; None where none was compared."""
    missing_reports: tuple[tuple[int, int, int], ...]
    """(repeat, step, world_rank) of reports that never came."""
    ok: bool


class JudgeName(StrEnum):
    """Who found a fault; each is blind to what another sees."""

    EXACT = "exact"
    """Any difference from the integer answer."""
    SYNC = "sync"
    """Synchronised gradients against the sum of all ranks' own, within the bound of rounding."""
    REFERENCE = "reference"
    """Each rank's own gradients against one process's, within its floor."""
    REPLICAS = "replicas"
    """Bits of what must be equal on several ranks."""
    NORM = "norm"
    """The global gradient norm against one process's."""
    FINITE = "finite"
    """NaN and infinity, before each collective."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a verdict is what it is: a stable code and a sentence; of a fault also who found it, and where it is."""

    code: str
    message: str
    judge: JudgeName | None = None
    world_rank: int | None = None
    """The rank at fault, where the evidence points to one."""
    node: str | None = None
    """Of that rank; or of all suspects, where they are several on one node and others are elsewhere."""
    phase: RankPhase | None = None
    """The first phase after which something was wrong."""
    parameter: str | None = None
    """The parameter in which all wrong elements lie; None where there are several."""
    element: int | None = None
    """The first wrong one of `parameter`, flat, row-major."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Something worth knowing that decides nothing: a stable code, a sentence, and the rank that it is about."""

    code: str
    message: str
    world_rank: int | None


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """One primitive self-tested on all groups of one kind."""

    group: str
    primitive: Primitive
    op: CollectiveOp | None
    num_elements: tuple[int, ...]
    num_ranks: int
    size_bytes: int
    """Of one rank's tensors, all sizes together."""
    seconds: float
    """On the slowest rank."""
    wrong_elements: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reasons, the trials behind it, and what else was seen."""

    verdict: Verdict
    reasons: tuple[Reason, ...]
    trials: tuple[TrialSummary, ...]
    observations: tuple[Observation, ...] = ()
    collectives: tuple[CollectiveSummary, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The last thing a failing rank says: what broke, where in the step, and whether it was only a victim."""

    world_rank: int
    node: str
    phase: RankPhase
    trial_index: int | None
    step: int | None
    code: str
    message: str
    collateral: bool
    """True when a collective broke under this rank (a peer went away); such a failure is never the first cause."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is right now; `sequence` rises with every phase entered, so that a hang names who never arrived."""

    world_rank: int
    phase: RankPhase
    trial_index: int | None
    step: int | None
    sequence: int
