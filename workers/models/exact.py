"""The exact probe: a model whose every gradient is a small integer, so that any differing bit is a fault.

The hidden state splits into halves lo and hi, and layer l adds to hi only:

    u = A lo - b,    hi += B relu(u)

A is a permutation and B has one nonzero per row; b is 0 or 1, embedding entries are 1 or 2 in size. Each hidden
column has one sign, carried by the embedding, A and B, so that u and relu(u) are never negative and no two terms of
a tied gradient ever have opposite signs: nothing cancels, and the size of a sum is the sum of the sizes. lo never
changes and the gradient of hi never changes, so growth is linear in depth. The loss is linear in the logits.

Cut over tensor-parallel ranks as an MLP with sequence parallelism: A by rows, B by columns, the vocabulary by rows, and
between layers each rank has one part of the sequence, where a replicated bias of zeros is added behind B: the stand-in
for a layernorm, whose gradient is a part on each rank. Ranks meet only where a flow yields (`workers.tensor_parallel`).

Must stay in float32 and within 2^24; `workers.exactness` bounds its sums, `workers.reference` holds the integer answer
and the assertion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from workers.contract import ModelSpec
from workers.errors import SpecError
from workers.models import draws
from workers.models.vocabulary import look_up, target_logits
from workers.models.weights import Shard, cut
from workers.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS, allocated
from workers.tensor_parallel import Flow, gather_sequence, reduce_replicated, reduce_sequence, run_flow


@dataclass(frozen=True, slots=True)
class Coupling:
    """One layer: A reads lo column `permutation_L[i]` into u_i, B reads u column `source_R[j]` into hi_j."""

    permutation_L: torch.Tensor
    source_R: torch.Tensor
    bias_L: torch.Tensor


def split_sizes(hidden_size: int) -> tuple[int, int]:
    """Widths of lo and hi. Raises SpecError where one of them would be empty."""
    if hidden_size < 2:
        raise SpecError(f"hidden_size {hidden_size} is too small for the exact probe: it splits in two; use 2 or more")
    return hidden_size // 2, hidden_size - hidden_size // 2


def draw_signs(model: ModelSpec, seed: int, step: int) -> torch.Tensor:
    """The sign of each hidden column: int64 [H] of -1 and 1."""
    return draws.integers(0, 2, (model.hidden_size,), draws.stream(seed, "exact", "signs", step)) * 2 - 1


def draw_tied(model: ModelSpec, seed: int, step: int) -> torch.Tensor:
    """The tied weight: int8 [V, H] of sign times 1 or 2."""
    generator = draws.stream(seed, "exact", "tied", step)
    sizes_VH = draws.integers(1, 3, (model.vocab_size, model.hidden_size), generator, dtype=torch.int8)
    return sizes_VH.mul_(draw_signs(model, seed, step).to(torch.int8))


def draw_coupling(model: ModelSpec, seed: int, step: int, layer: int) -> Coupling:
    """The structure of the layer with this global index."""
    width_lo, width_hi = split_sizes(model.hidden_size)
    generator = draws.stream(seed, "exact", "layer", layer, step)
    return Coupling(
        permutation_L=draws.tiled_permutations(width_lo, width_lo, generator),
        source_R=draws.tiled_permutations(width_lo, width_hi, generator),
        bias_L=draws.integers(0, 2, (width_lo,), generator),
    )


def draw_tokens(
    model: ModelSpec, num_sequences: int, seed: int, step: int, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets: permutations of the vocabulary, tiled. Int64 [num_sequences, S] each.

    Once a dp rank has as many tokens as the vocabulary has ids, every id is an input and a target there.
    """
    shape = (num_sequences, model.seq_len)
    count = num_sequences * model.seq_len
    tokens, targets = (
        draws.tiled_permutations(model.vocab_size, count, draws.stream(seed, "exact", kind, step, dp_rank))
        for kind in ("tokens", "targets")
    )
    return tokens.view(shape), targets.view(shape)


def upstream(targets: torch.Tensor) -> torch.Tensor:
    """The weight of each token's logit in the loss, from the target alone: 1 or 2, and 0 where it does not count."""
    return torch.where(targets >= 0, 1 + targets % 2, 0)


def token_loss(logits_BSV: torch.Tensor, targets_BS: torch.Tensor, shard: Shard) -> Flow[torch.Tensor]:
    """Sum over the tokens of `upstream` times the target's logit. Scalar; linear, so gradients are integers."""
    picked_BS = target_logits(logits_BSV, targets_BS, shard.tp_rank)
    return (yield reduce_replicated((picked_BS * upstream(targets_BS)).sum()))


