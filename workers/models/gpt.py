"""The gpt probe: a small pre-layernorm GPT with tied embeddings, split into pipeline stages.

Parameter names and registration order are Megatron's (`workers.parameters`), because the buffer layout follows from
them. No dropout, no fused kernels: each stage is a fixed list of deterministic operations, so that one process can
repeat a rank's gradients bit for bit. Must not communicate and must not know about microbatches.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from workers.contract import ModelSpec
from workers.errors import SpecError
from workers.models import draws

_INIT_STD = 0.02
_LAYERNORM_EPSILON = 1e-5
_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Table(nn.Module):
    """Rows looked up by id."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))


class Affine(nn.Module):
    """x W^T + b; unlike nn.Linear it spends no time on an initialisation that is overwritten."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


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

    def __init__(self, model: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.word_embeddings = Table(model.vocab_size, model.hidden_size, dtype)
        self.position_embeddings = Table(model.seq_len, model.hidden_size, dtype)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """int64 [B, S] -> [B, S, H]."""
        return F.embedding(tokens_BS, self.word_embeddings.weight) + self.position_embeddings.weight


class SelfAttention(nn.Module):
    """Causal attention over `num_heads` heads."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = model.num_heads
        self.linear_proj = Affine(model.hidden_size, model.hidden_size, dtype)
        self.linear_qkv = Affine(model.hidden_size, 3 * model.hidden_size, dtype)

    def forward(self, x_BSH: torch.Tensor, future_SS: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]; `future_SS` is True where a position must not look."""
        size_B, size_S, size_H = x_BSH.shape
        heads = self.linear_qkv(x_BSH).view(size_B, size_S, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (size_H // self.num_heads) ** -0.5
        weights = scores.masked_fill(future_SS, float("-inf")).softmax(-1)
        mixed_BSH = torch.matmul(weights, value).transpose(1, 2).reshape(size_B, size_S, size_H)
        return self.linear_proj(mixed_BSH)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The feed-forward block, four times as wide as the hidden state, with GPT-2's tanh form of gelu."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = Affine(model.hidden_size, 4 * model.hidden_size, dtype)
        self.linear_fc2 = Affine(4 * model.hidden_size, model.hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(model.hidden_size, dtype)
        self.self_attention = SelfAttention(model, dtype)
        self.pre_mlp_layernorm = LayerNorm(model.hidden_size, dtype)
        self.mlp = Mlp(model, dtype)

    def forward(self, x_BSH: torch.Tensor, future_SS: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        x_BSH = x_BSH + self.self_attention(self.input_layernorm(x_BSH), future_SS)
        return x_BSH + self.mlp(self.pre_mlp_layernorm(x_BSH))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """This stage's layers, and the final layernorm on the last stage."""

    future_SS: torch.Tensor

    def __init__(self, model: ModelSpec, num_layers: int, is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model, dtype) for _ in range(num_layers))
        if is_last:
            self.final_layernorm = LayerNorm(model.hidden_size, dtype)
        future_SS = torch.ones(model.seq_len, model.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future_SS", future_SS, persistent=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.future_SS)
        return self.final_layernorm(x_BSH) if hasattr(self, "final_layernorm") else x_BSH


class GptStage(nn.Module):
    """One pipeline stage. The first takes tokens, the last returns logits; with pp = 1 both share one weight."""

    def __init__(self, model: ModelSpec, num_layers: int, is_first: bool, is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        if model.hidden_size % model.num_heads:
            raise SpecError(
                f"num_heads {model.num_heads} does not divide hidden_size {model.hidden_size}: "
                "every head needs the same width; choose a divisor"
            )
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embedding = Embedding(model, dtype)
        self.decoder = Decoder(model, num_layers, is_last, dtype)
        if is_last and not is_first:
            self.output_layer = Table(model.vocab_size, model.hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [B, S] or hidden state [B, S, H] -> hidden state [B, S, H] or logits [B, S, V]."""
        x_BSH = self.decoder(self.embedding(x) if self.is_first else x)
        return F.linear(x_BSH, self.output_weight) if self.is_last else x_BSH

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, [V, H]; last stage only."""
        return self.embedding.word_embeddings.weight if self.is_first else self.output_layer.weight


def seed_weights(stage: nn.Module, model: ModelSpec, seed: int, first_layer: int) -> None:
    """Write the initial weights in place. `first_layer` is the global index of the stage's first layer."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(_initial_value(_global_name(name, first_layer), tuple(parameter.shape), model, seed))


def token_loss(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens, computed in float32 at least. Scalar."""
    logits = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    return F.cross_entropy(logits.flatten(0, -2), targets_BS.flatten())


def token_loss_sum(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the tokens whose target counts (not -100), in float32 at least. Scalar."""
    logits = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    return F.cross_entropy(logits.flatten(0, -2), targets_BS.flatten(), reduction="sum")


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
