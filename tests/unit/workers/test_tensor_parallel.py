"""A model cut over tensor-parallel ranks against the same model in one piece, all ranks in this process."""

from __future__ import annotations

import pytest
import torch

from workers.contract import BatchSpec, Mesh, ModelSpec, Normalization, OrderingName, ProbeName, TrialSpec
from workers.intervals import count
from workers.models.weights import Shard, cut
from workers.parameters import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    Cut,
    cut_of,
    is_sequence_parallel,
    sequence_parallel_parameters,
    stage_parameters,
    tied_elements,
)
from workers.prediction import layernorm_elements, predict_model, stage_layout, trial_misowned
from workers.reference import (
    _accumulate,
    _uncut_stages,
    exact_row_bias_gradient,
    exact_tied_gradients,
    replay_cut_gradients,
    replay_gradient,
)
from workers.replays import compute_layernorm_replay, compute_replays
from workers.tensor_parallel import together

CPU = torch.device("cpu")
MODEL = ModelSpec(vocab_size=31, hidden_size=16, num_layers=4, num_heads=4, seq_len=8)
"""With tp=2 one row of padding, with tp=4 too."""


def trial(probe: ProbeName, mesh: Mesh, **changes: object) -> TrialSpec:
    return TrialSpec(probe, OrderingName.BUGGY, mesh, MODEL, BatchSpec(2, 4), steps=1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2), Mesh(2, 2, 2), Mesh(1, 2, 4), Mesh(2, 2, 2, vpp=2)])
@pytest.mark.parametrize("normalization", list(Normalization))
def test_every_gradient_is_the_uncut_model_s(mesh: Mesh, normalization: Normalization) -> None:
    """Cut parameters hold their part of it, layernorms add up to it over tp, other copies are whole."""
    spec = trial(ProbeName.GPT, mesh, normalization=normalization)
    stages = _uncut_stages(spec, 0, CPU, torch.float64)
    cut_stages = replay_cut_gradients(spec, 0, 0, CPU, torch.float64)
    for module, by_tp_rank in zip(stages, cut_stages, strict=True):
        named = list(module.named_parameters())
        wholes = _accumulate(spec, 0, 0, CPU, stages, [parameter for _, parameter in named])
        for (name, _), whole in zip(named, wholes, strict=True):
            parts = [held[name] for held in by_tp_rank]
            if is_sequence_parallel(name):
                expected, parts = [whole.flatten()], [torch.stack(parts).sum(dim=0)]
                assert cut_of(name) is Cut.REPLICATED
            else:
                shards = (Shard(together(mesh.tp), tp_rank) for tp_rank in range(mesh.tp))
                expected = [cut(name, whole, shard).flatten() for shard in shards]
            for part, right in zip(parts, expected, strict=True):
                assert torch.allclose(part, right, rtol=1e-9, atol=1e-12), name
            assert float(torch.cat(parts).abs().max()) > 0


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2), Mesh(2, 2, 2), Mesh(1, 2, 4), Mesh(2, 2, 2, vpp=2)])
def test_the_exact_probe_is_exact_on_every_tensor_rank(mesh: Mesh) -> None:
    spec = trial(ProbeName.EXACT, mesh)
    for dp_rank in range(mesh.dp):
        stages = replay_cut_gradients(spec, 0, dp_rank, CPU)
        for tp_rank in range(mesh.tp):
            ends = exact_tied_gradients(spec, 0, dp_rank, tp_rank)
            assert torch.equal(stages[0][tp_rank][WORD_EMBEDDINGS], ends.wte_P.float())
            if ends.lm_head_P is not None:
                assert torch.equal(stages[-1][tp_rank][OUTPUT_LAYER], ends.lm_head_P.float())
            bias = exact_row_bias_gradient(spec, 0, dp_rank, tp_rank).float()
            found = [held for stage in stages for name, held in stage[tp_rank].items() if name.endswith("row_bias")]
            assert len(found) == MODEL.num_layers
            assert all(torch.equal(each, bias) for each in found)
            # So that a part that is not summed is missed in every element.
            assert bool((bias != 0).all())
        signs = [exact_row_bias_gradient(spec, 0, dp_rank, tp_rank).sign() for tp_rank in range(mesh.tp)]
        assert all(torch.equal(each, signs[0]) for each in signs)


