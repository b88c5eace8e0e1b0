"""Names and shapes of each pipeline stage's parameters, in the order in which a stage registers them.

A stage is one model chunk: pipeline rank r holds the stages r, r + pp, r + 2 pp ... (`Mesh.stages`).

The one place that decides what a stage holds: models build from it and layouts are computed from it, so that the static
analysis and the live step can never speak of different buffers. Standard library only; no weights here.
Names are Megatron-LM's (layer numbers count within the stage), so that layouts can be checked against the real library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from workers.contract import Mesh, ModelSpec, ParameterElement, ProbeName, TrialSpec
from workers.errors import SpecError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


class Cut(StrEnum):
    """How tensor-parallel ranks share a parameter."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Cut along the first dimension: vocabulary, or the outputs of a column-parallel layer."""
    COLUMNS = "columns"
    """Cut along the second dimension: the inputs of a row-parallel layer."""
    HEADS = "heads"
    """Query, key and value lie one after another along the first dimension, and each is cut by heads."""


_CUTS = {
    "word_embeddings.weight": Cut.ROWS,
    "output_layer.weight": Cut.ROWS,
    "linear_qkv.weight": Cut.HEADS,
    "linear_qkv.bias": Cut.HEADS,
    "linear_proj.weight": Cut.COLUMNS,
    "linear_fc1.weight": Cut.ROWS,
    "linear_fc1.bias": Cut.ROWS,
    "linear_fc2.weight": Cut.COLUMNS,
    "a.weight": Cut.ROWS,
    "b.weight": Cut.COLUMNS,
}
_EXACT_BIAS = re.compile(r"^decoder\.layers\.\d+\.bias$")
_SEQUENCE_PARALLEL = re.compile(r"layernorm\.(weight|bias)$|\.(linear_proj|linear_fc2)\.bias$|\.row_bias$")


def cut_of(name: str) -> Cut:
    """How tensor-parallel ranks share the parameter of this name."""
    if _EXACT_BIAS.match(name):
        return Cut.ROWS
    return _CUTS.get(".".join(name.split(".")[-2:]), Cut.REPLICATED)


def is_tied(name: str) -> bool:
    """Whether a parameter, with its chunk before the name or without, is a copy of the tied weight."""
    return name.endswith((WORD_EMBEDDINGS, OUTPUT_LAYER))


def is_sequence_parallel(name: str) -> bool:
    """Whether a replicated parameter works on one part of the sequence per tensor-parallel rank.

    Layernorms, and the biases behind row-parallel layers: each rank's gradient is then a part, and the parts must be
    summed. (Learned positions are added before the sequence is cut, so their gradient is whole on every rank.)
    Source: Megatron-LM, parameters marked `sequence_parallel`.
    """
    return _SEQUENCE_PARALLEL.search(name) is not None


