"""How large the exact probe's sums can become, and how much of float32's exact range is left for the rank code.

Pure bounds from sizes alone, for the plan, the live step and the verdict alike. `workers.reference` asserts the real
sums in int64 on top of this.
"""

from __future__ import annotations

from workers.contract import BatchSpec, ModelSpec, Normalization, TrialSpec

EXACT_LIMIT = 1 << 24
"""Float32 holds every integer up to here, so sums below it are exact in any order."""
CODE_DIGITS = (4, 2, 1)
"""Digits of the rank code that an element may carry, most first; each takes two bits of the exact range."""


def exact_bound(model: ModelSpec, batch: BatchSpec, dp: int) -> int:
    """The most that the terms of any gradient of the exact probe can add up to over a mesh, from sizes alone."""
    return max(tied_bound(model, batch, dp), dp * _num_tokens(model, batch) * 8 * _fan(model))


def tied_bound(model: ModelSpec, batch: BatchSpec, dp: int) -> int:
    """The same for the tied weight, both ends together.

    Weights and upstream gradients are at most 2, biases at most 1, A is a permutation and B spreads hi evenly over lo
    (`workers.models.exact`): an output is at most 2 + 2 layers, a column's gradient at most 4, and each layer adds at
    most `fan` times that to lo's. Token ids are spread evenly over the vocabulary.
    """
    tokens_per_id = -(-_num_tokens(model, batch) // model.vocab_size)
    wte, lm_head = 4 + 4 * _fan(model) * model.num_layers, 2 * (2 + 2 * model.num_layers)
    return dp * tokens_per_id * (wte + lm_head)


def code_digits(spec: TrialSpec) -> int:
    """Contributors that can sign one element of a trial's tied gradient; 0 where the rank code has no room.

    Every contribution is multiplied by 4^digits to make room, so that the largest sum, code included, must stay
    within `EXACT_LIMIT`: the most digits that fit are taken. All meshes of the product's own sizes have room for some
    (4 on small meshes, 2 for 16 x 64 ranks); a request for a very large model or batch may have none.
    """
    replicas = summed_replicas(spec.mesh.dp, spec.average_in_collective, spec.normalization)
    largest = tied_bound(spec.model, spec.batch, replicas)
    return next((digits for digits in CODE_DIGITS if coded_bound(largest, digits) <= EXACT_LIMIT), 0)


def summed_replicas(dp: int, average_in_collective: bool, normalization: Normalization) -> int:
    """Replicas' shares that a value may hold, counted in its smallest unit.

    Where the collective averages, a share that is not summed stays undivided: as large as the power of two that stands
    for dp, in units of what is. Where ranks divide by their own valid tokens, the emptiest rank's unit is up to 8 times
    the fullest's (`workers.padding`, rounded to powers of two).
    """
    if normalization is Normalization.NUM_TOKENS:
        return 8 * dp
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
