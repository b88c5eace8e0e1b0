"""Public models against the numbers of parameters that their papers, and the released weights, have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.contract import Mesh, ModelSpec
from workers.layout import LayoutVersion
from workers.prediction import predict_model
from workers.public_models import MODELS


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_released_weights_to_the_element(name: str, num_parameters: int) -> None:
    assert MODELS[name].num_parameters == num_parameters


def test_the_untied_model_to_the_element() -> None:
    entry = MODELS["gpt-neox-20b"]
    # Published with the vocabulary as it was allocated.
    assert replace(entry, published_vocab_size=50_432).num_parameters == 20_554_567_680
    assert predict_model(LayoutVersion.DE4028A, Mesh(8, 4), entry.model, tied=entry.tied).wrong_elements == 0


@pytest.mark.parametrize(
    "name", ["1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b", "529.6b", "1008.0b"]
)
def test_megatron_s_scaling_study_to_the_digit_printed(name: str) -> None:
    entry = MODELS["megatron-1t" if name == "1008.0b" else f"megatron-{name}"]
    # The paper's own formula: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), without the last layer norm.
    h, num_layers = entry.model.hidden_size, entry.model.num_layers
    formula = 12 * num_layers * h * h + 13 * num_layers * h + (entry.model.vocab_size + entry.model.seq_len) * h
    assert entry.num_parameters == formula + 2 * h
    assert f"{entry.num_parameters / 1e9:.1f}b" == name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-125m", 0.125),
        ("gpt3-350m", 0.350),
        ("gpt3-760m", 0.760),
        ("gpt3-1.3b", 1.3),
        ("gpt3-2.7b", 2.7),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13.0),
        ("gpt3-175b", 175.0),
        ("megatron-2.5b", 2.5),
        ("megatron-8.3b", 8.3),
    ],
)
def test_names_that_are_rounded(name: str, billions: float) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_sizes_are_as_megatron_allocates_them() -> None:
    assert MODELS["gpt2-xl"].model == ModelSpec(50304, 1600, 48, 25, 1024)
    for name, entry in MODELS.items():
        assert entry.model.hidden_size % entry.model.num_heads == 0, name
        assert entry.model.vocab_size - 128 < entry.published_vocab_size <= entry.model.vocab_size, name
        assert entry.source, name
