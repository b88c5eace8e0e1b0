"""In what dtype buckets are summed over the data-parallel replicas, and what that costs.

main_grad is float32 in any case. Reduced in bfloat16, a whole bucket is cast into a communication buffer, scaled and
summed there, and cast back over main_grad, what was not summed included. So Megatron-LM has it where
`grad_reduce_in_fp32` is off and `param_name_patterns_for_fp32_local_accumulation` is `all`; with the former alone
main_grad would be bfloat16, too. The tied weight is added between the ends from main_grad, in float32, and tokens
divide main_grad. Must not communicate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.contract import Dtype

UNIT_ROUNDOFFS = {Dtype.FLOAT32: 2.0**-24, Dtype.BFLOAT16: 2.0**-8}
"""Largest relative error of one rounding to nearest."""
SMALLEST_SUBNORMALS = {Dtype.FLOAT32: 2.0**-149, Dtype.BFLOAT16: 2.0**-133}
_TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Wire:
    """How a bucket travels."""

    dtype: Dtype = Dtype.FLOAT32
    num_replicas: int = 1
    """Terms of each sum."""
    divisor: int = 1
    """What terms or sums are divided by on the wire."""

    def load(self, bucket_N: Tensor) -> Tensor:
        """What is to be scaled and summed: the bucket itself [N], or a copy in the wire's dtype. Local."""
        return bucket_N.to(_TORCH_DTYPES[self.dtype])

    def unload(self, carried_N: Tensor, bucket_N: Tensor) -> None:
        """Put what came off the wire into the bucket, in place. Local."""
        if carried_N is not bucket_N:
            bucket_N.copy_(carried_N)

    @property
    def relative_error(self) -> float:
        """Largest distance of a carried sum from the exact sum, over its sum of |terms|; 0 in float32.

        In float32 additions are counted where the whole sum is judged, whatever their order. In bfloat16 each term is
        rounded by the cast, and once more by a divisor that is no power of two; the additions of n terms, in any order,
        are off by (n-1) u (Jeannerod and Rump), with u as large as 2^-8, so that products of errors count.
        gloo and torch add two bfloat16 in float32 and round: as one rounding, since 24 >= 2 * 8 + 2 bits.
        """
        if self.dtype is Dtype.FLOAT32:
            return 0.0
        unit = UNIT_ROUNDOFFS[self.dtype]
        per_term = 1 if self.divisor & (self.divisor - 1) == 0 else 2
        return math.expm1(math.log1p((self.num_replicas - 1) * unit) + per_term * math.log1p(unit))


FLOAT32_WIRE = Wire()
"""Sums of the buckets themselves."""
