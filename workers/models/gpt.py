"""The gpt probe: a small pre-layernorm GPT with tied embeddings, split into pipeline stages.

Parameter names and registration order are Megatron's (`workers.parameters`), because the buffer layout follows from
them. No dropout, no fused kernels: each stage is a fixed list of deterministic operations, so that one process can
repeat a rank's gradients bit for bit. Must not know about microbatches.

Cut over tensor-parallel ranks as in Megatron-LM with sequence parallelism: between its layers each rank has one part of
the sequence (layernorms and the biases behind row-parallel layers work there, on whole copies of their parameters);
inside attention and MLP it has the whole sequence and its own heads and columns; the vocabulary is cut at both ends.
Ranks meet only where a flow yields (`workers.tensor_parallel`).
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from workers.contract import ModelSpec
from workers.errors import SpecError
from workers.models import draws
from workers.models.vocabulary import cross_entropies, look_up
from workers.models.weights import Shard, cut, whole_shape
from workers.tensor_parallel import (
    Flow,
    gather_sequence,
    reduce_replicated,
    reduce_sequence,
    run_flow,
    split_sequence,
)

_INIT_STD = 0.02
_LAYERNORM_EPSILON = 1e-5
_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Table(nn.Module):
    """Rows looked up by id."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))


class Affine(nn.Module):
    """x W^T + b, cut by outputs; unlike nn.Linear it spends no time on an initialisation that is overwritten."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


class RowAffine(Affine):
    """x W^T + b, cut by inputs: ranks' products are summed, each keeps a part of the sequence, b is added there."""

    def flow(self, x_BSH: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S, in_features] -> [B, S / tp, out_features]."""
        summed = yield reduce_sequence(F.linear(x_BSH, self.weight))
        return summed + self.bias


class LayerNorm(nn.Module):
    """Layer normalisation over the hidden dimension."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _LAYERNORM_EPSILON)


