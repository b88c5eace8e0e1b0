"""Public models by name, in the terms that a gradient buffer's layout follows from. Pure data, with its sources.

`tied` decides everything here: an untied model has no weight on two stages, so that no ordering can get one wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from workers.contract import TINY, ModelSpec
from workers.parameters import POSITION_EMBEDDINGS, gpt_stage_parameters, padded_vocab_size

VOCABULARY_ALIGNMENT = 128
"""Megatron-LM pads vocabularies to a multiple of this (times tp)."""


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A model in the layout's terms. `model.vocab_size` is as Megatron-LM allocates it."""

    model: ModelSpec
    published_vocab_size: int
    tied: bool
    source: str
    learned_positions: bool = True
    """Whether positions are a weight; a model that rotates its queries and keys has none."""

    def allocated(self, tp: int) -> ModelSpec:
        """The model with its vocabulary as Megatron-LM allocates it over `tp` ranks."""
        if self.model.vocab_size % VOCABULARY_ALIGNMENT:
            return self.model
        padded = padded_vocab_size(self.published_vocab_size, tp, VOCABULARY_ALIGNMENT)
        return replace(self.model, vocab_size=padded)

    @property
    def num_parameters(self) -> int:
        """Parameters with the vocabulary as it was published, a tied weight counted once."""
        published = replace(self.model, vocab_size=self.published_vocab_size)
        parameters = gpt_stage_parameters(published, 1, 0, tied=self.tied)
        return sum(p.numel for p in parameters if self.learned_positions or p.name != POSITION_EMBEDDINGS)


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"
_MEGATRON = "Shoeybi et al. 2019, Megatron-LM, table 2"
_SCALING = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, table 1"
_NEOX = "Black et al. 2022, GPT-NeoX-20B"

_SIZES: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    # (name, hidden_size, num_layers, num_heads)
    _GPT2: (
        ("gpt2", 768, 12, 12),
        ("gpt2-medium", 1024, 24, 16),
        ("gpt2-large", 1280, 36, 20),
        ("gpt2-xl", 1600, 48, 25),
    ),
    _GPT3: (
        ("gpt3-125m", 768, 12, 12),
        ("gpt3-350m", 1024, 24, 16),
        ("gpt3-760m", 1536, 24, 16),
        # The table gives it 24 heads of 128, which 2048 columns cannot hold; heads do not change a layout.
        ("gpt3-1.3b", 2048, 24, 16),
        ("gpt3-2.7b", 2560, 32, 32),
        ("gpt3-6.7b", 4096, 32, 32),
        # The table prints 5140, which its 40 heads of 128 cannot give.
        ("gpt3-13b", 5120, 40, 40),
        ("gpt3-175b", 12288, 96, 96),
    ),
    _MEGATRON: (
        ("megatron-2.5b", 1920, 54, 20),
        ("megatron-8.3b", 3072, 72, 24),
    ),
    _SCALING: (
        ("megatron-1.7b", 2304, 24, 24),
        ("megatron-3.6b", 3072, 30, 32),
        ("megatron-7.5b", 4096, 36, 32),
        ("megatron-18.4b", 6144, 40, 48),
        ("megatron-39.1b", 8192, 48, 64),
        ("megatron-76.1b", 10240, 60, 80),
        ("megatron-145.6b", 12288, 80, 96),
        ("megatron-310.1b", 16384, 96, 128),
        ("megatron-529.6b", 20480, 105, 128),
        ("megatron-1t", 25600, 128, 160),
    ),
}
_VOCAB_AND_SEQ_LEN = {_GPT2: (50257, 1024), _GPT3: (50257, 2048), _MEGATRON: (50257, 1024), _SCALING: (51200, 2048)}


def _public_models() -> Iterator[tuple[str, PublicModel]]:
    yield "tiny", PublicModel(TINY, TINY.vocab_size, True, "the model of the reference figures; vocabulary not padded")
    for source, sizes in _SIZES.items():
        vocab_size, seq_len = _VOCAB_AND_SEQ_LEN[source]
        for name, hidden_size, num_layers, num_heads in sizes:
            model = ModelSpec(_allocated(vocab_size), hidden_size, num_layers, num_heads, seq_len)
            yield name, PublicModel(model, vocab_size, True, source)
    neox = ModelSpec(_allocated(50257), 6144, 44, 64, 2048)
    yield "gpt-neox-20b", PublicModel(neox, 50257, False, _NEOX, learned_positions=False)


def _allocated(vocab_size: int) -> int:
    return padded_vocab_size(vocab_size, 1, VOCABULARY_ALIGNMENT)


MODELS: Mapping[str, PublicModel] = MappingProxyType(dict(_public_models()))
"""Models with a GPT's parameters (biases, layer norms, four times as wide inside). Layouts follow the sizes alone."""
