"""How often each contributor's gradient is in a sum: least squares of the sum's elements on the local gradients.

A sum of n elements is `m_1 t_1 + ... + m_C t_C` up to rounding, where m is 1 for everyone in a right sum, 0 for who was
dropped, 2 for who was added twice, 1/2 for a mean. Works for any probe and needs no rank code, but needs elements:
as many as contributors at least, and terms that are not too much alike. Pure arithmetic; it must not communicate.

Shape legend: C = contributors; n = elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CONTRIBUTORS = 256
"""Above this (dp = 128) nothing is fitted: a singular value decomposition would cost more than the step."""
MAX_UNCERTAINTY = 1 / 8
"""A coefficient that is less certain than this tells 0, 1/2, 1 and 2 apart too poorly to accuse anyone."""
_ELEMENTS_PER_CONTRIBUTOR = 8
_MIN_ELEMENTS = 64
SIMPLE = (0.0, 0.5, 1.0, 2.0)
"""What a coefficient is taken for where it is within its uncertainty."""


@dataclass(frozen=True, slots=True)
class Multiplicities:
    """Coefficients of one set of elements, float64 [C]."""

    coefficients_C: Tensor
    """1 where a contributor's terms are all zero and nothing can be said."""
    known_C: Tensor
    """Bool: whose terms are not all zero."""
    uncertainty: float
    """Largest distance from the true coefficients that rounding can cause."""


def fit(values_n: Tensor, terms_Cn: Tensor, bound_n: Tensor) -> Multiplicities | None:
    """Each contributor's coefficient, or None where the elements cannot tell. All float64.

    `bound_n` is the largest rounding error of each value. With v = T^t m + r and |r| <= bound, no coefficient is off by
    more than |bound|_2 / s, s the smallest singular value of the terms. With fewer elements than contributors the
    shard is too short; where that quotient exceeds `MAX_UNCERTAINTY` its terms are too much alike.
    """
    num_elements = min(values_n.numel(), max(_MIN_ELEMENTS, _ELEMENTS_PER_CONTRIBUTOR * len(terms_Cn)))
    values, terms, bound = (t[..., :num_elements].cpu() for t in (values_n, terms_Cn, bound_n))
    known_C = terms.ne(0).any(dim=1)
    num_known = int(known_C.sum())
    if not 0 < num_known <= min(num_elements, MAX_CONTRIBUTORS):
        return None
    solved = torch.linalg.lstsq(terms[known_C].T, values[:, None], driver="gelsd")
    smallest = float(solved.singular_values.min())
    largest_coefficient = max(1.0, float(solved.solution.abs().max()) + MAX_UNCERTAINTY)
    # The solver's own error, for singular values s: eps * (s_max / s_min) of the solution, with room to spare.
    numerical = 2**-44 * float(solved.singular_values.max()) / smallest if smallest else float("inf")
    uncertainty = (float(bound.norm()) / smallest if smallest else float("inf")) + numerical
    uncertainty *= largest_coefficient
    if not uncertainty <= MAX_UNCERTAINTY:
        return None
    coefficients_C = torch.ones(len(terms), dtype=torch.float64)
    coefficients_C[known_C] = snap(solved.solution.flatten(), uncertainty)
    return Multiplicities(coefficients_C.to(values_n.device), known_C.to(values_n.device), uncertainty)


def snap(coefficients_C: Tensor, uncertainty: float) -> Tensor:
    """Coefficients within `uncertainty` of 0, 1/2, 1 or 2 taken for these. Float64 [C]."""
    snapped = coefficients_C.clone()
    for simple in SIMPLE:
        snapped[(coefficients_C - simple).abs() <= uncertainty] = simple
    return snapped
