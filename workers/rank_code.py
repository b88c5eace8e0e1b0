"""The exact probe's rank code: every contributor signs its tied gradient, in band, without touching the layout.

What is synchronised is `4^k * g + code` with k digits an element (k = 4 where it fits: `256 * g + code`). Contributor
c adds 4^(c mod k) to the elements e of its group, `(e + e // G) % G == c // k` with G = ceil(contributors / k). In a
right sum each of an element's k digits is 1; a 0 is a contributor that was dropped, a 2 one that was added twice, and
the digit's place says which. The shift by e // G lets every group meet every column and every owner's shard.

The code is always on, never a diagnosis after the fact: a fault that strikes with probability 0.3 would be gone by the
time of a second run, and the sum that is judged must be the sum that was signed. It costs the zero-tolerance claim
nothing. It is made of integers below the same 2^24, asserted in int64 (`workers.reference`); the integer answer
carries the same code; and it makes every element more sensitive, since a contribution that is zero by chance is none
where it is signed. A hook on the weight itself puts it in, before anything accumulates the gradient: every microbatch
is multiplied and a step's first brings the code, so that whoever's stack synchronises, and wherever a reduce-scatter
starts in the midst of backward, what it gets is signed. Where sums would leave 2^24 fewer digits are used, or none
(`workers.exactness.code_digits`); then the verdict says so and a wrong share is named by its size alone.

Shape legend: P = elements of the tied weight; n = some of its elements; k = digits an element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.contract import End, Mesh, ProbeName, TrialSpec
from workers.exactness import code_digits

_BASE = 4


@dataclass(frozen=True, slots=True)
class RankCode:
    """Who signs which element. Contributors count as in `workers.mesh.ends_members`: wte by dp_rank, then lm_head."""

    num_contributors: int
    digits: int
    """Contributors that sign one element."""

    @property
    def multiplier(self) -> int:
        """What gradients are multiplied by to make room."""
        return int(_BASE**self.digits)

    @property
    def num_groups(self) -> int:
        """Groups of contributors that sign the same elements."""
        return -(-self.num_contributors // self.digits)

    def group(self, elements_n: Tensor) -> Tensor:
        """Which group signs each element. Int64 [n] -> int64 [n]."""
        return (elements_n + elements_n // self.num_groups) % self.num_groups

    def code(self, contributor: int, num_elements: int) -> Tensor:
        """What a contributor adds to each of the first `num_elements` elements. Int64 [P], on CPU."""
        group, place = divmod(contributor, self.digits)
        signed_P = self.group(torch.arange(num_elements)) == group
        return signed_P.long() * int(_BASE**place)

    def sign(self, grad_P: Tensor, contributor: int) -> Tensor:
        """A contributor's whole integer gradient, signed. Int64 [P] -> int64 [P]."""
        return grad_P * self.multiplier + self.code(contributor, grad_P.numel()).to(grad_P.device)

    def read(self, sums_n: Tensor, elements_n: Tensor) -> tuple[Tensor, Tensor]:
        """The digits of summed elements, int64 [n] each: (contributors [k, n], digits [k, n]).

        A place of the last group that no contributor has reads as a contributor >= num_contributors.
        """
        places_k1 = torch.arange(self.digits, device=sums_n.device)[:, None]
        # `%` in Python's sense: the code of a negative sum is positive too.
        code_n = torch.remainder(sums_n, self.multiplier)
        digits_kn = code_n // _BASE**places_k1 % _BASE
        return self.group(elements_n) * self.digits + places_k1, digits_kn


class Signer:
    """Signs the gradient of one parameter on its way out of backward, whatever accumulates it.

    Every microbatch's gradient is multiplied; the first of a step also brings the code.
    """

    def __init__(self, parameter: nn.Parameter, code: RankCode, contributor: int) -> None:
        self._multiplier = code.multiplier
        self._code = code.code(contributor, parameter.numel()).view(parameter.shape).to(parameter)
        self._due = False
        parameter.register_hook(self._sign)

    def begin_step(self) -> None:
        """The next gradient is the first of a step."""
        self._due = True

    def _sign(self, grad: Tensor) -> Tensor:
        signed = grad * self._multiplier
        if self._due:
            self._due = False
            signed += self._code
        return signed


class NoSigner:
    """For a rank that has nothing to sign."""

    def begin_step(self) -> None:
        """Nothing to do."""


def rank_code(spec: TrialSpec) -> RankCode | None:
    """The code of a trial; None for gpt and where it has no room."""
    digits = code_digits(spec) if spec.probe is ProbeName.EXACT else 0
    num_ends = 2 if spec.mesh.pp > 1 else 1
    return RankCode(num_ends * spec.mesh.dp, digits) if digits else None


def contributor_index(mesh: Mesh, end: End, dp_rank: int) -> int:
    """A contributor's place in the order of `workers.mesh.ends_members`."""
    return dp_rank if end is End.WTE else mesh.dp + dp_rank


def sign_gradients(spec: TrialSpec, tied: nn.Parameter | None, end: End | None, dp_rank: int) -> Signer | NoSigner:
    """From now on this rank's tied gradient carries its code, if the trial has one and the rank an end."""
    code = rank_code(spec)
    if code is None or tied is None or end is None:
        return NoSigner()
    return Signer(tied, code, contributor_index(spec.mesh, end, dp_rank))