class Matrix(nn.Module):
    """A bare weight."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))


class Layer(nn.Module):
    """u = A lo - b; hi += B relu(u), and the replicated bias where the model is cut."""

    def __init__(self, width_lo: int, width_hi: int, shard: Shard) -> None:
        super().__init__()
        width = shard.part(width_lo)
        self.a = Matrix(width, width_lo)
        self.b = Matrix(width_hi, width)
        self.bias = nn.Parameter(torch.empty(width))
        self.row_bias = nn.Parameter(torch.empty(width_hi)) if shard.tp > 1 else None

    def flow(self, lo: torch.Tensor, hi: torch.Tensor) -> Flow[torch.Tensor]:
        """The new hi, [B, S / tp, width_hi], from both halves of the hidden state."""
        whole_lo = yield gather_sequence(lo)
        u = F.linear(whole_lo, self.a.weight) - self.bias
        summed = yield reduce_sequence(F.linear(F.relu(u), self.b.weight))
        return hi + summed if self.row_bias is None else hi + summed + self.row_bias


class Embedding(nn.Module):
    """The word embedding."""

    def __init__(self, model: ModelSpec, shard: Shard) -> None:
        super().__init__()
        self.word_embeddings = Matrix(shard.vocab_rows(model), model.hidden_size)


class Decoder(nn.Module):
    """This stage's layers."""

    def __init__(self, model: ModelSpec, num_layers: int, shard: Shard) -> None:
        super().__init__()
        self.width_lo, width_hi = split_sizes(model.hidden_size)
        self.layers = nn.ModuleList(Layer(self.width_lo, width_hi, shard) for _ in range(num_layers))

    def flow(self, x_BSH: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S / tp, H] -> [B, S / tp, H]."""
        lo, hi = x_BSH[..., : self.width_lo], x_BSH[..., self.width_lo :]
        for layer in self.layers:
            hi = yield from layer.flow(lo, hi)  # type: ignore[operator]
        return torch.cat((lo, hi), dim=-1)


class ExactStage(nn.Module):
    """One tp rank's part of one pipeline stage. The first takes tokens, the last returns its part of the logits.

    A single stage uses its embedding as output layer too.
    """

    def __init__(self, model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, shard: Shard) -> None:
        super().__init__()
        self.is_first, self.is_last, self.shard = is_first, is_last, shard
        if is_first:
            self.embedding = Embedding(model, shard)
        self.decoder = Decoder(model, num_layers, shard)
        if is_last and not is_first:
            self.output_layer = Matrix(shard.vocab_rows(model), model.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [B, S] or hidden [B, S / tp, H] -> hidden or logits [B, S, V / tp]. Collective over tp."""
        return run_flow([self.flow(x)], self.shard.group)[0]

    def flow(self, x: torch.Tensor) -> Flow[torch.Tensor]:
        """The same, one rank's turn at a time."""
        if self.is_first:
            x = yield reduce_sequence(look_up(x, self.embedding.word_embeddings.weight, self.shard.tp_rank))
        x_BSH = yield from self.decoder.flow(x)
        if not self.is_last:
            return x_BSH
        whole_BSH = yield gather_sequence(x_BSH)
        return F.linear(whole_BSH, self.output_weight)

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, [V / tp, H]; last stage only."""
        return self.embedding.word_embeddings.weight if self.is_first else self.output_layer.weight


def seed_weights(stage: ExactStage, model: ModelSpec, seed: int, first_layer: int, step: int) -> None:
    """Write the weights of `step` in place. `first_layer` is the global index of the stage's first layer."""
    shard = stage.shard
    model = allocated(model, shard.tp)
    with torch.no_grad():
        signs_H = draw_signs(model, seed, step)
        for index, layer in enumerate(stage.decoder.layers):
            _write_layer(layer, draw_coupling(model, seed, step, first_layer + index), signs_H, shard)  # type: ignore[arg-type]
        if stage.is_first:
            stage.embedding.word_embeddings.weight.copy_(cut(WORD_EMBEDDINGS, draw_tied(model, seed, step), shard))
        elif stage.is_last:
            stage.output_layer.weight.copy_(cut(OUTPUT_LAYER, draw_tied(model, seed, step), shard))


def _write_layer(layer: Layer, coupling: Coupling, signs_H: torch.Tensor, shard: Shard) -> None:
    """Spread the coupling into dense matrices, the columns' signs folded in."""
    width_lo = coupling.bias_L.numel()
    whole = {
        "bias": coupling.bias_L,
        "row_bias": torch.zeros(signs_H.numel() - width_lo),
        "a.weight": _one_per_row(width_lo, coupling.permutation_L, signs_H[coupling.permutation_L]),
        "b.weight": _one_per_row(width_lo, coupling.source_R, signs_H[width_lo:]),
    }
    for name, parameter in layer.named_parameters():
        parameter.copy_(cut(f"decoder.layers.0.{name}", whole[name], shard))


def _one_per_row(width: int, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A matrix with one nonzero in each row. Int64 [rows, width]."""
    return torch.zeros(columns.numel(), width, dtype=torch.int64).scatter_(1, columns[:, None], values[:, None])
