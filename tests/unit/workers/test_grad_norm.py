"""The global gradient norm: owned elements only, the tied weight once, and a bound that nothing right exceeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lockstep import Lockstep
from torch import Tensor, nn

from workers.communicator import ProcessGroups
from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.divergence import DOUBLE_ROUNDOFF
from workers.grad_norm import GradNorm, NormReferences, compute_reference, sum_of_squares
from workers.grad_sync import prescale_for
from workers.intervals import Interval, Intervals
from workers.models import build_stage
from workers.orderings import ORDERINGS
from workers.parameters import OUTPUT_LAYER
from workers.reference import replay_gradient, replay_tied_gradients, signed_tied_gradients

CPU = torch.device("cpu")
MODEL = ModelSpec(vocab_size=11, hidden_size=12, num_layers=4, num_heads=3, seq_len=5)


def spec_for(probe: ProbeName, mesh: Mesh, ordering: OrderingName = OrderingName.FIXED) -> TrialSpec:
    return TrialSpec(probe, ordering, mesh, MODEL, BatchSpec(1, max(2, mesh.pp)))


class HeldGradients:
    """What the norm asks of a stack, over given gradients."""

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor], owned: Mapping[nn.Parameter, Intervals]) -> None:
        self._gradients, self._owned = gradients, owned

    def grad(self, parameter: nn.Parameter) -> Tensor:
        return self._gradients[parameter]

    def owned(self, parameter: nn.Parameter) -> Intervals:
        return self._owned[parameter]


def halves(parameter: nn.Parameter, dp_rank: int, dp: int) -> Intervals:
    """An uneven cut: every rank owns something else, and not in one piece."""
    bounds = [index * parameter.numel() // (2 * dp) for index in range(2 * dp + 1)]
    cut = [Interval(start, stop) for start, stop in pairwise(bounds) if stop > start]
    return tuple(cut[dp_rank::dp])


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(2, 1), Mesh(1, 3), Mesh(3, 2)], ids=str)
def test_it_is_the_norm_of_the_one_gradient_that_all_ranks_share(mesh: Mesh, sharded: bool) -> None:
    spec = spec_for(ProbeName.GPT, mesh)
    modules = [build_stage(spec, pp_rank, CPU) for pp_rank in range(mesh.pp)]
    generator = torch.Generator().manual_seed(1)
    whole = {p: torch.randn(p.numel(), generator=generator) for module in modules for p in module.parameters()}

    def measure(world_rank: int, communicator: ProcessGroups) -> float:
        at = mesh.coordinates(world_rank)
        module = modules[at.pp_rank]
        everything = {p: (Interval(0, p.numel()),) for p in module.parameters()}
        owned = {p: halves(p, at.dp_rank, mesh.dp) for p in module.parameters()} if sharded else everything
        # What a rank does not own is left over from the sync and must not count.
        held = {p: torch.full_like(whole[p], 1e6) for p in module.parameters()}
        for parameter, intervals in owned.items():
            for interval in intervals:
                held[parameter][interval.start : interval.stop] = whole[parameter][interval.start : interval.stop]
        stack = HeldGradients(held, owned)
        return GradNorm(mesh, at, stack, [module], sharded).measure(communicator)  # type: ignore[arg-type]

    measured = Lockstep(mesh.world_size).run(measure)
    assert len(set(measured)) == 1
    once = [whole[p] for m in modules for n, p in m.named_parameters() if mesh.pp == 1 or n != OUTPUT_LAYER]
    expected = math.sqrt(math.fsum(float(value) ** 2 for gradient in once for value in gradient.tolist()))
    assert measured[0] == pytest.approx(expected, rel=1e-14)


def test_a_tied_weight_counted_twice_is_another_norm() -> None:
    mesh = Mesh(1, 2)
    modules = [build_stage(spec_for(ProbeName.GPT, mesh), pp_rank, CPU) for pp_rank in range(2)]

    def measure(world_rank: int, communicator: ProcessGroups) -> float:
        module = modules[world_rank]
        held = {p: torch.ones(p.numel()) for p in module.parameters()}
        owned = {p: (Interval(0, p.numel()),) for p in module.parameters()}
        norm = GradNorm(mesh, mesh.coordinates(world_rank), HeldGradients(held, owned), [module], True)  # type: ignore[arg-type]
        norm.uncounted = frozenset()
        return norm.measure(communicator)

    doubled = Lockstep(2).run(measure)[0]
    assert doubled**2 == pytest.approx(sum(p.numel() for module in modules for p in module.parameters()), rel=1e-14)


@pytest.mark.parametrize("probe", list(ProbeName))
@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(3, 1), Mesh(2, 3)], ids=str)
def test_the_reference_is_the_batch_of_all_dp_ranks_in_one_process(probe: ProbeName, mesh: Mesh) -> None:
    spec = spec_for(probe, mesh)
    found = Lockstep(mesh.dp).run(lambda r, c: compute_reference(spec, 0, mesh.coordinates(r), c, CPU))
    assert len(set(found)) == 1
    (reference,) = set(found)
    replays = [replay_gradient(spec, 0, dp_rank, CPU) for dp_rank in range(mesh.dp)]
    summed = torch.stack([replay.summed() for replay in replays]).sum(dim=0)
    assert reference.value == pytest.approx(float(summed.norm()), rel=1e-13)
    assert reference.num_elements == summed.numel()
    assert reference.contributions >= reference.value * (1 - 1e-12)
    assert (reference.floor == 0.0) == (probe is ProbeName.EXACT)
    for dp_rank, replay in enumerate(replays):
        is_exact = probe is ProbeName.EXACT
        tied = signed_tied_gradients(spec, 0, dp_rank) if is_exact else replay_tied_gradients(spec, 0, dp_rank, CPU)
        ends = [end for end in tied if end is not None]
        assert torch.equal(replay.ends_EP, torch.stack(ends).double())


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_float32_sums_in_any_order_stay_within_the_bound(dp: int) -> None:
    """Adversarial orders and cancelling terms: the distance of the norms never exceeds what the row allows."""
    mesh, ordering = Mesh(dp, 2), ORDERINGS[OrderingName.FIXED]
    prescale = prescale_for(ordering, ProbeName.GPT, dp)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        terms = torch.randn(2 * dp, 500, generator=generator) * 10.0 ** torch.randint(
            -3, 3, (2 * dp, 1), generator=generator
        )
        terms[dp:] -= terms[:dp] * (1 - 2.0**-12)
        summed = torch.zeros(500)
        for index in torch.randperm(2 * dp, generator=generator).tolist():
            scaled = terms[index].clone()
            prescale.apply(scaled)
            summed += scaled
        exact = terms.double().sum(dim=0)
        row = reference_of(exact, terms).row(math.sqrt(float(sum_of_squares(summed))), mesh, prescale)
        assert row.reference is not None
        assert row.allowed_error is not None
        assert abs(row.value - row.reference) <= row.allowed_error
        # And it is no licence: far less than any one contribution.
        assert row.allowed_error < 1e-5 * float(terms.double().norm(dim=1).sum())


def reference_of(exact: Tensor, terms: Tensor):
    from workers.grad_norm import NormReference

    return NormReference(float(exact.norm()), float(terms.double().norm(dim=1).sum()), 0.0, exact.numel(), exact=False)


def test_an_exact_norm_may_differ_by_the_adding_of_squares_only() -> None:
    mesh = Mesh(2, 2)
    prescale = prescale_for(ORDERINGS[OrderingName.FIXED], ProbeName.EXACT, 2)
    exact = torch.arange(1, 101, dtype=torch.float64)
    row = replace(reference_of(exact, exact[None].float()), exact=True).row(float(exact.norm()) / 2, mesh, prescale)
    assert row.value == row.reference
    assert row.allowed_error == pytest.approx(116 * DOUBLE_ROUNDOFF * float(exact.norm()))


def test_references_are_computed_once_and_only_where_weights_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers import grad_norm

    computed: list[tuple[TrialSpec, int]] = []
    real = grad_norm.compute_reference

    def counting(spec: TrialSpec, step: int, *rest: object) -> object:
        computed.append((spec, step))
        return real(spec, step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(grad_norm, "compute_reference", counting)
    mesh = Mesh(1, 2)
    first, last = mesh.coordinates(0), mesh.coordinates(1)
    references = NormReferences(CPU)

    def ask(spec: TrialSpec, step: int, at=first):
        return Lockstep(1).run(lambda _, communicator: references(spec, step, at, communicator))[0]

    gpt, exact = spec_for(ProbeName.GPT, mesh), spec_for(ProbeName.EXACT, mesh)
    one = ask(gpt, 0)
    assert ask(replace(gpt, ordering=OrderingName.BUGGY, steps=7), 0) is one
    assert ask(gpt, 1) is None
    assert ask(exact, 1) != ask(exact, 0)
    assert ask(exact, 0, last) is None
    assert len(computed) == 3
