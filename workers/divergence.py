"""Judging the tied weight's synchronised gradient, on the rank that owns it, against what it should be.

Every holder of the tied weight sends each owner its own local gradient, moved by all-to-all and not by the collective
under test. The owner adds them in float64, so it knows the true sum, what the ordering is predicted to yield
instead, and the largest distance that float32 rounding can explain in any order of additions. Statistics leave
this file, gradients do not.

Shape legend: P = elements of the tied weight; n = elements of one piece of an owner's intervals; C = contributors, in
the order of `workers.mesh.ends_members`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.checks.replicas import digest
from workers.communicator import ProcessGroups
from workers.contract import DivergenceRow, Dtype, ProbeName, TiedRow
from workers.contributions import Mixture
from workers.deviation import Attribution
from workers.exchange import Answer, Exchange, Expectation, Holding, Piece, positions
from workers.explanation import Wrong
from workers.grad_buffer import select
from workers.grad_sync import Prescale
from workers.intervals import Intervals, intersect
from workers.mesh import Members
from workers.wire import SMALLEST_SUBNORMALS, UNIT_ROUNDOFFS

UNIT_ROUNDOFF = UNIT_ROUNDOFFS[Dtype.FLOAT32]
SMALLEST_SUBNORMAL = SMALLEST_SUBNORMALS[Dtype.FLOAT32]
DOUBLE_ROUNDOFF = 2.0**-53


class Span:
    """The first and the last of the elements that were picked so far."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None

    def include(self, intervals: Intervals, picked_n: Tensor) -> None:
        """Take in the picked elements of one piece."""
        found = picked_n.nonzero()
        if found.numel() == 0:
            return
        first, last = element_at(intervals, int(found[0])), element_at(intervals, int(found[-1]))
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)


class Astray:
    """Whose own gradients were wrong before any collective, and between which elements."""

    def __init__(self) -> None:
        self.world_ranks: set[int] = set()
        self.span = Span()

    def add(self, members: Members, intervals: Intervals, astray_Cn: Tensor) -> None:
        """Take in one piece; a mask for each contributor."""
        self.world_ranks |= {members[index] for index in astray_Cn.any(dim=1).nonzero().flatten().tolist()}
        self.span.include(intervals, astray_Cn.any(dim=0))


@dataclass(frozen=True, slots=True)
class Surprise:
    """How far values are from what the ordering is predicted to leave, right or wrong."""

    span: Span
    """Of the elements that are too far."""
    max_abs: float
    max_over_bound: float


@dataclass(frozen=True, slots=True)
class EndJudgement:
    """One holder's rows for one step; `tied` only on holders of `wte`."""

    divergence: DivergenceRow
    tied: TiedRow | None
    astray: Astray
    surprise: Surprise


@dataclass(frozen=True, slots=True)
class _ClosedForm:
    """What an ordering is predicted to yield for one piece, float64 [n]: truth - missing, within bound."""

    truth: Tensor
    missing: Tensor
    deviates: Tensor
    """Where something else than the truth is predicted; bool."""
    bound: Tensor


def judge_end(expectation: Expectation, holding: Holding, world_rank: int, communicator: ProcessGroups) -> EndJudgement:
    """Judge the elements this rank owns. Collective over `expectation.members`.

    Bound of the sync judge: Jeannerod and Rump, "Improved error bounds for inner products in floating-point
    arithmetic" (2013): |computed - exact| <= (n-1) u sum|t| for any order of summation.
    """
    exchange = Exchange(expectation, world_rank, holding, communicator)
    rounds = (exchange.round(round_index) for round_index in range(exchange.num_rounds))
    return judge_pieces(expectation, world_rank, rounds, holding.synced_P, holding.answer)


def judge_pieces(
    expectation: Expectation, world_rank: int, pieces: Iterable[Piece], synced_P: Tensor, answer: Answer | None
) -> EndJudgement:
    """Judge what a holder owns, given the pieces of it in order, however they came together. Local."""
    owner = _Owner(expectation, world_rank)
    for piece in pieces:
        owner.add(piece)
    return owner.conclude(select(synced_P, owner.owned), answer)


