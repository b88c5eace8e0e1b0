"""Which elements of the tied weight an ordering gets wrong, from names and shapes alone, at any scale.

An element is wrong exactly where the tie adds gradients that were scattered before and its owner differs between
the first and the last stage; where the scatter overlaps with backward, also where it lies in a bucket that is scattered
before its last gradient comes. Pure interval arithmetic: a 175-billion-parameter model costs milliseconds. What a
misowned element then measures depends on the gradients and is predicted by whoever holds them (`workers.divergence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from workers.contract import Mesh, ModelSpec, OrderingName, TrialSpec
from workers.errors import LayoutAssertionError, SpecError
from workers.intervals import EMPTY, Interval, Intervals, count, normalize, shift, union
from workers.layout import RULES, BufferLayout, LayoutRule, LayoutVersion, build_layout, default_bucket_size
from workers.orderings import ORDERINGS, Ordering, ordering_of
from workers.padding import valid_tokens
from workers.parameters import (
    WORD_EMBEDDINGS,
    ParameterShape,
    gpt_stage_parameters,
    sequence_parallel_parameters,
    stage_parameters,
    tied_elements,
)

BLIND_TO_OWNERS = (OrderingName.MEAN_OF_MEANS, OrderingName.LAYERNORM_SKIPPED, OrderingName.LAYERNORM_AVERAGED)
"""Orderings that go wrong by what ranks hold, whoever owns it: nothing that a layout could tell."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one layout and phase order do to the tied weight on one mesh. Elements are those of one end's copy."""

    asserts: str | None
    """What the modelled version would say instead of running; then nothing else was computed but `num_elements`."""
    num_elements: int
    misowned_elements: int
    """Owned by another dp rank at one end than at the other."""
    early_elements: int
    """Scattered before their last gradient came; with overlap only."""
    ranges: Intervals
    """The elements that are either, flat, row-major: what comes out wrong, the same set at both ends."""
    misowned_by_wte_owner: tuple[int, ...]
    """By dp_rank: how many misowned elements it owns on the first stage, and so updates with a wrong gradient."""
    misowned_by_lm_head_owner: tuple[int, ...]

    @property
    def wrong_elements(self) -> int:
        """How many elements come out wrong at each end."""
        return count(self.ranges)

    @property
    def fraction(self) -> float:
        """Share of the tied weight that is wrong at each end."""
        return self.wrong_elements / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """The dp sync starts during backward; on the first stage a bucket closes once it holds `bucket_size` elements."""

    bucket_size: int | None = None
    """None takes Megatron-LM's default."""

    def resolved(self, dp: int) -> int:
        """The size in elements."""
        return default_bucket_size(dp) if self.bucket_size is None else self.bucket_size


def predict(
    subject: OrderingName | LayoutVersion | LayoutRule,
    mesh: Mesh,
    first: Sequence[ParameterShape],
    last: Sequence[ParameterShape],
    overlap: Overlap | None = None,
) -> Prediction:
    """Predict for an ordering, or for a Megatron version (its layout, scattering before the tie).

    `first` and `last` are the first and last stage's parameters in registration order, of which at most one each is
    `shared_embedding`. With pp=1, or where neither is marked (untied weights), nothing is tied and nothing is misowned.
    `overlap` is that of the dp sync with backward, if it does. With tensor parallelism they are one tp rank's part: all
    have the same, each in a buffer of its own, and what is predicted is of all of them together.
    """
    if subject in BLIND_TO_OWNERS:
        raise SpecError(f"{subject} goes wrong by what ranks hold, not by who owns it; name another ordering")
    rule, exposed = _rule(subject, overlap is not None)
    wte_name, lm_head_name = _shared_name(first), _shared_name(last)
    if mesh.pp == 1 or wte_name is None or lm_head_name is None:
        return _nothing_misowned(mesh, first)
    try:
        # Only the first stage's buckets are cut by size.
        bucket_size = overlap.resolved(mesh.dp) if overlap else None
        layouts = build_layout(first, rule, mesh.dp, bucket_size), build_layout(last, rule, mesh.dp)
    except LayoutAssertionError as error:
        return _nothing_misowned(mesh, first, asserts=str(error))
    wte, lm_head = layouts
    misowned = misowned_intervals(wte, lm_head) if exposed else EMPTY
    early = early_intervals(wte) if exposed and overlap and mesh.dp > 1 else EMPTY
    wrong = union(misowned, early)
    num_elements, tp = wte.param(wte_name).interval.size, mesh.tp
    return Prediction(
        asserts=None,
        num_elements=tp * num_elements,
        misowned_elements=tp * count(misowned),
        early_elements=tp * count(early),
        ranges=normalize(part for tp_rank in range(tp) for part in shift(wrong, tp_rank * num_elements)),
        misowned_by_wte_owner=tuple(tp * n for n in _by_owner(misowned, wte, wte_name)),
        misowned_by_lm_head_owner=tuple(tp * n for n in _by_owner(misowned, lm_head, lm_head_name)),
    )


