from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contract import TINY, Mesh, ModelSpec, ProbeName
from workers.errors import SpecError
from workers.parameters import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    exact_stage_parameters,
    first_layer,
    gpt_stage_parameters,
    stage_layer_counts,
    stage_parameters,
    tied_parameter_name,
)


@pytest.mark.parametrize(
    ("num_layers", "pp", "expected"),
    [(4, 2, (2, 2)), (4, 3, (2, 1, 1)), (5, 3, (2, 2, 1)), (1, 3, (1, 0, 0)), (0, 2, (0, 0)), (96, 1, (96,))],
)
def test_layer_counts(num_layers: int, pp: int, expected: tuple[int, ...]) -> None:
    assert stage_layer_counts(num_layers, pp) == expected


@given(st.integers(0, 200), st.integers(1, 64))
def test_layers_are_spread_evenly_and_none_is_lost(num_layers: int, pp: int) -> None:
    counts = stage_layer_counts(num_layers, pp)
    assert len(counts) == pp
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1
    assert [first_layer(num_layers, pp, pp_rank) for pp_rank in range(pp)] == [sum(counts[:i]) for i in range(pp)]


def test_bad_splits_are_refused() -> None:
    with pytest.raises(SpecError, match="over 0 stages"):
        stage_layer_counts(4, 0)
    with pytest.raises(SpecError, match="stage 2 is outside"):
        gpt_stage_parameters(TINY, 2, 2)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("probe", list(ProbeName))
def test_stages_hold_the_model_once_and_the_tied_weight_at_both_ends(probe: ProbeName, pp: int) -> None:
    stages = [stage_parameters(probe, TINY, Mesh(dp=2, pp=pp), pp_rank) for pp_rank in range(pp)]
    total = sum(parameter.numel for stage in stages for parameter in stage)
    whole = sum(parameter.numel for parameter in stage_parameters(probe, TINY, Mesh(dp=2, pp=1), 0))
    assert total == whole + (64 * 32 if pp > 1 else 0)
    shared = [(pp_rank, p.name) for pp_rank, stage in enumerate(stages) for p in stage if p.shared_embedding]
    assert shared == ([(0, WORD_EMBEDDINGS), (pp - 1, OUTPUT_LAYER)] if pp > 1 else [])
    for stage in stages:
        assert len({parameter.name for parameter in stage}) == len(stage)


def test_tied_parameter_name() -> None:
    assert [tied_parameter_name(3, pp_rank) for pp_rank in range(3)] == [WORD_EMBEDDINGS, None, OUTPUT_LAYER]
    assert tied_parameter_name(1, 0) == WORD_EMBEDDINGS


def test_gpt_registers_as_megatron_does() -> None:
    first = gpt_stage_parameters(ModelSpec(64, 32, 1, 4, 16), 2, 0)
    assert [(parameter.name, parameter.shape) for parameter in first][:5] == [
        ("embedding.word_embeddings.weight", (64, 32)),
        ("embedding.position_embeddings.weight", (16, 32)),
        ("decoder.layers.0.input_layernorm.weight", (32,)),
        ("decoder.layers.0.input_layernorm.bias", (32,)),
        ("decoder.layers.0.self_attention.linear_proj.weight", (32, 32)),
    ]
    last = gpt_stage_parameters(ModelSpec(64, 32, 1, 4, 16), 2, 1)
    assert [parameter.name for parameter in last] == [
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
        "output_layer.weight",
    ]


def test_an_untied_gpt_keeps_its_own_output_layer() -> None:
    for pp in (1, 2):
        names = [(p.name, p.shared_embedding) for p in gpt_stage_parameters(TINY, pp, pp - 1, tied=False)]
        assert names[-1] == (OUTPUT_LAYER, False)


@pytest.mark.parametrize(("hidden", "lo", "hi"), [(32, 16, 16), (5, 2, 3), (2, 1, 1)])
def test_exact_splits_the_hidden_state(hidden: int, lo: int, hi: int) -> None:
    parameters = exact_stage_parameters(ModelSpec(7, hidden, 1, 1, 3), 2, 0)
    assert [(parameter.name, parameter.shape) for parameter in parameters] == [
        ("embedding.word_embeddings.weight", (7, hidden)),
        ("decoder.layers.0.bias", (lo,)),
        ("decoder.layers.0.a.weight", (lo, lo)),
        ("decoder.layers.0.b.weight", (hi, lo)),
    ]


def test_an_exact_stage_without_layers_is_only_the_embedding() -> None:
    model = ModelSpec(64, 32, 0, 4, 16)
    assert [p.name for p in exact_stage_parameters(model, 2, 0)] == [WORD_EMBEDDINGS]
    assert [p.name for p in exact_stage_parameters(model, 2, 1)] == [OUTPUT_LAYER]
    assert exact_stage_parameters(model, 3, 1) == ()