def padded_vocab_size(vocab_size: int, tp: int, divisible_by: int = 1) -> int:
    """Rows of the vocabulary once it is padded to equal shards.

    Megatron-LM pads to a multiple of `make_vocab_size_divisible_by` (128 by default) times tp. A trial takes its sizes
    as they are given, so there `divisible_by` is 1.
    """
    unit = divisible_by * tp
    return -(-vocab_size // unit) * unit


def allocated(model: ModelSpec, tp: int) -> ModelSpec:
    """The model with its vocabulary as `tp` ranks hold it together."""
    return replace(model, vocab_size=padded_vocab_size(model.vocab_size, tp))


def tied_elements(model: ModelSpec, tp: int) -> int:
    """Elements of one tp rank's part of the tied weight, padding rows included."""
    return allocated(model, tp).vocab_size // tp * model.hidden_size


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter; `shared_embedding` marks a copy of the tied weight whose other copy lives on another stage."""

    name: str
    shape: tuple[int, ...]
    shared_embedding: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def stage_layer_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as it goes, earlier stages take the rest; with too few, the last hold none."""
    if num_layers < 0 or num_stages < 1:
        raise SpecError(f"num_layers {num_layers} over {num_stages} stages: needs num_layers >= 0 and 1 stage or more")
    even, extra = divmod(num_layers, num_stages)
    return tuple(even + (1 if stage < extra else 0) for stage in range(num_stages))


def first_layer(num_layers: int, num_stages: int, stage: int) -> int:
    """The global number of a stage's first layer."""
    return sum(stage_layer_counts(num_layers, num_stages)[:stage])


def tied_parameter_name(num_stages: int, stage: int) -> str | None:
    """The name of a stage's copy of the tied weight; None on stages between the first and the last."""
    if stage == 0:
        return WORD_EMBEDDINGS
    return OUTPUT_LAYER if stage == num_stages - 1 else None


def gpt_stage_parameters(
    model: ModelSpec, num_stages: int, stage: int, *, ffn_hidden_size: int | None = None, tied: bool = True, tp: int = 1
) -> tuple[ParameterShape, ...]:
    """Parameters of one stage of a GPT with biases and learned positions, in registration order, as one tp rank's part.

    A single stage uses its embedding as output layer too, so that nothing is shared. An untied model keeps
    an output layer of its own on the last stage. `ffn_hidden_size` defaults to 4 x hidden_size.
    """
    whole = _gpt_parameters(allocated(model, tp), num_stages, stage, ffn_hidden_size or 4 * model.hidden_size, tied)
    return tuple(shard_of(parameter, tp) for parameter in whole)


def exact_stage_parameters(model: ModelSpec, num_stages: int, stage: int, *, tp: int = 1) -> tuple[ParameterShape, ...]:
    """Parameters of one stage of the exact probe's coupling model, in registration order, as one tp rank's part.

    The hidden state splits into lo = H // 2 and hi = H - lo columns; per layer u = a lo - bias, hi += b relu(u). With
    tensor parallelism hi += row_bias too: the one parameter that ranks replicate.
    """
    whole = _exact_parameters(allocated(model, tp), num_stages, stage, row_bias=tp > 1)
    return tuple(shard_of(parameter, tp) for parameter in whole)


def shard_of(parameter: ParameterShape, tp: int) -> ParameterShape:
    """One tensor-parallel rank's part of a parameter; all ranks' parts have one shape. SpecError where they cannot."""
    cut = cut_of(parameter.name)
    if tp == 1 or cut is Cut.REPLICATED:
        return parameter
    dimension = 1 if cut is Cut.COLUMNS else 0
    size = parameter.shape[dimension]
    if size % (3 * tp if cut is Cut.HEADS else tp):
        raise SpecError(f"tp {tp} does not divide {parameter.name} of shape {parameter.shape}; choose a divisor")
    shape = tuple(size // tp if at == dimension else length for at, length in enumerate(parameter.shape))
    return replace(parameter, shape=shape)


def stage_parameters(probe: ProbeName, model: ModelSpec, mesh: Mesh, stage: int) -> tuple[ParameterShape, ...]:
    """Parameters of one stage of a probe's model on any of its tp ranks, in registration order."""
    if probe is ProbeName.EXACT:
        return exact_stage_parameters(model, mesh.num_stages, stage, tp=mesh.tp)
    return gpt_stage_parameters(model, mesh.num_stages, stage, tp=mesh.tp)


def sequence_parallel_parameters(spec: TrialSpec, stage: int) -> tuple[ParameterShape, ...]:
    """Of a trial's stage those whose gradients tensor-parallel ranks must sum; none where there is one such rank."""
    parameters = stage_parameters(spec.probe, spec.model, spec.mesh, stage) if spec.mesh.tp > 1 else ()
    return tuple(parameter for parameter in parameters if is_sequence_parallel(parameter.name))


def chunk_prefixes(num_chunks: int) -> list[str]:
    """What goes before the names of each chunk's parameters: nothing where there is one chunk."""
    return [""] if num_chunks == 1 else [f"chunk {chunk}: " for chunk in range(num_chunks)]


def layernorm_element(spec: TrialSpec, pp_rank: int, element: int | None) -> ParameterElement | None:
    """Where an element of all that a rank and its tensor-parallel peers sum lies, which is counted over all chunks."""
    stages = spec.mesh.stages(pp_rank)
    for prefix, stage in zip(chunk_prefixes(len(stages)), stages, strict=True):
        for parameter in sequence_parallel_parameters(spec, stage):
            if element is None:
                return None
            if element < parameter.numel:
                return ParameterElement(prefix + parameter.name, element)
            element -= parameter.numel
    return None


def _gpt_parameters(model: ModelSpec, num_stages: int, stage: int, ffn: int, tied: bool) -> Iterator[ParameterShape]:
    vocab, hidden = model.vocab_size, model.hidden_size
    _check_stage(num_stages, stage)
    if stage == 0:
        yield ParameterShape(WORD_EMBEDDINGS, (vocab, hidden), shared_embedding=tied and num_stages > 1)
        yield ParameterShape(POSITION_EMBEDDINGS, (model.seq_len, hidden))
    for layer in range(stage_layer_counts(model.num_layers, num_stages)[stage]):
        yield from _gpt_layer(f"decoder.layers.{layer}", hidden, ffn)
    if stage == num_stages - 1:
        yield ParameterShape("decoder.final_layernorm.weight", (hidden,))
        yield ParameterShape("decoder.final_layernorm.bias", (hidden,))
        if num_stages > 1 or not tied:
            yield ParameterShape(OUTPUT_LAYER, (vocab, hidden), shared_embedding=tied)


def _gpt_layer(prefix: str, hidden: int, ffn: int) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{prefix}.input_layernorm.weight", (hidden,))
    yield ParameterShape(f"{prefix}.input_layernorm.bias", (hidden,))
    yield ParameterShape(f"{prefix}.self_attention.linear_proj.weight", (hidden, hidden))
    yield ParameterShape(f"{prefix}.self_attention.linear_proj.bias", (hidden,))
    yield ParameterShape(f"{prefix}.self_attention.linear_qkv.weight", (3 * hidden, hidden))
    yield ParameterShape(f"{prefix}.self_attention.linear_qkv.bias", (3 * hidden,))
    yield ParameterShape(f"{prefix}.pre_mlp_layernorm.weight", (hidden,))
    yield ParameterShape(f"{prefix}.pre_mlp_layernorm.bias", (hidden,))
    yield ParameterShape(f"{prefix}.mlp.linear_fc1.weight", (ffn, hidden))
    yield ParameterShape(f"{prefix}.mlp.linear_fc1.bias", (ffn,))
    yield ParameterShape(f"{prefix}.mlp.linear_fc2.weight", (hidden, ffn))
    yield ParameterShape(f"{prefix}.mlp.linear_fc2.bias", (hidden,))


def _exact_parameters(model: ModelSpec, num_stages: int, stage: int, row_bias: bool) -> Iterator[ParameterShape]:
    vocab, hidden = model.vocab_size, model.hidden_size
    lo = hidden // 2
    hi = hidden - lo
    _check_stage(num_stages, stage)
    if stage == 0:
        yield ParameterShape(WORD_EMBEDDINGS, (vocab, hidden), shared_embedding=num_stages > 1)
    for layer in range(stage_layer_counts(model.num_layers, num_stages)[stage]):
        # A module registers its own parameters before its submodules'.
        yield ParameterShape(f"decoder.layers.{layer}.bias", (lo,))
        if row_bias:
            yield ParameterShape(f"decoder.layers.{layer}.row_bias", (hi,))
        yield ParameterShape(f"decoder.layers.{layer}.a.weight", (lo, lo))
        yield ParameterShape(f"decoder.layers.{layer}.b.weight", (hi, lo))
    if stage == num_stages - 1 > 0:
        yield ParameterShape(OUTPUT_LAYER, (vocab, hidden), shared_embedding=True)


def _check_stage(num_stages: int, stage: int) -> None:
    if not 0 <= stage < num_stages:
        raise SpecError(f"stage {stage} is outside the pipeline of {num_stages}; stages are numbered from 0")