def predict_model(
    subject: OrderingName | LayoutVersion | LayoutRule,
    mesh: Mesh,
    model: ModelSpec,
    *,
    tied: bool = True,
    overlap: Overlap | None = None,
) -> Prediction:
    """Predict for a GPT of these sizes; see `predict`. Raises SpecError where tp does not divide them."""
    first = gpt_stage_parameters(model, mesh.num_stages, 0, tied=tied, tp=mesh.tp)
    last = gpt_stage_parameters(model, mesh.num_stages, mesh.num_stages - 1, tied=tied, tp=mesh.tp)
    return predict(subject, mesh, first, last, overlap)


def undivided(model: ModelSpec, tp: int) -> tuple[str, ...]:
    """Why tensor-parallel ranks cannot share a GPT of these sizes, in words; nothing where they can."""
    shared = (("hidden_size", model.hidden_size),)
    return tuple(f"ranks share {name}, which is {width}, in equal parts" for name, width in shared if width % tp)


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


def early_intervals(wte: BufferLayout) -> Intervals:
    """Elements of wte (its own flat coordinates) that lie in front of the bucket it was collected in.

    Backward reaches wte last, so that with overlap the bucket in front is scattered before wte's last gradient comes.
    lm_head comes first in its buffer and has nothing in front.
    """
    [shared] = [placed for placed in wte.params if placed.shared_embedding]
    return normalize([Interval(0, min(wte.buckets[shared.bucket].offset - shared.start, shared.interval.size))])


def trial_misowned(spec: TrialSpec) -> Intervals:
    """Elements whose owner differs between the ends of a trial, where its phases make that matter."""
    if not _exposes(spec):
        return EMPTY
    return misowned_intervals(*ordering_layouts(spec))


def trial_early(spec: TrialSpec) -> Intervals:
    """Elements of wte that a trial scatters before their last gradient comes; none without overlap."""
    if not (_exposes(spec) and spec.overlap):
        return EMPTY
    return early_intervals(stage_layout(spec, 0))


def trial_exposed(spec: TrialSpec) -> Intervals:
    """Every element that a trial's ordering may get wrong, the same set at each end and on each tp rank's part."""
    if ordering_of(spec).averages_means:
        whole = Interval(0, tied_elements(spec.model, spec.mesh.tp))
        return (whole,) if len(set(valid_tokens(spec))) > 1 else EMPTY
    return union(trial_misowned(spec), trial_early(spec))


def layernorm_elements(spec: TrialSpec) -> int:
    """Elements of what tensor-parallel ranks replicate and sum over tp, every rank's copy counted; 0 with tp=1."""
    mesh = spec.mesh
    stages = (sequence_parallel_parameters(spec, stage) for stage in range(mesh.num_stages))
    return mesh.tp * sum(parameter.numel for parameters in stages for parameter in parameters)


def layernorm_exposed(spec: TrialSpec) -> int:
    """How many of them a trial's ordering may get wrong: all, or none."""
    ordering = ordering_of(spec)
    uneven = ordering.averages_means and len(set(valid_tokens(spec))) > 1
    return layernorm_elements(spec) if uneven or ordering.mistakes_layernorms else 0


def _exposes(spec: TrialSpec) -> bool:
    return spec.mesh.dp > 1 and spec.mesh.pp > 1 and ordering_of(spec).ties_after_scatter


@lru_cache(maxsize=64)
def ordering_layouts(spec: TrialSpec) -> tuple[BufferLayout, BufferLayout]:
    """A trial's buffers on the first and the last stage (the same one where there is one stage)."""
    return stage_layout(spec, 0), stage_layout(spec, spec.mesh.num_stages - 1)


def stage_layout(spec: TrialSpec, stage: int) -> BufferLayout:
    """A trial's buffer of one stage. Raises LayoutAssertionError where the modelled version would stop."""
    parameters = stage_parameters(spec.probe, spec.model, spec.mesh, stage)
    bucket_size = None
    if spec.overlap and stage == 0:
        bucket_size = Overlap(spec.bucket_size).resolved(spec.mesh.dp)
    return build_layout(parameters, ordering_of(spec).rule, spec.mesh.dp, bucket_size)


def _rule(subject: OrderingName | LayoutVersion | LayoutRule, overlap: bool) -> tuple[LayoutRule, bool]:
    """The layout's rule, and whether the phases expose misowned elements."""
    if isinstance(subject, LayoutRule):
        return subject, True
    if isinstance(subject, LayoutVersion):
        return RULES[subject], True
    ordering: Ordering = ORDERINGS[subject].overlapped() if overlap else ORDERINGS[subject]
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
    """Misowned elements by owning dp rank, in one walk over both: a wide mesh has as many ranges as shards."""
    counts = [0] * layout.dp
    owners = layout.owners(name)
    i = j = 0
    while i < len(misowned) and j < len(owners):
        part, dp_rank = owners[j]
        counts[dp_rank] += max(0, min(misowned[i].stop, part.stop) - max(misowned[i].start, part.start))
        i, j = i + (misowned[i].stop <= part.stop), j + (part.stop <= misowned[i].stop)
    return tuple(counts)


def _nothing_misowned(mesh: Mesh, first: Sequence[ParameterShape], asserts: str | None = None) -> Prediction:
    num_elements = mesh.tp * sum(parameter.numel for parameter in first if parameter.name == WORD_EMBEDDINGS)
    return Prediction(asserts, num_elements, 0, 0, EMPTY, (0,) * mesh.dp, (0,) * mesh.dp)
