"""Which elements of the tied weight an ordering gets wrong, from names and shapes alone, at any scale.

An element is wrong exactly where the tie adds gradients that were scattered before and its owner differs between
the first and the last stage. Pure interval arithmetic: a 175-billion-parameter model costs milliseconds. What a
misowned element then measures depends on the gradients and is predicted by whoever holds them (`workers.divergence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from workers.contract import TINY, Mesh, ModelSpec, OrderingName, TrialSpec
from workers.errors import LayoutAssertionError, SpecError
from workers.intervals import EMPTY, Interval, Intervals, count, intersect, normalize
from workers.layout import RULES, BufferLayout, LayoutRule, LayoutVersion, build_layout
from workers.orderings import ORDERINGS, Ordering
from workers.parameters import WORD_EMBEDDINGS, ParameterShape, gpt_stage_parameters, stage_parameters


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one layout and phase order do to the tied weight on one mesh. Elements are those of one end's copy."""

    asserts: str | None
    """What the modelled version would say instead of running; then nothing else was computed but `num_elements`."""
    num_elements: int
    misowned_elements: int
    ranges: Intervals
    """The misowned elements, flat, row-major; the same set at both ends."""
    misowned_by_wte_owner: tuple[int, ...]
    """By dp_rank: how many misowned elements it owns on the first stage, and so updates with a wrong gradient."""
    misowned_by_lm_head_owner: tuple[int, ...]

    @property
    def fraction(self) -> float:
        """Share of the tied weight that is wrong at each end."""
        return self.misowned_elements / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A public model in the layout's terms. `model.vocab_size` is as Megatron allocates it: padded to 128."""

    model: ModelSpec
    published_vocab_size: int
    tied: bool
    source: str


