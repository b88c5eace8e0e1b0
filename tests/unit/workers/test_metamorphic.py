"""What must not matter does not: one global batch cut into other microbatches, stages and replicas, in another order.

The exact probe gives the same integers, bit for bit. gpt stays within what float32 may lose: the rounding of the sums
(proven) and, of each replica's own gradient, its distance from the same computation in float64 (measured).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cut_batches import WHOLE, shared_out, trial, unsigned, whole_answer
from torch import Tensor

from workers.contract import BatchSpec, Mesh, OrderingName, ProbeName, TrialSpec
from workers.divergence import rounding_bound
from workers.grad_sync import prescale_of
from workers.models import build_stage, microbatch_loss, microbatches
from workers.virtual import DataSource, VirtualMesh, replica_gradients

CLEAN = [OrderingName.FIXED, OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE]
CUTS = [
    (Mesh(1, 2), BatchSpec(1, 24)),
    (Mesh(2, 2), BatchSpec(1, 12)),
    (Mesh(2, 2), BatchSpec(3, 4)),
    (Mesh(2, 2), BatchSpec(12, 1)),
    (Mesh(3, 2), BatchSpec(2, 4)),
    (Mesh(4, 2), BatchSpec(1, 6)),
    (Mesh(8, 2), BatchSpec(3, 1)),
    (Mesh(2, 1), BatchSpec(3, 4)),
    (Mesh(3, 3), BatchSpec(4, 2)),
    (Mesh(2, 4), BatchSpec(2, 6)),
    (Mesh(6, 4), BatchSpec(1, 4)),
    (Mesh(2, 2, vpp=2), BatchSpec(2, 6)),
]


def synced(spec: TrialSpec, source: DataSource) -> tuple[VirtualMesh, list[Tensor]]:
    """The mesh after its sync, and each end's gradient."""
    mesh = VirtualMesh(spec, 0, replica_gradients(spec, 0, source))
    mesh.synchronise()
    return mesh, [mesh.assemble(end) for end in range(len(mesh.members) // spec.mesh.dp)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("ordering", CLEAN)
def test_the_exact_gradient_is_the_same_however_the_batch_is_cut(
    ordering: OrderingName, cut: tuple[Mesh, BatchSpec]
) -> None:
    mesh, ends = synced(trial(ProbeName.EXACT, cut, ordering), shared_out())
    for end in ends:
        assert torch.equal(unsigned(mesh.spec, end), whole_answer())


@pytest.mark.parametrize("ordering", CLEAN)
def test_the_exact_gradient_is_the_same_whoever_takes_which_part(ordering: OrderingName) -> None:
    for order in ([3, 1, 0, 2], [1, 2, 3, 0], [3, 2, 1, 0]):
        mesh, ends = synced(trial(ProbeName.EXACT, (Mesh(4, 2), BatchSpec(1, 6)), ordering), shared_out(order))
        for end in ends:
            assert torch.equal(unsigned(mesh.spec, end), whole_answer())


def test_another_batch_gives_another_exact_gradient() -> None:
    """The cases above would also hold for a gradient that does not depend on the data."""
    mesh, ends = synced(trial(ProbeName.EXACT, CUTS[1]), microbatches)
    assert not torch.equal(unsigned(mesh.spec, ends[0]), whole_answer())


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("ordering", CLEAN)
def test_the_gpt_gradient_moves_by_rounding_only(ordering: OrderingName, cut: tuple[Mesh, BatchSpec]) -> None:
    assert_within_rounding(trial(ProbeName.GPT, cut, ordering), shared_out())


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("ordering", CLEAN)
def test_the_gpt_gradient_moves_by_rounding_only_whoever_takes_which_part(
    ordering: OrderingName, order: list[int]
) -> None:
    assert_within_rounding(trial(ProbeName.GPT, (Mesh(4, 2), BatchSpec(1, 6)), ordering), shared_out(order))


def test_a_mean_of_unequal_parts_would_not_pass() -> None:
    """Half of a replica's share lost moves the gradient further than rounding may."""
    spec, source = trial(ProbeName.GPT, CUTS[2]), shared_out()

    def halved(spec: TrialSpec, step: int, dp_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens, targets = source(spec, step, dp_rank, device)
        return (tokens, targets) if dp_rank else (tokens[:6].repeat(2, 1), targets[:6].repeat(2, 1))

    with pytest.raises(AssertionError):
        assert_within_rounding(spec, halved)


def assert_within_rounding(spec: TrialSpec, source: DataSource) -> None:
    mesh, ends = synced(spec, source)
    prescale = prescale_of(spec)
    terms_CP = mesh.local_CP.double() * prescale.factor
    bound_P = rounding_bound(terms_CP.abs().sum(dim=0), len(terms_CP), prescale)
    precise_CP = precise_gradients(spec, source) * prescale.factor
    floor = float((terms_CP - precise_CP).abs().amax(dim=1).sum())
    # In float64 the cut moves the gradient by less than the floor, by orders of magnitude: the mathematics is the same.
    assert float((precise_CP.sum(dim=0) - whole_precise()).abs().max()) < floor
    for end in ends:
        assert bool(((end.double() - whole_precise()).abs() <= bound_P + 2 * floor).all())


@cache
def whole_precise() -> Tensor:
    """The gpt's gradient of the global batch in one piece, in float64."""
    return precise_gradients(trial(ProbeName.GPT, WHOLE), shared_out()).sum(dim=0)


def precise_gradients(spec: TrialSpec, source: DataSource) -> Tensor:
    """Every contributor's gradient of the tied weight in float64, [C, P]."""
    num_stages, cpu = spec.mesh.num_stages, torch.device("cpu")
    stages = [build_stage(spec, stage, cpu).double() for stage in range(num_stages)]
    weights = [stages[0].get_parameter("embedding.word_embeddings.weight")]
    weights += [stages[-1].get_parameter("output_layer.weight")] if num_stages > 1 else []
    by_end = [[torch.zeros(w.numel(), dtype=torch.float64) for _ in range(spec.mesh.dp)] for w in weights]
    loss_function = microbatch_loss(spec)
    for dp_rank in range(spec.mesh.dp):
        parts = (batch.chunk(spec.batch.num_microbatches) for batch in source(spec, 0, dp_rank, cpu))
        for tokens, targets in zip(*parts, strict=True):
            x = tokens
            for stage in stages:
                x = stage(x)
            for end, gradient in enumerate(torch.autograd.grad(loss_function(x, targets), weights)):
                by_end[end][dp_rank] += gradient.flatten()
    return torch.stack([gradient for of_end in by_end for gradient in of_end])


def test_repeats_give_the_same_bits() -> None:
    spec = replace(trial(ProbeName.GPT, CUTS[4]), ordering=OrderingName.OWN_BUCKET)
    (_, first), (_, second) = (synced(spec, shared_out()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