class _Owner:
    """Adds up one owner's statistics, piece by piece."""

    def __init__(self, expectation: Expectation, world_rank: int) -> None:
        index = expectation.members.index(world_rank)
        self._expectation = expectation
        self._exact = expectation.probe is ProbeName.EXACT
        end_index, self._dp_rank = divmod(index, expectation.mesh.dp)
        self._end = expectation.contributor(index).end
        tied_sync = expectation.tied_sync
        self._mixtures = tied_sync.mixtures(end_index, self._dp_rank) if tied_sync else ()
        self.owned = expectation.owned[index]
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._peaks = dict.fromkeys(_PEAKS, 0.0)
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._diverged_span, self._surprise_span = Span(), Span()
        self._astray = Astray()
        self._replayed = False
        self._tied = False
        self._attribution = Attribution(expectation, index)

    def add(self, piece: Piece) -> None:
        """Judge one piece."""
        if not piece.intervals:
            return
        factor = self._expectation.prescale.factor
        synced = piece.synced_n.double()
        terms = piece.local_Cn.double() * factor
        replayed = None if piece.replay_Cn is None else piece.replay_Cn.double() * factor
        # The exact probe's truth is the integer answer, not what the ranks say they computed.
        judged = replayed if self._exact and replayed is not None else terms
        bound = self._bound(terms.abs().sum(dim=0), len(terms))
        closed = self._closed_form(piece, judged, bound)
        self._judge_sync(piece, synced, closed, bound, terms)
        if replayed is not None and piece.floor_C is not None:
            floor_C = piece.floor_C.double() * factor
            self._judge_reference(piece, synced, terms, replayed, floor_C, self._closed_form(piece, replayed, bound))
        if piece.other_end_n is not None:
            self._compare_ends(piece, bound)

    def _closed_form(self, piece: Piece, terms_Cn: Tensor, bound: Tensor) -> _ClosedForm:
        """What this ordering is predicted to leave at this owner; `terms_Cn` are scaled, `bound` is the true sum's."""
        truth = terms_Cn.sum(dim=0)
        closed = _ClosedForm(truth, torch.zeros_like(truth), torch.zeros_like(truth, dtype=torch.bool), bound.clone())
        for mixture in self._mixtures:
            for local in positions(piece.intervals, intersect(mixture.elements, piece.intervals)):
                here = slice(local.start, local.stop)
                late_Cn = None if piece.late_Cn is None else piece.late_Cn[:, here].double()
                missing, magnitude = self._missing(mixture, terms_Cn[:, here], late_Cn)
                closed.missing[here] = missing
                closed.deviates[here] = True
                num_terms = len(terms_Cn) + mixture.extra_roundings
                closed.bound[here] = bound[here].maximum(self._bound(magnitude, num_terms))
        return closed

    def _missing(self, mixture: Mixture, terms_Cn: Tensor, late_Cn: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the true sum has and the owner's value lacks, and the sizes of the terms of that value."""
        whole_C = terms_Cn.new_tensor(mixture.whole) / self._expectation.prescale.factor
        missing, magnitude = (1 - whole_C) @ terms_Cn, whole_C.abs() @ terms_Cn.abs()
        if late_Cn is not None:
            late_C = terms_Cn.new_tensor(mixture.late)
            missing, magnitude = missing - late_C @ late_Cn, magnitude + late_C.abs() @ late_Cn.abs()
        return missing, magnitude

    def _bound(self, magnitude_n: Tensor, num_terms: int) -> Tensor:
        if self._exact:
            return torch.zeros_like(magnitude_n)
        return rounding_bound(magnitude_n, num_terms, self._expectation.prescale)

    def _judge_sync(self, piece: Piece, synced: Tensor, closed: _ClosedForm, bound: Tensor, terms: Tensor) -> None:
        truth, deviates = closed.truth, closed.deviates
        error = (synced - truth).abs()
        diverged = ~(error <= bound)
        self._attribute(piece, synced, terms, bound, diverged)
        off = (synced - (truth - closed.missing)).abs()
        as_predicted = off <= closed.bound
        surprising = diverged & ~deviates | deviates & ~as_predicted
        must = deviates & (closed.missing.abs() > bound + closed.bound)
        self._count("owned", synced.numel())
        self._count("diverged", diverged)
        self._count("predicted", must)
        # Exactly as predicted also in value: such an element with another value than the closed form is a surprise.
        self._count("missed", must & ~(diverged & as_predicted) if self._exact else must & ~diverged)
        self._count("unexpected", surprising)
        self._count("nonfinite", ~torch.isfinite(synced))
        self._diverged_span.include(piece.intervals, diverged)
        self._surprise_span.include(piece.intervals, surprising)
        self._peak("off", off)
        self._peak("off_over_bound", _ratio(off, closed.bound))
        self._peak("error", error)
        self._peak("error_over_bound", _ratio(error, bound))
        self._peak("bound", bound)
        self._peak("term", terms.abs())
        self._sum("value", synced.sum())
        self._sum("value_squared", synced.dot(synced))
        self._sum("truth_squared", truth.dot(truth))
        self._sum("value_truth", synced.dot(truth))
        self._sum("error_squared", error.dot(error))

    def _attribute(self, piece: Piece, synced: Tensor, terms: Tensor, bound: Tensor, diverged: Tensor) -> None:
        """Tell whose share is wrong where the sum is not that of what the contributors gave."""
        wrong_n = diverged & ~((synced - terms.sum(dim=0)).abs() <= bound)
        if wrong_n.any():
            elements_n = element_ids(piece.intervals, wrong_n.device)
            wire = self._expectation.prescale.wire
            self._attribution.add(Wrong(elements_n, synced, terms, bound, wire.dtype).only(wrong_n))

    def _judge_reference(
        self,
        piece: Piece,
        synced: Tensor,
        terms: Tensor,
        replayed: Tensor,
        floor_C: Tensor,
        closed: _ClosedForm,
    ) -> None:
        """Against one process's answer: the sum within rounding and floor, each contributor's part within its floor."""
        allowed = self._bound(replayed.abs().sum(dim=0), len(replayed)).maximum(closed.bound) + 2 * floor_C.sum()
        exceeded = ~((synced - (closed.truth - closed.missing)).abs() <= allowed)
        astray_Cn = ~((terms - replayed).abs() <= 2 * floor_C[:, None])
        if astray_Cn.any():
            self._attribution.add_local(element_ids(piece.intervals, synced.device), astray_Cn)
            self._astray.add(self._expectation.members, piece.intervals, astray_Cn)
        exceeded |= astray_Cn.any(dim=0)
        self._replayed = True
        self._count("reference_exceeded", exceeded)
        self._peak("reference_error", (synced - closed.truth).abs())

    def _compare_ends(self, piece: Piece, bound: Tensor) -> None:
        assert piece.other_end_n is not None
        self._tied = True
        difference = (piece.synced_n.double() - piece.other_end_n.double()).abs()
        allowed = torch.zeros_like(bound) if self._expectation.bit_tied else 2 * bound
        self._count("tied", difference.numel())
        self._count("tied_unequal", ~(difference == 0))
        self._count("tied_exceeded", ~(difference <= allowed))
        self._peak("tied", difference)
        if piece.other_weight_n is not None:
            self._count("weights", piece.weight_n.numel())
            self._peak("weights", (piece.weight_n.double() - piece.other_weight_n.double()).abs())

    def conclude(self, synced_owned: Tensor, answer: Answer | None) -> EndJudgement:
        """The rows, once every piece is in."""
        counts, peaks, sums = self._counts, self._peaks, self._sums
        truth_squared = sums["truth_squared"]
        divergence = DivergenceRow(
            end=self._end,
            owned_elements=counts["owned"],
            diverged_elements=counts["diverged"],
            predicted_elements=counts["predicted"],
            missed_elements=counts["missed"],
            unexpected_elements=counts["unexpected"],
            nonfinite_elements=counts["nonfinite"],
            first_diverged=self._diverged_span.first,
            last_diverged=self._diverged_span.last,
            max_abs_error=peaks["error"],
            relative_l2_error=_divide(math.sqrt(sums["error_squared"]), math.sqrt(truth_squared)),
            max_error_over_bound=peaks["error_over_bound"],
            ratio_to_expected=sums["value_truth"] / truth_squared if truth_squared else math.nan,
            reference_max_abs_error=peaks["reference_error"] if self._replayed else None,
            reference_exceeded_elements=counts["reference_exceeded"],
            min_detectable_share=_divide(peaks["bound"], peaks["term"]),
            sum=sums["value"],
            l2=math.sqrt(sums["value_squared"]),
            digest=digest([synced_owned]),
            deviations=self._attribution.conclude(answer),
        )
        surprise = Surprise(self._surprise_span, peaks["off"], peaks["off_over_bound"])
        return EndJudgement(divergence, self._tied_row() if self._tied else None, self._astray, surprise)

    def _tied_row(self) -> TiedRow:
        return TiedRow(
            num_elements=self._counts["tied"],
            unequal_elements=self._counts["tied_unequal"],
            max_abs_difference=self._peaks["tied"],
            exceeded_elements=self._counts["tied_exceeded"],
            weights_max_abs_difference=self._peaks["weights"],
            weights_num_elements=self._counts["weights"],
        )

    def _count(self, name: str, what: int | Tensor) -> None:
        self._counts[name] += what if isinstance(what, int) else int(torch.count_nonzero(what))

    def _peak(self, name: str, values: Tensor) -> None:
        # torch's max keeps a NaN; so must this, or one rank's NaN would vanish between two pieces.
        value = float(values.max())
        held = self._peaks[name]
        self._peaks[name] = value if math.isnan(value) or value > held else held

    def _sum(self, name: str, value: Tensor) -> None:
        self._sums[name] += float(value)


_COUNTS = (
    "owned",
    "diverged",
    "predicted",
    "missed",
    "unexpected",
    "nonfinite",
    "reference_exceeded",
    "tied",
    "tied_unequal",
    "tied_exceeded",
    "weights",
)
_PEAKS = ("error", "error_over_bound", "off", "off_over_bound", "bound", "term", "reference_error", "tied", "weights")
_SUMS = ("value", "value_squared", "truth_squared", "value_truth", "error_squared")


def rounding_bound(magnitude_n: Tensor, num_terms: int, prescale: Prescale) -> Tensor:
    """Largest |computed sum - exact sum| that rounding can cause, in any order, with each term or partial sum scaled.

    `magnitude_n` is the float64 sum of |scaled terms|. Scaling costs nothing where the divisor is a power of two, else
    two roundings: of the inverse and of the product. A division would cost one, but CUDA divides by a number by
    multiplying with its inverse. One subnormal a term covers underflow. Where replicas are summed in another dtype than
    float32 (`prescale.wire`) that error is put on top. The truth's own float64 error (factor, product,
    sum, and a second sum for what is predicted to be missing) is added.
    """
    extra = 0 if prescale.divisor & (prescale.divisor - 1) == 0 else 2
    roundings = num_terms - 1 + extra
    second_order = 1 + 2 * (num_terms + extra) * UNIT_ROUNDOFF
    relative = roundings * UNIT_ROUNDOFF * second_order + (2 * num_terms + 4) * DOUBLE_ROUNDOFF
    relative += (1 + relative) * prescale.wire.relative_error
    return magnitude_n * relative + num_terms * SMALLEST_SUBNORMALS[prescale.wire.dtype]


def element_at(intervals: Intervals, position: int) -> int:
    """The element at a position of the laid-out intervals. IndexError past their end."""
    for interval in intervals:
        size = interval.stop - interval.start
        if position < size:
            return interval.start + position
        position -= size
    raise IndexError(f"position {position} lies past the last of {len(intervals)} intervals")


def element_ids(intervals: Intervals, device: torch.device) -> Tensor:
    """The elements of laid-out intervals, in order. Int64 [n]."""
    return torch.cat([torch.arange(interval.start, interval.stop, device=device) for interval in intervals])


def _ratio(error: Tensor, bound: Tensor) -> Tensor:
    """Error / bound with 0/0 counted as 0."""
    return torch.where(error == 0, torch.zeros_like(error), error / bound)


def _divide(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return 0.0 if numerator == 0 else math.inf
    return numerator / denominator
