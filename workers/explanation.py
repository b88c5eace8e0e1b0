"""Which multiples of the contributors' gradients a set of wrong elements is: hypotheses, and the one that holds.

Hypotheses come from the shape of the collectives, from the rank code, from sizes and from least squares; each
is checked on every element, and the one that holds in most of them is believed. Where two hold in the same elements
nobody is accused of more than they have in common. Pure arithmetic of one owner; it must not communicate.

Shape legend: C = contributors, in the order of `workers.mesh.ends_members`; n = wrong elements of one piece; k = digits
of the rank code an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from workers.contract import DeviationKind
from workers.exactness import EXACT_LIMIT
from workers.exchange import Expectation
from workers.multiplicity import SIMPLE, fit

_MAX_ROUNDS = 8
_MAX_DENOMINATOR = 4096
_MIN_SHARE = 1 / 8
"""A story that fewer of the elements bear out is chance: small integers coincide."""
_CERTAIN_ELEMENTS = 16
"""No second hypothesis is looked for once one holds in so many elements, and in all of them."""
_NUM_SINGLES = 4
_KINDS = {0.0: DeviationKind.DROPPED, 2.0: DeviationKind.DOUBLED}


@dataclass(frozen=True, slots=True)
class Wrong:
    """Wrong elements of one piece, in float64 (elements: int64)."""

    elements_n: Tensor
    values_n: Tensor
    terms_Cn: Tensor
    """What each contributor gave, scaled as the sum is."""
    bound_n: Tensor
    """The largest rounding error of each value; 0 for exact."""

    def __len__(self) -> int:
        return self.elements_n.numel()

    def only(self, mask_n: Tensor) -> Wrong:
        """Those of a mask."""
        return Wrong(self.elements_n[mask_n], self.values_n[mask_n], self.terms_Cn[:, mask_n], self.bound_n[mask_n])

    @property
    def rounding_n(self) -> Tensor:
        """What float32 can lose in terms and additions: exact's too, where a factor is no power of two."""
        return self.bound_n.maximum(self.terms_Cn.abs().sum(dim=0) * (len(self.terms_Cn) + 3) * 2.0**-24)


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to some elements; `named` are contributors' indices."""

    kind: DeviationKind
    named: tuple[int, ...] = ()
    factor: float | None = None
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The values are these multiples of the terms, float64 [C]."""

    coefficients_C: Tensor
    uncertainty: float = 0.0

    def holds(self, wrong: Wrong) -> Tensor:
        """Where it does. Bool [n]."""
        largest = max(1.0, float(self.coefficients_C.abs().max()))
        bound_n = wrong.rounding_n if self.uncertainty else wrong.bound_n
        allowed_n = bound_n * largest + self.uncertainty * wrong.terms_Cn.abs().sum(dim=0)
        return (wrong.values_n - self.coefficients_C @ wrong.terms_Cn).abs() <= allowed_n

    def stories(self, wrong: Wrong) -> tuple[Story, ...]:
        """One for each multiple other than 1, naming those whose terms are not zero in these elements."""
        telling_C = (wrong.terms_Cn.abs() > wrong.bound_n).any(dim=1)
        factors = self.coefficients_C[telling_C].unique().tolist()
        if len(factors) == 1:
            return (Story(DeviationKind.SCALE, (), factors[0], self.uncertainty),)
        return tuple(
            Story(
                _KINDS.get(factor, DeviationKind.SCALE),
                tuple((telling_C & (self.coefficients_C == factor)).nonzero().flatten().tolist()),
                factor,
                self.uncertainty,
            )
            for factor in factors
            if factor != 1
        )


def explain(wrong: Wrong, expectation: Expectation, index: int) -> Iterator[tuple[Story, Tensor]]:
    """Stories with the elements that bear them out (int64); an element may have several, or be corrupt.

    `index` is the owner's among the contributors.
    """
    finite_n = torch.isfinite(wrong.values_n) & torch.isfinite(wrong.terms_Cn).all(dim=0)
    yield Story(DeviationKind.CORRUPT), wrong.elements_n[~finite_n]
    left = wrong.only(finite_n)
    for _ in range(_MAX_ROUNDS):
        found, holds_n = _believe(left, expectation, index)
        if not found:
            break
        for story in found:
            yield story, left.elements_n[holds_n]
        left = left.only(~holds_n)
    yield Story(DeviationKind.CORRUPT), left.elements_n


def _believe(wrong: Wrong, expectation: Expectation, index: int) -> tuple[tuple[Story, ...], Tensor]:
    """The stories of the hypothesis that holds most often, and where it does; none where nothing holds."""
    best_n = torch.zeros_like(wrong.elements_n, dtype=torch.bool)
    rivals: dict[tuple[Story, ...], None] = {}
    for hypothesis in _hypotheses(wrong, expectation, index):
        holds_n = hypothesis.holds(wrong)
        num_held, most = int(holds_n.sum()), int(best_n.sum())
        if num_held == 1:
            holds_n &= ~_one_bit_apart(wrong)
            num_held = int(holds_n.sum())
        if num_held == 0 or num_held < most:
            continue
        if num_held > most:
            best_n, rivals = holds_n, {}
        if torch.equal(holds_n, best_n):
            rivals[hypothesis.stories(wrong.only(holds_n))] = None
        if num_held == len(wrong) >= _CERTAIN_ELEMENTS:
            break
    if int(best_n.sum()) < max(1, _MIN_SHARE * len(wrong)):
        return (), best_n
    return _common(list(rivals)), best_n


def _common(rivals: list[tuple[Story, ...]]) -> tuple[Story, ...]:
    """What all rival stories have in common: all of one, else the kind without names, else nothing."""
    if len(rivals) == 1:
        return rivals[0]
    kinds = {tuple((story.kind, story.factor) for story in stories) for stories in rivals}
    if len(kinds) > 1:
        return (Story(DeviationKind.CORRUPT),)
    return tuple(Story(kind, (), factor) for kind, factor in kinds.pop())


def _hypotheses(wrong: Wrong, expectation: Expectation, index: int) -> Iterator[Hypothesis]:
    if len(wrong):
        yield from _shapes(wrong, expectation.mesh.dp, index)
        yield from _digits(wrong, expectation)
        yield from _scale(wrong)
        yield from _singles(wrong)
        yield from _fitted(wrong)


def _shapes(wrong: Wrong, dp: int, index: int) -> Iterator[Hypothesis]:
    """Sums that a skipped, repeated or misplaced collective leaves: these need not meet anyone's digit."""
    contributors = torch.arange(len(wrong.terms_Cn), device=wrong.values_n.device)
    own_end, pipeline = contributors // dp == index // dp, contributors % dp == index % dp
    for kept in (own_end | pipeline, own_end, ~own_end, own_end & pipeline, pipeline):
        yield Hypothesis(kept.double())
    yield Hypothesis(own_end.double() + 1)
    yield Hypothesis((~own_end).double() + 1)


