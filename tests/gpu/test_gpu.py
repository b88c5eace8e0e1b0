"""What only a GPU can show: the same steps on CUDA tensors, over gloo with four ranks on one device and over NCCL.

Needs torch, numpy and pytest only (no Ray, no database): `python -m pytest tests/gpu -q -s`, well under five minutes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_world import run_trials, run_world
from measured import assert_as_predicted, every_trial, rows

from workers.contract import BatchSpec, Device, Dtype, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec, Verdict
from workers.verdict import judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"),
]

GPT2_EMBEDDING = ModelSpec(vocab_size=50257, hidden_size=768, num_layers=1, num_heads=12, seq_len=128)
TINY_MESH = Mesh(2, 2)
NUM_TIMED_STEPS = 5


def of_probe(specs: Sequence[TrialSpec], probe: ProbeName) -> list[TrialSpec]:
    return [spec for spec in specs if spec.probe is probe]


@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(4, 1), Mesh(1, 4)], ids=str)
def test_exact_on_four_ranks_of_one_gpu_by_value(mesh: Mesh) -> None:
    """Dp 4 also sums more than two terms; pp 4 sends hidden states through stages that hold no tied weight."""
    specs = of_probe(every_trial(mesh, 2, Device.CUDA), ProbeName.EXACT)
    reports = run_trials(specs)
    for index, spec in enumerate(specs):
        assert_as_predicted(spec, reports, index, 2)
        for _, row in rows(reports, index):
            # The bound is zero: a subject's every element is the integer answer itself.
            if spec.ordering not in (OrderingName.BUGGY, OrderingName.OWN_BUCKET_UNALIGNED):
                assert (row.max_abs_error, row.reference_max_abs_error) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_gpt_on_four_ranks_of_one_gpu(dtype: Dtype) -> None:
    specs = [replace(spec, dtype=dtype) for spec in of_probe(every_trial(TINY_MESH, 2, Device.CUDA), ProbeName.GPT)]
    reports = run_trials(specs)
    for index, spec in enumerate(specs):
        assert_as_predicted(spec, reports, index, 2)
    judgement = judge(specs, [report for of_rank in reports for report in of_rank])
    assert judgement.verdict is Verdict.PASS, judgement.reasons


def test_ranks_on_a_gpu_say_which() -> None:
    for backend in ("gloo", "nccl"):
        [fingerprint] = run_world(1, fingerprint_of, device=Device.CUDA, backend=backend)
        assert fingerprint.backend == backend
        assert (fingerprint.backend_version is None) == (backend == "gloo")
        assert fingerprint.device == torch.cuda.get_device_name()
        assert fingerprint.device_uuid.startswith("GPU-")


def test_one_nccl_rank_by_value() -> None:
    specs = every_trial(Mesh(1, 1), 2, Device.CUDA)
    reports = run_world(1, run_through_nccl, specs, device=Device.CUDA, backend="nccl")
    for index, spec in enumerate(specs):
        assert_as_predicted(spec, reports, index, 2)
        for report, row in rows(reports, index):
            assert (row.diverged_elements, row.nonfinite_elements, report.nonfinite_elements) == (0, 0, 0)
            if spec.probe is ProbeName.EXACT:
                assert row.max_abs_error == 0.0


def test_nccl_moves_what_it_is_given() -> None:
    [received] = run_world(1, exchange_through_nccl, device=Device.CUDA, backend="nccl")
    assert received == [0.0, 1.0, 2.0, 3.0]


def test_cost_of_the_statistics() -> None:
    """Printed, not asserted: a step with everything measured against the bare step."""
    large = TrialSpec(
        ProbeName.GPT, OrderingName.OWN_BUCKET, Mesh(1, 1), GPT2_EMBEDDING, BatchSpec(1, 4), device=Device.CUDA
    )
    tiny = of_probe(every_trial(TINY_MESH, 2, Device.CUDA), ProbeName.GPT)[0]
    for name, spec, backend in (
        ("50257 x 768, 1 layer, float32, 1 NCCL rank", large, "nccl"),
        ("50257 x 768, 1 layer, bfloat16, 1 NCCL rank", replace(large, dtype=Dtype.BFLOAT16), "nccl"),
        ("tiny, float32, 4 gloo ranks on one GPU", tiny, "gloo"),
    ):
        costs = run_world(spec.mesh.world_size, measure_cost, spec, device=Device.CUDA, backend=backend)
        measured_s, bare_s = costs[0]
        print(f"\n{name}: step {measured_s * 1e3:.2f} ms, bare {bare_s * 1e3:.2f} ms, ratio {measured_s / bare_s:.2f}")
        assert 0 < bare_s < 60


def fingerprint_of(session: Any) -> Any:
    return session.fingerprint()


def run_through_nccl(session: Any, specs: Sequence[TrialSpec]) -> Any:
    """On the one rank: a group of one would skip its collectives, so make it really call NCCL."""
    from workers import communicator

    communicator._is_trivial = lambda tensor_N, members: tensor_N.numel() == 0
    return list(session.run(specs))


def exchange_through_nccl(session: Any) -> list[float]:
    import torch.distributed as dist

    sent = torch.arange(4.0, device="cuda")
    received = torch.empty_like(sent)
    group = session.mesh_groups(Mesh(1, 1))[(0,)]
    dist.all_to_all_single(received, sent, [4], [4], group)
    return received.tolist()


def measure_cost(session: Any, spec: TrialSpec) -> tuple[float, float]:
    """On one rank: (seconds a measured step, seconds a bare step), the least of several, taken in turn."""
    trial = session.trial(spec)
    measured, bare = [], []
    for step in range(1, NUM_TIMED_STEPS + 2):
        measured.append(timed(lambda step=step: trial.run_step(step)))
        bare.append(timed(lambda step=step: trial.run_bare_step(step)))
    # The first of each warms up kernels and allocations.
    return min(measured[1:]), min(bare[1:])


def timed(call: Any) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s