def test_layers_of_layout_and_model_are_the_same_parameters() -> None:
    for probe in ProbeName:
        spec = trial(probe, Mesh(2, 2, 2))
        cut_stages = replay_cut_gradients(spec, 0, 0, CPU)
        for stage in range(2):
            shapes = stage_parameters(probe, MODEL, spec.mesh, stage)
            for held in cut_stages[stage]:
                assert [(shape.name, shape.numel) for shape in shapes] == [(n, g.numel()) for n, g in held.items()]
        summed = [p.numel for stage in range(2) for p in sequence_parallel_parameters(spec, stage)]
        assert layernorm_elements(spec) == 2 * sum(summed) > 0
        assert layernorm_elements(trial(probe, Mesh(2, 2))) == 0


def test_a_replay_s_floor_covers_the_cut_model_s_rounding() -> None:
    spec = trial(ProbeName.GPT, Mesh(2, 2, 2))
    cut_stages = replay_cut_gradients(spec, 0, 1, CPU)
    for tp_rank in range(2):
        wte, lm_head = compute_replays(spec, 0, 1, CPU, tp_rank)
        for replay, held in (
            (wte, cut_stages[0][tp_rank][WORD_EMBEDDINGS]),
            (lm_head, cut_stages[1][tp_rank][OUTPUT_LAYER]),
        ):
            assert 0 < float((replay.grad_P - held).abs().max()) <= 2 * replay.floor < 1e-5
        for pp_rank in range(2):
            at = spec.mesh.coordinates(spec.mesh.world_rank(1, pp_rank, tp_rank))
            replay = compute_layernorm_replay(spec, 0, at, CPU)
            assert replay.grad_P.numel() == sum(p.numel for p in sequence_parallel_parameters(spec, pp_rank))
            assert 0 < replay.floor < 1e-5


def test_the_whole_gradient_counts_every_parameter_once() -> None:
    for probe in ProbeName:
        spec, alone = trial(probe, Mesh(2, 2, 2)), trial(probe, Mesh(2, 2))
        whole, uncut = replay_gradient(spec, 0, 0, CPU), replay_gradient(alone, 0, 0, CPU)
        padding = 2 * tied_elements(MODEL, 2) - tied_elements(MODEL, 1)
        row_biases = MODEL.num_layers * MODEL.hidden_size // 2 if probe is ProbeName.EXACT else 0
        assert whole.summed().numel() == uncut.summed().numel() + padding + row_biases


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(3, 2, 4), Mesh(4, 2, 1), Mesh(2, 2, 2, vpp=2)])
@pytest.mark.parametrize("ordering", [OrderingName.BUGGY, OrderingName.FIXED, OrderingName.OWN_BUCKET])
def test_prediction_counts_element_by_element_over_all_shards(ordering: OrderingName, mesh: Mesh) -> None:
    spec = TrialSpec(ProbeName.GPT, ordering, mesh, MODEL, BatchSpec(1, 4))
    prediction = predict_model(ordering, mesh, MODEL)
    size, last = tied_elements(MODEL, mesh.tp), mesh.num_stages - 1
    wrong = []
    for tp_rank in range(mesh.tp):
        owners = {}
        for stage, name in ((0, WORD_EMBEDDINGS), (last, OUTPUT_LAYER)):
            layout = stage_layout(spec, stage)
            owned = [(dp_rank, layout.owned_intervals(name, dp_rank)) for dp_rank in range(mesh.dp)]
            owners[stage] = {e: d for d, parts in owned for part in parts for e in range(part.start, part.stop)}
        wrong += [tp_rank * size + e for e in range(size) if owners[0][e] != owners[last][e]]
    if ordering is OrderingName.FIXED:
        wrong = []
    assert [e for part in prediction.ranges for e in range(part.start, part.stop)] == wrong
    assert prediction.wrong_elements == len(wrong) == sum(prediction.misowned_by_wte_owner)
    assert prediction.num_elements == mesh.tp * size
    assert mesh.tp * count(trial_misowned(spec)) == len(wrong)