class Embedding(nn.Module):
    """Word embedding plus learned positions."""

    def __init__(self, model: ModelSpec, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp_rank = shard.tp_rank
        self.word_embeddings = Table(shard.vocab_rows(model), model.hidden_size, dtype)
        self.position_embeddings = Table(model.seq_len, model.hidden_size, dtype)

    def flow(self, tokens_BS: torch.Tensor) -> Flow[torch.Tensor]:
        """int64 [B, S] -> [B, S / tp, H]."""
        found = yield reduce_replicated(look_up(tokens_BS, self.word_embeddings.weight, self.tp_rank))
        x_BSH = yield split_sequence(found + self.position_embeddings.weight)
        return x_BSH


class SelfAttention(nn.Module):
    """Causal attention over this rank's heads."""

    def __init__(self, model: ModelSpec, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_width = model.hidden_size // model.num_heads
        width = shard.part(model.hidden_size)
        self.linear_proj = RowAffine(width, model.hidden_size, dtype)
        self.linear_qkv = Affine(model.hidden_size, 3 * width, dtype)

    def flow(self, x_BSH: torch.Tensor, future_SS: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S / tp, H] -> [B, S / tp, H]; `future_SS` is True where a position must not look."""
        whole_BSH = yield gather_sequence(x_BSH)
        size_B, size_S, _ = whole_BSH.shape
        heads = self.linear_qkv(whole_BSH).view(size_B, size_S, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.head_width**-0.5
        weights = scores.masked_fill(future_SS, float("-inf")).softmax(-1)
        mixed_BSH = torch.matmul(weights, value).transpose(1, 2).reshape(size_B, size_S, -1)
        return (yield from self.linear_proj.flow(mixed_BSH))


class Mlp(nn.Module):
    """The feed-forward block, four times as wide as the hidden state, with GPT-2's tanh form of gelu."""

    def __init__(self, model: ModelSpec, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        width = shard.part(4 * model.hidden_size)
        self.linear_fc1 = Affine(model.hidden_size, width, dtype)
        self.linear_fc2 = RowAffine(width, model.hidden_size, dtype)

    def flow(self, x_BSH: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S / tp, H] -> [B, S / tp, H]."""
        whole_BSH = yield gather_sequence(x_BSH)
        return (yield from self.linear_fc2.flow(F.gelu(self.linear_fc1(whole_BSH), approximate="tanh")))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, model: ModelSpec, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(model.hidden_size, dtype)
        self.self_attention = SelfAttention(model, shard, dtype)
        self.pre_mlp_layernorm = LayerNorm(model.hidden_size, dtype)
        self.mlp = Mlp(model, shard, dtype)

    def flow(self, x_BSH: torch.Tensor, future_SS: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S / tp, H] -> [B, S / tp, H]."""
        x_BSH = x_BSH + (yield from self.self_attention.flow(self.input_layernorm(x_BSH), future_SS))
        return x_BSH + (yield from self.mlp.flow(self.pre_mlp_layernorm(x_BSH)))


class Decoder(nn.Module):
    """This stage's layers, and the final layernorm on the last stage."""

    future_SS: torch.Tensor

    def __init__(self, model: ModelSpec, num_layers: int, is_last: bool, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model, shard, dtype) for _ in range(num_layers))
        if is_last:
            self.final_layernorm = LayerNorm(model.hidden_size, dtype)
        future_SS = torch.ones(model.seq_len, model.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future_SS", future_SS, persistent=False)

    def flow(self, x_BSH: torch.Tensor) -> Flow[torch.Tensor]:
        """[B, S / tp, H] -> [B, S / tp, H]."""
        for layer in self.layers:
            x_BSH = yield from layer.flow(x_BSH, self.future_SS)  # type: ignore[operator]
        return self.final_layernorm(x_BSH) if hasattr(self, "final_layernorm") else x_BSH


class GptStage(nn.Module):
    """One tp rank's part of one pipeline stage. The first takes tokens, the last returns its part of the logits.

    A single stage uses its embedding as output layer too.
    """

    def __init__(
        self, model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, shard: Shard, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if model.hidden_size % model.num_heads:
            raise SpecError(
                f"num_heads {model.num_heads} does not divide hidden_size {model.hidden_size}: "
                "every head needs the same width; choose a divisor"
            )
        self.is_first, self.is_last, self.shard = is_first, is_last, shard
        if is_first:
            self.embedding = Embedding(model, shard, dtype)
        self.decoder = Decoder(model, num_layers, is_last, shard, dtype)
        if is_last and not is_first:
            self.output_layer = Table(shard.vocab_rows(model), model.hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [B, S] or hidden [B, S / tp, H] -> hidden or logits [B, S, V / tp]. Collective over tp."""
        return run_flow([self.flow(x)], self.shard.group)[0]

    def flow(self, x: torch.Tensor) -> Flow[torch.Tensor]:
        """The same, one rank's turn at a time."""
        if self.is_first:
            x = yield from self.embedding.flow(x)
        x_BSH = yield from self.decoder.flow(x)
        if not self.is_last:
            return x_BSH
        whole_BSH = yield gather_sequence(x_BSH)
        return F.linear(whole_BSH, self.output_weight)

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, [V / tp, H]; last stage only."""
        return self.embedding.word_embeddings.weight if self.is_first else self.output_layer.weight


def seed_weights(stage: GptStage, model: ModelSpec, seed: int, first_layer: int) -> None:
    """Write the initial weights in place. `first_layer` is the global index of the stage's first layer."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            shape = whole_shape(name, tuple(parameter.shape), stage.shard.tp)
            parameter.copy_(cut(name, _initial_value(_global_name(name, first_layer), shape, model, seed), stage.shard))


def token_loss(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, shard: Shard, summed: bool = False
) -> Flow[torch.Tensor]:
    """Mean or sum of the cross-entropy over the tokens whose target counts (not -100), in float32 at least.

    Scalar, the same on every tp rank.
    """
    logits_BSV = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    if shard.tp == 1:
        flat = logits_BSV.flatten(0, -2), targets_BS.flatten()
        return F.cross_entropy(*flat, reduction="sum" if summed else "mean")
    counted_BS = targets_BS >= 0
    total = ((yield from cross_entropies(logits_BSV, targets_BS, shard.tp_rank)) * counted_BS).sum()
    return total if summed else total / counted_BS.sum()


def draw_tokens(
    model: ModelSpec, num_sequences: int, seed: int, step: int, dp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random text and the same text one token later: int64 [num_sequences, S] each."""
    generator = draws.stream(seed, "gpt", "text", step, dp_rank)
    text = draws.integers(0, model.vocab_size, (num_sequences, model.seq_len + 1), generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _global_name(name: str, first_layer: int) -> str:
    """The name of a parameter in the unsplit model; both ends of the tied weight have one name."""
    if name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return _LOCAL_LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)


def _initial_value(name: str, shape: tuple[int, ...], model: ModelSpec, seed: int) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.endswith("layernorm.weight"):
        return torch.ones(shape)
    into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    std = _INIT_STD / (2 * model.num_layers) ** 0.5 if into_residual else _INIT_STD
    return draws.uniform(shape, std, draws.stream(seed, "gpt", name))
