"""How large the exact probe's sums can become, and how much of the exact range is left for the rank code.

Summed over the replicas in bfloat16 they must fit into 8 bits. Where those of all replicas do not, replicas take turns:
in one step only some have targets that weigh anything, in the next others, and every sum stays exact. Pure bounds from
sizes alone, for the plan, the live step and the verdict alike. `workers.reference` asserts the real sums in int64 on
top of this.
"""

from __future__ import annotations

from workers.contract import BatchSpec, Dtype, ModelSpec, Normalization, TrialSpec

EXACT_LIMIT = 1 << 24
"""Float32 holds every integer up to here, so sums below it are exact in any order."""
WIRE_LIMITS = {Dtype.FLOAT32: EXACT_LIMIT, Dtype.BFLOAT16: 1 << 8}
"""The same where replicas are summed."""
UNIT_RATIO = 8
"""Of the emptiest rank's unit to the fullest's, where ranks divide by their own tokens (`workers.padding`)."""
CODE_DIGITS = (4, 2, 1)
"""Digits of the rank code that an element may carry, most first; each takes two bits of the exact range."""


def exact_bound(model: ModelSpec, batch: BatchSpec, dp: int) -> int:
    """The most that the terms of any gradient of the exact probe can add up to over a mesh, from sizes alone."""
    return max(tied_bound(model, batch, dp), dp * _num_tokens(model, batch) * 8 * _fan(model))


def tied_bound(model: ModelSpec, batch: BatchSpec, dp: int) -> int:
    """The same for the tied weight, both ends together.

    Weights and upstream gradients are at most 2, biases at most 1, A is a permutation and B spreads hi evenly over lo
    (`workers.models.exact`): each end gives a column of lo or hi at most 4, and a layer adds at most 4 to hi's output
    and `fan` times that to lo's gradient. Token ids are spread evenly over the vocabulary.
    """
    tokens_per_id = -(-_num_tokens(model, batch) // model.vocab_size)
    return dp * tokens_per_id * (8 + 4 * _fan(model) * model.num_layers)


def code_digits(spec: TrialSpec) -> int:
    """Contributors that can sign one element of a trial's tied gradient; 0 where the rank code has no room.

    Every contribution is multiplied by 4^digits to make room, so that the largest sum, code included, must stay
    within `EXACT_LIMIT`, and on the wire within its dtype's: the most digits that fit are taken. All meshes of the
    product's own sizes have room for some (4 on small meshes, 2 for 16 x 64 ranks, 1 in bfloat16 up to pp=5); a request
    for a very large model or batch may have none.
    """
    replicas = summed_replicas(spec.mesh.dp, spec.average_in_collective, spec.normalization)
    summed = replicas_at_once(spec.model, spec.batch, spec.mesh.dp, spec.grad_reduce_dtype)
    summed *= UNIT_RATIO if spec.normalization is Normalization.NUM_TOKENS else 1
    held, carried = (tied_bound(spec.model, spec.batch, number) for number in (replicas, summed))
    wire_limit = WIRE_LIMITS[spec.grad_reduce_dtype]
    fits = (d for d in CODE_DIGITS if coded_bound(held, d) <= EXACT_LIMIT and coded_bound(carried, d) <= wire_limit)
    return next(fits, 0)


def replicas_at_once(model: ModelSpec, batch: BatchSpec, dp: int, grad_reduce_dtype: Dtype) -> int:
    """Replicas that give something to the sums of one step: all in float32, else as many as fit (at least 1)."""
    if grad_reduce_dtype is Dtype.FLOAT32:
        return dp
    return min(dp, max(1, WIRE_LIMITS[grad_reduce_dtype] // exact_bound(model, batch, 1)))


def takes_part(spec: TrialSpec, step: int, dp_rank: int) -> bool:
    """Whether a replica of the exact probe gives something in this step."""
    at_once = replicas_at_once(spec.model, spec.batch, spec.mesh.dp, spec.grad_reduce_dtype)
    return (dp_rank - step * at_once) % spec.mesh.dp < at_once


def summed_replicas(dp: int, average_in_collective: bool, normalization: Normalization) -> int:
    """Replicas' shares that a value may hold, counted in its smallest unit.

    Where the collective averages, a share that is not summed stays undivided: as large as the power of two that stands
    for dp, in units of what is. Where ranks divide by their own valid tokens, the emptiest rank's unit is up to 8 times
    the fullest's (rounded to powers of two).
    """
    if normalization is Normalization.NUM_TOKENS:
        return UNIT_RATIO * dp
    return 1 << (dp - 1).bit_length() if average_in_collective else dp


def coded_bound(largest: int, digits: int) -> int:
    """What a sum of |terms| of at most `largest` becomes once multiplied and signed: 4^digits - 1 is 3 + 12 + 48 ..."""
    multiplier: int = 4**digits
    return multiplier * largest + (multiplier - 1) // 3


def _num_tokens(model: ModelSpec, batch: BatchSpec) -> int:
    return batch.micro_batch_size * batch.num_microbatches * model.seq_len


def _fan(model: ModelSpec) -> int:
    lo = model.hidden_size // 2
    return -(-(model.hidden_size - lo) // lo)
