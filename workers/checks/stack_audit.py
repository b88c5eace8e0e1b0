"""Judges a stack over every parameter of a stage: who owns it, its gradient, its update, its replicas.

The tied weight's gradient is judged with its other end (`workers.divergence`); everything else of a foreign stack is
judged here. Local gradients are seen by hooks that come before the stack's; they cross by all-to-all, never by a
collective of the stack.

Shape legend: N = elements of all parameters of the stage, one after another; n = elements of one piece of what an
owner owns; D = dp replicas; K = parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from workers.checks.named import Named
from workers.checks.ownership import gather_claims, ownership_findings
from workers.checks.replicas import digest
from workers.communicator import ProcessGroups
from workers.contract import Coordinates, Mesh, StackFault, StackFinding, StackOrigin, StackRow
from workers.divergence import rounding_bound
from workers.exchange import PIECE_ELEMENTS, PIECE_TERMS
from workers.grad_buffer import select
from workers.grad_sync import Prescale
from workers.intervals import Interval, Intervals, count, lay_end_to_end, pieces, subtract
from workers.local_gradients import LocalGradients
from workers.mesh import dp_members
from workers.stacks.protocol import Stack


class StackAudit:
    """One rank's part. Building it and `conclude` are collective over the dp replicas of the stage.

    `named` are this rank's parameters; `local` knows their gradients as backward gave them.
    """

    def __init__(
        self,
        stack: Stack,
        origin: StackOrigin,
        local: LocalGradients,
        named: Sequence[Named],
        tied: nn.Parameter | None,
        mesh: Mesh,
        at: Coordinates,
        communicator: ProcessGroups,
        prescale: Prescale,
        exact: bool,
    ) -> None:
        self._stack = stack
        self._origin = origin
        self._local = local
        self._names = tuple(each.name for each in named)
        self._parameters = tuple(each.parameter for each in named)
        self._members = dp_members(mesh, at.pp_rank)
        self._at = at
        self._communicator = communicator
        self._prescale = prescale
        self._exact = exact
        sizes = [parameter.numel() for parameter in self._parameters]
        stops = list(accumulate(sizes))
        self._spans = tuple(Interval(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
        device = self._parameters[0].device
        claims = [stack.owned(parameter) for parameter in self._parameters]
        gathered = gather_claims(communicator, self._members, claims, device)
        # The same everywhere: one replica speaks for the stage.
        self._ownership = tuple(ownership_findings(self._names, sizes, gathered)) if at.dp_rank == 0 else ()
        self._owned = [self._flat(of_rank) for of_rank in gathered]
        apart = () if tied is None else (self._span(tied),)
        self._judged = [subtract(owned, apart) for owned in self._owned]
        self._starts_K = torch.tensor([span.start for span in self._spans], device=device)
        self._synced_N = self._before_N = torch.empty(0)

    def begin_step(self) -> None:
        """Keep the weights as the trial has set them, before the stack is told of the step. Local."""
        self._before_N = self._flatten(nn.Parameter.detach)

    def remember(self) -> None:
        """Keep the gradients as they are between `finalize` and `step`, which may use them up. Local."""
        self._synced_N = self._flatten(self._stack.grad)

    def synced(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient as it was remembered, float32 [numel]."""
        span = self._span(parameter)
        return self._synced_N[span.start : span.stop]

    def conclude(self) -> StackRow:
        """The row, once the stack has stepped."""
        findings = [*self._ownership, *self._judge_gradients()]
        if self._exact:
            findings += self._judge_update()
        findings += self._judge_replicas()
        mine = self._at.dp_rank
        return StackRow(
            origin=self._origin,
            num_elements=self._spans[-1].stop,
            gradient_elements=count(self._judged[mine]),
            update_elements=count(self._owned[mine]) if self._exact else 0,
            findings=tuple(findings),
        )

    def _flatten(self, of_parameter: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """A copy of something that there is of every parameter, float32 [N]."""
        return torch.cat([of_parameter(parameter).flatten().float() for parameter in self._parameters])

    def _span(self, parameter: nn.Parameter) -> Interval:
        return next(span for span, known in zip(self._spans, self._parameters, strict=True) if known is parameter)

    def _flat(self, claims: Sequence[Intervals]) -> Intervals:
        """Claims by parameter as intervals of the flat tensor."""
        return lay_end_to_end((span.size, claim) for span, claim in zip(self._spans, claims, strict=True))

    def _judge_gradients(self) -> Iterator[StackFinding]:
        """Every owned gradient against the float64 sum of what the replicas' backward passes gave."""
        dp, local_N = len(self._members), self._flatten(self._local.grad)
        max_elements = max(1, min(PIECE_ELEMENTS, PIECE_TERMS // dp))
        by_owner = [pieces(judged, max_elements) for judged in self._judged]
        tally = _Tally(self._starts_K)
        for index in range(max(map(len, by_owner))):
            wants = [owner[index] if index < len(owner) else () for owner in by_owner]
            mine = wants[self._at.dp_rank]
            sends = [select(local_N, wanted) for wanted in wants]
            local_Dn = torch.stack(self._communicator.all_to_all(self._members, sends, [count(mine)] * dp))
            if mine:
                terms_Dn = local_Dn.double() * self._prescale.factor
                bound_n = self._bound(terms_Dn)
                tally.add(mine, select(self._synced_N, mine).double(), terms_Dn.sum(dim=0), bound_n)
        yield from tally.findings(self._names, StackFault.GRADIENT_WRONG, "the sum of all replicas' own gradients")

    def _bound(self, terms_Dn: Tensor) -> Tensor:
        magnitude_n = terms_Dn.abs().sum(dim=0)
        if self._exact:
            return torch.zeros_like(magnitude_n)
        return rounding_bound(magnitude_n, len(terms_Dn), self._prescale)

    def _judge_update(self) -> Iterator[StackFinding]:
        """Every owned weight against the exact probe's update: one float32 subtraction, so the same bits anywhere."""
        mine = self._owned[self._at.dp_rank]
        tally = _Tally(self._starts_K)
        if mine:
            after_N = self._flatten(nn.Parameter.detach)
            expected_n = select(self._before_N, mine) - select(self._synced_N, mine)
            tally.add(mine, select(after_N, mine).double(), expected_n.double(), torch.zeros_like(expected_n).double())
        yield from tally.findings(self._names, StackFault.UPDATE_WRONG, "the weight before less its gradient")

    def _judge_replicas(self) -> Iterator[StackFinding]:
        """This rank's parameters whose bits differ from those of most replicas (of dp_rank 0 where it is even)."""
        digests = [digest([parameter.detach().flatten()]) for parameter in self._parameters]
        words = [int(text[i : i + 8], 16) for text in digests for i in range(0, len(text), 8)]
        words_W = torch.tensor(words, dtype=torch.int64, device=self._starts_K.device)
        dp = len(self._members)
        received = self._communicator.all_to_all(self._members, [words_W] * dp, [words_W.numel()] * dp)
        of_ranks = [values.view(len(digests), -1).tolist() for values in received]
        for index, name in enumerate(self._names):
            held = [tuple(of_rank[index]) for of_rank in of_ranks]
            most = Counter(held).most_common(1)[0][0]
            if held[self._at.dp_rank] != most:
                size = self._spans[index].size
                detail = f"has other bits than on dp_rank {held.index(most)} after the step"
                yield StackFinding(StackFault.WEIGHTS_DIFFER, name, size, detail)


class _Tally:
    """What was compared, added up by parameter."""

    def __init__(self, starts_K: Tensor) -> None:
        self._starts_K = starts_K
        zeros_K = torch.zeros(len(starts_K), dtype=torch.float64, device=starts_K.device)
        self._compared_K, self._wrong_K, self._largest_K = zeros_K, zeros_K.clone(), zeros_K.clone()
        self._value_truth_K, self._truth_squared_K = zeros_K.clone(), zeros_K.clone()

    def add(self, intervals: Intervals, value_n: Tensor, truth_n: Tensor, bound_n: Tensor) -> None:
        """Compare one piece; tensors are float64 and follow `intervals`."""
        indices = [torch.arange(i.start, i.stop, device=value_n.device) for i in intervals]
        parameter_n = torch.bucketize(torch.cat(indices), self._starts_K, right=True) - 1
        error_n = (value_n - truth_n).abs()
        self._compared_K.index_add_(0, parameter_n, torch.ones_like(error_n))
        self._wrong_K.index_add_(0, parameter_n, (~(error_n <= bound_n)).double())
        self._largest_K.scatter_reduce_(0, parameter_n, error_n, "amax")
        self._value_truth_K.index_add_(0, parameter_n, value_n * truth_n)
        self._truth_squared_K.index_add_(0, parameter_n, truth_n * truth_n)

    def findings(self, names: Sequence[str], fault: StackFault, truth: str) -> Iterator[StackFinding]:
        """One for each parameter with an element outside its bound."""
        for index in self._wrong_K.nonzero().flatten().tolist():
            wrong, compared = int(self._wrong_K[index]), int(self._compared_K[index])
            squared = float(self._truth_squared_K[index])
            factor = f"; it is {float(self._value_truth_K[index]) / squared:.6g} times that" if squared else ""
            distance = f"by up to {float(self._largest_K[index]):.3e}{factor}"
            detail = f"differs from {truth} in {wrong} of {compared} elements owned there, {distance}"
            yield StackFinding(fault, names[index], wrong, detail)
