"""How much of each sequence counts, where gradients are normalised by the number of valid tokens.

Data parallel ranks hold very different numbers, as padded batches do: only then does it show whether a sync divides by
all valid tokens, or takes the mean of every rank's own mean. Pure; the models mask their targets by it.
"""

from __future__ import annotations

from workers.contract import Normalization, TrialSpec
from workers.faults import data_rank

_SHARES = (1, 2, 4)
"""A dp rank's sequences are filled to 1/share, in turn."""


def valid_length(seq_len: int, dp_rank: int, sequence: int) -> int:
    """Tokens of one sequence of a dp rank that count; every second sequence is one shorter. At least 1."""
    return max(1, seq_len // _SHARES[dp_rank % len(_SHARES)] - sequence % 2)


def num_valid_tokens(spec: TrialSpec, dp_rank: int) -> int:
    """Tokens of a dp rank that count in one step."""
    num_sequences = spec.batch.micro_batch_size * spec.batch.num_microbatches
    if spec.normalization is not Normalization.NUM_TOKENS:
        return num_sequences * spec.model.seq_len
    source_rank = data_rank(spec, dp_rank)
    return sum(valid_length(spec.model.seq_len, source_rank, sequence) for sequence in range(num_sequences))


def valid_tokens(spec: TrialSpec) -> tuple[int, ...]:
    """The same of every dp rank."""
    return tuple(num_valid_tokens(spec, dp_rank) for dp_rank in range(spec.mesh.dp))