def _published(
    vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, seq_len: int, tied: bool, source: str
) -> CatalogueModel:
    padded = -(-vocab_size // 128) * 128
    return CatalogueModel(ModelSpec(padded, hidden_size, num_layers, num_heads, seq_len), vocab_size, tied, source)


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"
_MEGATRON = "Shoeybi et al. 2019, Megatron-LM, table 2"

MODELS: Mapping[str, CatalogueModel] = MappingProxyType(
    {
        "tiny": CatalogueModel(
            TINY, TINY.vocab_size, True, "the model of the reference figures; vocabulary not padded"
        ),
        "gpt2": _published(50257, 768, 12, 12, 1024, True, _GPT2),
        "gpt2-medium": _published(50257, 1024, 24, 16, 1024, True, _GPT2),
        "gpt2-large": _published(50257, 1280, 36, 20, 1024, True, _GPT2),
        "gpt2-xl": _published(50257, 1600, 48, 25, 1024, True, _GPT2),
        "megatron-8.3b": _published(50257, 3072, 72, 24, 1024, True, _MEGATRON),
        "gpt3-1.3b": _published(50257, 2048, 24, 16, 2048, True, _GPT3),
        "gpt3-6.7b": _published(50257, 4096, 32, 32, 2048, True, _GPT3),
        # The table prints 5140, which its 40 heads of 128 cannot give.
        "gpt3-13b": _published(50257, 5120, 40, 40, 2048, True, _GPT3),
        "gpt3-175b": _published(50257, 12288, 96, 96, 2048, True, _GPT3),
    }
)
"""Models with a GPT's parameters (biases, learned positions, tied embeddings). Layouts follow the sizes alone."""


def predict(
    subject: OrderingName | LayoutVersion | LayoutRule,
    mesh: Mesh,
    first: Sequence[ParameterShape],
    last: Sequence[ParameterShape],
) -> Prediction:
    """Predict for an ordering, or for a Megatron version (its layout, scattering before the tie).

    `first` and `last` are the first and last stage's parameters in registration order, of which at most one each is
    `shared_embedding`. With pp=1, or where neither is marked (untied weights), nothing is tied and nothing is misowned.
    """
    rule, exposed = _rule(subject)
    wte_name, lm_head_name = _shared_name(first), _shared_name(last)
    if mesh.pp == 1 or wte_name is None or lm_head_name is None:
        return _nothing_misowned(mesh.dp, first)
    try:
        layouts = build_layout(first, rule, mesh.dp), build_layout(last, rule, mesh.dp)
    except LayoutAssertionError as error:
        return _nothing_misowned(mesh.dp, first, asserts=str(error))
    wte, lm_head = layouts
    misowned = misowned_intervals(wte, lm_head) if exposed else EMPTY
    return Prediction(
        asserts=None,
        num_elements=wte.param(wte_name).interval.size,
        misowned_elements=count(misowned),
        ranges=misowned,
        misowned_by_wte_owner=_by_owner(misowned, wte, wte_name),
        misowned_by_lm_head_owner=_by_owner(misowned, lm_head, lm_head_name),
    )


def predict_model(
    subject: OrderingName | LayoutVersion | LayoutRule, mesh: Mesh, model: ModelSpec, *, tied: bool = True
) -> Prediction:
    """Predict for a GPT of these sizes; see `predict`. Raises SpecError for a mesh with tensor parallelism."""
    if mesh.tp != 1:
        raise SpecError(f"tp {mesh.tp}: prediction knows no tensor parallelism so far; set tp to 1")
    first = gpt_stage_parameters(model, mesh.num_stages, 0, tied=tied)
    last = gpt_stage_parameters(model, mesh.num_stages, mesh.num_stages - 1, tied=tied)
    return predict(subject, mesh, first, last)


def misowned_intervals(wte: BufferLayout, lm_head: BufferLayout) -> Intervals:
    """Elements of the tied weight (its own flat coordinates) whose owner differs between the two stages' buffers.

    The same set at both ends. Costs the number of shards, not of elements.
    """
    a, b = _owners_of_shared(wte), _owners_of_shared(lm_head)
    differing: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        (a_part, a_owner), (b_part, b_owner) = a[i], b[j]
        if a_owner != b_owner:
            differing.append(Interval(max(a_part.start, b_part.start), min(a_part.stop, b_part.stop)))
        i, j = i + (a_part.stop <= b_part.stop), j + (b_part.stop <= a_part.stop)
    return normalize(differing)


def trial_misowned(spec: TrialSpec) -> Intervals:
    """The elements that a trial's ordering gets wrong at each end; empty where it ties before it scatters."""
    if spec.mesh.dp == 1 or spec.mesh.pp == 1 or not ORDERINGS[spec.ordering].ties_after_scatter:
        return EMPTY
    return misowned_intervals(*ordering_layouts(spec))


@lru_cache(maxsize=64)
def ordering_layouts(spec: TrialSpec) -> tuple[BufferLayout, BufferLayout]:
    """A trial's buffers on the first and the last stage (the same one where there is one stage)."""
    return stage_layout(spec, 0), stage_layout(spec, spec.mesh.num_stages - 1)


def stage_layout(spec: TrialSpec, stage: int) -> BufferLayout:
    """A trial's buffer of one stage. Raises LayoutAssertionError where the modelled version would stop."""
    parameters = stage_parameters(spec.probe, spec.model, spec.mesh, stage)
    return build_layout(parameters, ORDERINGS[spec.ordering].rule, spec.mesh.dp)


def _rule(subject: OrderingName | LayoutVersion | LayoutRule) -> tuple[LayoutRule, bool]:
    """The layout's rule, and whether the phases expose misowned elements."""
    if isinstance(subject, LayoutRule):
        return subject, True
    if isinstance(subject, LayoutVersion):
        return RULES[subject], True
    ordering: Ordering = ORDERINGS[subject]
    return ordering.rule, ordering.ties_after_scatter


def _shared_name(parameters: Sequence[ParameterShape]) -> str | None:
    shared = [parameter.name for parameter in parameters if parameter.shared_embedding]
    if len(shared) > 1:
        raise SpecError(f"{shared} are all marked shared_embedding; a stage holds one copy of the tied weight at most")
    return shared[0] if shared else None


def _owners_of_shared(layout: BufferLayout) -> tuple[tuple[Interval, int], ...]:
    shared = [placed.name for placed in layout.params if placed.shared_embedding]
    if len(shared) != 1:
        raise SpecError(f"the buffer holds {len(shared)} copies of the tied weight; a stage at either end holds one")
    return layout.owners(shared[0])


def _by_owner(misowned: Intervals, layout: BufferLayout, name: str) -> tuple[int, ...]:
    counts = [0] * layout.dp
    if misowned:
        for dp_rank in range(layout.dp):
            counts[dp_rank] = count(intersect(misowned, layout.owned_intervals(name, dp_rank)))
    return tuple(counts)


def _nothing_misowned(dp: int, first: Sequence[ParameterShape], asserts: str | None = None) -> Prediction:
    num_elements = sum(parameter.numel for parameter in first if parameter.name == WORD_EMBEDDINGS)
    return Prediction(asserts, num_elements, 0, EMPTY, (0,) * dp, (0,) * dp)
