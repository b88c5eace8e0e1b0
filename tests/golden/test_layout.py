"""Layouts and owners from names and shapes alone, against those captured from the real Megatron-LM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.intervals import Intervals
from workers.layout import RULES, BufferLayout, LayoutRule, build_layout, resolve
from workers.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS, ParameterShape, gpt_stage_parameters
from workers.prediction import misowned_intervals, stage_layout

VECTORS = Path(__file__).parent / "vectors"
STEPS = sorted(path.stem for path in VECTORS.glob("*.json") if not path.stem.endswith(".layout"))
LAYOUTS_ONLY = sorted(path.stem for path in VECTORS.glob("*.layout.json"))


def test_the_vectors_are_all_here() -> None:
    assert len(STEPS) == 8
    assert len(LAYOUTS_ONLY) == 2


@pytest.mark.parametrize("case", STEPS)
def test_layout_from_the_model_sizes(case: str) -> None:
    vector = load(case)
    for pp_rank, end in enumerate(vector["ends"]):
        parameters = stage(vector, pp_rank)
        assert as_json(build_layout(parameters, rule(vector), vector["dp"])) == vector["layout"][end]


@pytest.mark.parametrize("case", LAYOUTS_ONLY)
def test_layout_of_every_chunk(case: str) -> None:
    vector = load(case)
    num_chunks = 0
    for stage_name, chunk in chunks(vector):
        # Megatron cuts buckets by size on the first stage's first chunk only.
        bucket_size = vector["bucket_size"] if (stage_name, chunk["chunk"]) == ("pp0", 0) else None
        layout = build_layout(registered(chunk), rule(vector), vector["dp"], bucket_size)
        assert as_json(layout) == {key: chunk[key] for key in ("buffer_numel", "buckets", "params")}
        num_chunks += 1
    assert num_chunks == vector["pp"] * vector["vpp"]


def test_chunks_of_a_virtual_pipeline_from_the_model_sizes() -> None:
    vector = load("mcore0161_vpp2_dp2.layout")
    mesh = Mesh(vector["dp"], vector["pp"], vpp=vector["vpp"])
    model = ModelSpec(vector["vocab"], vector["hidden"], num_layers=4, num_heads=4, seq_len=16)
    trial = TrialSpec(ProbeName.GPT, OrderingName.OWN_BUCKET, mesh, model, BatchSpec(1, 2))
    for pp_rank in range(mesh.pp):
        captured = vector["layout"][f"pp{pp_rank}"]
        for stage, chunk in zip(mesh.stages(pp_rank), captured, strict=True):
            assert as_json(stage_layout(trial, stage)) == {key: chunk[key] for key in as_json(stage_layout(trial, 0))}


def test_buckets_under_overlap_from_the_model_sizes() -> None:
    vector = load("mcore0161_overlap_bucket8000_dp2.layout")
    model = ModelSpec(vector["vocab"], vector["hidden"], num_layers=4, num_heads=4, seq_len=16)
    mesh = Mesh(vector["dp"], vector["pp"])
    trial = TrialSpec(ProbeName.GPT, OrderingName.OWN_BUCKET, mesh, model, BatchSpec(1, 2))
    trial = replace(trial, overlap=True, bucket_size=vector["bucket_size"])
    for stage in range(mesh.pp):
        (captured,) = vector["layout"][f"pp{stage}"]
        layout = as_json(stage_layout(trial, stage))
        assert layout == {key: captured[key] for key in layout}


@pytest.mark.parametrize("case", STEPS)
def test_owners(case: str) -> None:
    vector = load(case)
    owned = np.load(VECTORS / f"{case}.npz")["owned"]
    for end, (layout, name) in enumerate(ends(vector)):
        for dp_rank in range(vector["dp"]):
            ours = mask(layout.owned_intervals(name, dp_rank), owned.shape[2])
            np.testing.assert_array_equal(ours, owned[end, dp_rank])


@pytest.mark.parametrize("case", STEPS)
def test_the_ends_differ_exactly_on_the_misowned_elements(case: str) -> None:
    vector = load(case)
    arrays = np.load(VECTORS / f"{case}.npz")
    wte, lm_head = (
        np.where(arrays["owned"][end], arrays["final"][end], 0).sum(axis=0, dtype=np.float32) for end in range(2)
    )
    (first, _), (last, _) = ends(vector)
    misowned = mask(misowned_intervals(first, last), wte.size)
    np.testing.assert_array_equal(wte != lm_head, misowned)
    assert misowned.sum() == vector["assembled_elements_unequal"]


@pytest.mark.parametrize("case", STEPS)
def test_prescale_kind(case: str) -> None:
    vector = load(case)
    captured = {"divide_by_dp": "divide", "multiply_by_inverse_dp": "multiply_by_inverse"}[vector["prescale"]]
    assert rule(vector).prescale == captured


def load(case: str) -> dict[str, Any]:
    vector: dict[str, Any] = json.loads((VECTORS / f"{case}.json").read_text())
    return vector


def rule(vector: dict[str, Any]) -> LayoutRule:
    found = RULES[resolve(vector["source"].split()[-1])]
    removed = vector.get("variant") == "shared-embedding bucket removed"
    return replace(found, own_bucket=False) if removed else found


def stage(vector: dict[str, Any], pp_rank: int) -> tuple[ParameterShape, ...]:
    """The stage as our models register it. The `odd` cases have one layer a stage and a narrower feed-forward."""
    odd = len(vector["layout"]["wte"]["params"]) == 14
    model = ModelSpec(vector["vocab"], vector["hidden"], num_layers=2 if odd else 4, num_heads=4, seq_len=16)
    return gpt_stage_parameters(model, vector["pp"], pp_rank, ffn_hidden_size=64 if odd else None)


def ends(vector: dict[str, Any]) -> list[tuple[BufferLayout, str]]:
    return [
        (build_layout(stage(vector, pp_rank), rule(vector), vector["dp"]), name)
        for pp_rank, name in enumerate((WORD_EMBEDDINGS, OUTPUT_LAYER))
    ]


def chunks(vector: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for stage_name, of_stage in vector["layout"].items():
        yield from ((stage_name, chunk) for chunk in of_stage)


def registered(chunk: dict[str, Any]) -> list[ParameterShape]:
    """A chunk's parameters in registration order, which the buffer reverses."""
    return [
        ParameterShape(p["name"], (p["stop"] - p["start"],), p["name"] in (WORD_EMBEDDINGS, OUTPUT_LAYER))
        for p in reversed(chunk["params"])
    ]


def as_json(layout: BufferLayout) -> dict[str, Any]:
    return {
        "buffer_numel": layout.buffer_numel,
        "buckets": [{"offset": b.offset, "numel": b.numel, "unpadded": b.unpadded} for b in layout.buckets],
        "params": [{"name": p.name, "start": p.start, "stop": p.stop, "bucket": p.bucket} for p in layout.params],
    }


def mask(intervals: Intervals, num_elements: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    inside = np.zeros(num_elements, dtype=bool)
    for interval in intervals:
        inside[interval.start : interval.stop] = True
    return inside