def _digits(wrong: Wrong, expectation: Expectation) -> Iterator[Hypothesis]:
    """The rank code: for each contributor the digit that it shows most often where it signs; 1 where it never does."""
    code, num_contributors = expectation.code, len(wrong.terms_Cn)
    if code is None:
        return
    units_n = wrong.values_n / expectation.prescale.factor
    whole_n = (units_n.frac() == 0) & (units_n.abs() <= 2 * EXACT_LIMIT)
    signers_kn, digits_kn = code.read(units_n[whole_n].long(), wrong.elements_n[whole_n])
    real_kn = signers_kn < num_contributors
    seen = torch.bincount(signers_kn[real_kn] * 4 + digits_kn[real_kn], minlength=4 * num_contributors).view(-1, 4)
    digits_C = torch.where(seen.sum(dim=1) > 0, seen.argmax(dim=1), 1)
    yield Hypothesis(digits_C.double())


def _scale(wrong: Wrong) -> Iterator[Hypothesis]:
    """One multiple of the expected sum throughout: a wrong divisor, a mean for a sum."""
    sums_n = wrong.terms_Cn.sum(dim=0)
    weight = float(sums_n.dot(sums_n))
    # A single element is a multiple of anything.
    if len(wrong) < 2 or weight == 0:
        return
    factor = float(wrong.values_n.dot(sums_n)) / weight
    uncertainty = max(1.0, abs(factor)) * float(wrong.rounding_n.norm()) / weight**0.5
    simple = float(Fraction(factor).limit_denominator(_MAX_DENOMINATOR))
    factor = simple if abs(simple - factor) <= uncertainty else factor
    if abs(factor - 1) > uncertainty:
        yield Hypothesis(torch.full_like(wrong.terms_Cn[:, 0], factor), uncertainty)


def _singles(wrong: Wrong) -> Iterator[Hypothesis]:
    """One share dropped or doubled, told by its size; the few contributors whose share has it most often."""
    telling_Cn = wrong.terms_Cn.abs() > 8 * wrong.bound_n
    excess_n = wrong.values_n - wrong.terms_Cn.sum(dim=0)
    for factor, sign in ((0.0, -1), (2.0, 1)):
        fits_Cn = telling_Cn & ((excess_n - sign * wrong.terms_Cn).abs() <= 2 * wrong.bound_n)
        counts_C = fits_Cn.sum(dim=1)
        for contributor in counts_C.argsort(descending=True, stable=True)[:_NUM_SINGLES].tolist():
            if counts_C[contributor]:
                coefficients_C = torch.ones_like(wrong.terms_Cn[:, 0])
                coefficients_C[contributor] = factor
                yield Hypothesis(coefficients_C)


def _fitted(wrong: Wrong) -> Iterator[Hypothesis]:
    """Least squares over neighbouring elements, which mostly share a story."""
    fitted = fit(wrong.values_n, wrong.terms_Cn, wrong.rounding_n)
    if fitted is not None:
        simple = all(coefficient in SIMPLE for coefficient in fitted.coefficients_C.tolist())
        yield Hypothesis(fitted.coefficients_C, 0.0 if simple else fitted.uncertainty)


def _one_bit_apart(wrong: Wrong) -> Tensor:
    """Where the value is the right sum with one bit flipped, which a small share can look like. Bool [n]."""
    sums_n = wrong.terms_Cn.sum(dim=0)
    bits_n = wrong.values_n.float().view(torch.int32) ^ sums_n.float().view(torch.int32)
    return (bits_n != 0) & (bits_n & (bits_n - 1) == 0)
