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
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.checks.replicas import digest
from workers.communicator import ProcessGroups
from workers.contract import DivergenceRow, End, ProbeName, TiedRow
from workers.deviation import Attribution
from workers.exchange import Answer, Exchange, Expectation, Holding, Piece, positions
from workers.explanation import Wrong
from workers.grad_buffer import select
from workers.grad_sync import Prescale
from workers.intervals import Intervals, intersect
from workers.mesh import Members, end_of

UNIT_ROUNDOFF = 2.0**-24
SMALLEST_SUBNORMAL = 2.0**-149
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
class EndJudgement:
    """One holder's rows for one step; `tied` only on holders of `wte`."""

    divergence: DivergenceRow
    tied: TiedRow | None
    astray: Astray


def judge_end(expectation: Expectation, holding: Holding, world_rank: int, communicator: ProcessGroups) -> EndJudgement:
    """Judge the elements this rank owns. Collective over `expectation.members`.

    Bound of the sync judge: Jeannerod and Rump, "Improved error bounds for inner products in floating-point
    arithmetic" (2013): |computed - exact| <= (n-1) u sum|t| for any order of summation.
    """
    owner = _Owner(expectation, world_rank)
    exchange = Exchange(expectation, world_rank, holding, communicator)
    for round_index in range(exchange.num_rounds):
        owner.add(exchange.round(round_index))
    return owner.conclude(select(holding.synced_P, owner.owned), holding.answer)


class _Owner:
    """Adds up one owner's statistics, piece by piece."""

    def __init__(self, expectation: Expectation, world_rank: int) -> None:
        index = expectation.members.index(world_rank)
        self._expectation = expectation
        self._exact = expectation.probe is ProbeName.EXACT
        end_index, self._dp_rank = divmod(index, expectation.mesh.dp)
        self._end = end_of(expectation.mesh, 0 if end_index == 0 else expectation.mesh.pp - 1) or End.WTE
        dp, num_ends = expectation.mesh.dp, len(expectation.members) // expectation.mesh.dp
        self._other_end = slice((1 - end_index) * dp, (2 - end_index) * dp) if num_ends == 2 else None
        self.owned = expectation.owned[index]
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._peaks = dict.fromkeys(_PEAKS, 0.0)
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._diverged_span = Span()
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
        truth, missing = self._truth(judged, piece.intervals)
        bound = self._bound(terms)
        error = (synced - truth).abs()
        self._judge_sync(piece, synced, truth, missing, bound, error, terms)
        if replayed is not None and piece.floor_C is not None:
            self._judge_reference(piece, synced, terms, replayed, piece.floor_C.double() * factor, bound)
        if piece.other_end_n is not None:
            self._compare_ends(piece, bound)

    def _truth(self, terms_Cn: Tensor, intervals: Intervals) -> tuple[Tensor, Tensor]:
        """The true sum, and the part of it that this ordering is predicted to leave out at this owner (0 elsewhere)."""
        truth = terms_Cn.sum(dim=0)
        missing = torch.zeros_like(truth)
        if self._other_end is not None:
            others = terms_Cn[self._other_end]
            lacking = others.sum(dim=0) - others[self._dp_rank]
            for local in positions(intervals, intersect(self._expectation.misowned, intervals)):
                missing[local.start : local.stop] = lacking[local.start : local.stop]
        return truth, missing

    def _bound(self, terms_Cn: Tensor) -> Tensor:
        magnitude = terms_Cn.abs().sum(dim=0)
        if self._exact:
            return torch.zeros_like(magnitude)
        return rounding_bound(magnitude, len(terms_Cn), self._expectation.prescale)

    def _judge_sync(
        self,
        piece: Piece,
        synced: Tensor,
        truth: Tensor,
        missing: Tensor,
        bound: Tensor,
        error: Tensor,
        terms: Tensor,
    ) -> None:
        self._attribute(piece, synced, terms, bound, ~(error <= bound))
        misowned = torch.zeros_like(error, dtype=torch.bool)
        for local in positions(piece.intervals, intersect(self._expectation.misowned, piece.intervals)):
            misowned[local.start : local.stop] = True
        diverged = ~(error <= bound)
        as_predicted = (synced - (truth - missing)).abs() <= bound
        must = misowned & (missing.abs() > 2 * bound)
        self._count("owned", synced.numel())
        self._count("diverged", diverged)
        self._count("predicted", must)
        # Exactly as predicted also in value: a misowned element with another value than the closed form is a surprise.
        self._count("missed", must & ~(diverged & as_predicted) if self._exact else must & ~diverged)
        self._count("unexpected", diverged & ~misowned | misowned & ~as_predicted)
        self._count("nonfinite", ~torch.isfinite(synced))
        self._diverged_span.include(piece.intervals, diverged)
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
            self._attribution.add(Wrong(elements_n, synced, terms, bound).only(wrong_n))

    def _judge_reference(
        self, piece: Piece, synced: Tensor, terms: Tensor, replayed: Tensor, floor_C: Tensor, bound: Tensor
    ) -> None:
        """Against one process's answer: the sum within rounding and floor, each contributor's part within its floor."""
        truth, missing = self._truth(replayed, piece.intervals)
        allowed = self._bound(replayed).maximum(bound) + 2 * floor_C.sum()
        exceeded = ~((synced - (truth - missing)).abs() <= allowed)
        astray_Cn = ~((terms - replayed).abs() <= 2 * floor_C[:, None])
        if astray_Cn.any():
            self._attribution.add_local(element_ids(piece.intervals, synced.device), astray_Cn)
            self._astray.add(self._expectation.members, piece.intervals, astray_Cn)
        exceeded |= astray_Cn.any(dim=0)
        self._replayed = True
        self._count("reference_exceeded", exceeded)
        self._peak("reference_error", (synced - truth).abs())

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
        return EndJudgement(divergence, self._tied_row() if self._tied else None, self._astray)

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
        value = float(values.max()) if values.numel() else 0.0
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
_PEAKS = ("error", "error_over_bound", "bound", "term", "reference_error", "tied", "weights")
_SUMS = ("value", "value_squared", "truth_squared", "value_truth", "error_squared")


def rounding_bound(magnitude_n: Tensor, num_terms: int, prescale: Prescale) -> Tensor:
    """Largest |float32 sum - exact sum| that rounding can cause, in any order, with each term or partial sum scaled.

    `magnitude_n` is the float64 sum of |scaled terms|. Scaling costs nothing where the divisor is a power of two, else
    two roundings: of the inverse and of the product. A division would cost one, but CUDA divides by a number by
    multiplying with its inverse. One subnormal a term covers underflow. The truth's own float64 error (factor, product,
    sum, and a second sum for what is predicted to be missing) is added.
    """
    extra = 0 if prescale.divisor & (prescale.divisor - 1) == 0 else 2
    roundings = num_terms - 1 + extra
    second_order = 1 + 2 * (num_terms + extra) * UNIT_ROUNDOFF
    relative = roundings * UNIT_ROUNDOFF * second_order + (2 * num_terms + 4) * DOUBLE_ROUNDOFF
    return magnitude_n * relative + num_terms * SMALLEST_SUBNORMAL


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
