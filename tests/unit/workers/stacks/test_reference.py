"""The reference stack alone: who owns what, gradients as views, the step that everybody ends with."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from lockstep import Lockstep
from torch import nn

from workers.communicator import ProcessGroups
from workers.contract import BatchSpec, Coordinates, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.grad_sync import prescale_for
from workers.intervals import Interval, count, union
from workers.models import build_stage
from workers.optimizer import optimizer_for
from workers.orderings import ORDERINGS
from workers.parameters import WORD_EMBEDDINGS
from workers.prediction import stage_layout
from workers.stacks.protocol import StackContext
from workers.stacks.reference import ReferenceStack

CPU = torch.device("cpu")
DP = 3


def built(ordering: OrderingName, dp_rank: int, communicator: ProcessGroups) -> tuple[nn.Module, ReferenceStack]:
    spec = TrialSpec(ProbeName.EXACT, ordering, Mesh(DP, 1), ModelSpec(11, 4, 2, 2, 4), BatchSpec(1, 2))
    module, named = build_stage(spec, 0, CPU), ORDERINGS[ordering]
    prescale = prescale_for(named, spec.probe, DP)
    context = StackContext(
        mesh=spec.mesh,
        at=Coordinates(dp_rank, dp_rank, 0, 0),
        modules=(module,),
        tied=cast("nn.Parameter", module.get_parameter(WORD_EMBEDDINGS)),
        dp_group=cast("Any", None),
        pp_group=cast("Any", None),
        tie_group=None,
        communicator=communicator,
        divisor=prescale.divisor,
        num_microbatches=2,
        make_optimizer=optimizer_for(spec.probe),
    )
    return module, ReferenceStack(context, named, [stage_layout(spec, 0)], prescale)


@pytest.mark.parametrize("ordering", [OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE])
def test_backward_to_weights(ordering: OrderingName) -> None:
    def rank_main(dp_rank: int, communicator: ProcessGroups) -> list[tuple[Any, ...]]:
        module, stack = built(ordering, dp_rank, communicator)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        for _ in range(2):
            stack.zero_grad()
            loss = sum((parameter * (dp_rank + 1)).sum() for parameter in module.parameters())
            cast("torch.Tensor", loss).backward()
        views = [stack.grad(parameter) for parameter in module.parameters()]
        assert all(bool((view == dp_rank + 1).all()) for view in views)
        stack.finalize(lambda _: None)
        stack.step()
        owned = [stack.owned(parameter) for parameter in module.parameters()]
        return [
            (intervals, view, old, parameter.detach())
            for intervals, view, old, parameter in zip(owned, views, before, module.parameters(), strict=True)
        ]

    by_rank = Lockstep(DP).run(rank_main)
    for of_parameter in zip(*by_rank, strict=True):
        old = of_parameter[0][2]
        covered: tuple[Interval, ...] = ()
        for intervals, view, _, weight in of_parameter:
            covered = union(covered, intervals)
            for interval in intervals:
                # 1 + 2 + 3, over the power of two that stands for dp.
                assert bool((view[interval.start : interval.stop] == 6 / 4).all())
            assert torch.equal(weight, old - 6 / 4)
        assert count(covered) == old.numel()
        copies = DP if ordering is OrderingName.ALL_REDUCE else 1
        assert sum(count(intervals) for intervals, *_ in of_parameter) == old.numel() * copies


def test_weights_changed_from_outside_are_what_the_next_step_updates() -> None:
    def rank_main(dp_rank: int, communicator: ProcessGroups) -> list[torch.Tensor]:
        module, stack = built(OrderingName.OWN_BUCKET, dp_rank, communicator)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
        stack.weights_changed()
        stack.step()
        return [parameter.detach() for parameter in module.parameters()]

    for weights in Lockstep(DP).run(rank_main):
        assert all(bool((weight == 7.0).all()) for weight in weights)
