"""The global gradient norm, as a distributed optimizer computes it for clipping, and what it should be.

Every rank adds the squares of the elements it owns, the ranks add their sums. The tied weight counts once, on the first
stage, as in Megatron-LM (`clip_grads.py`: parameters marked shared are left out); padding does not count. Squares are
added in float64, so that the only error worth bounding is that of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.communicator import Communicator, ProcessGroups
from workers.contract import Coordinates, Mesh, NormRow, ProbeName, TrialSpec
from workers.divergence import DOUBLE_ROUNDOFF, rounding_bound
from workers.faults import data_of
from workers.grad_buffer import select
from workers.grad_sync import Prescale
from workers.memo import Memo
from workers.mesh import Members, dp_members, model_members, world_members
from workers.parameters import OUTPUT_LAYER, Cut, cut_of
from workers.reference import replay_gradient
from workers.stacks.protocol import Stack
from workers.wire import SMALLEST_SUBNORMALS

BLOCK_ELEMENTS = 1 << 15
"""Elements squared in float64 at a time: one block's double copy stays in a core's cache."""
MAX_CACHED_REFERENCES = 16


class GradNorm:
    """One rank's part in the norm of a trial's gradients."""

    def __init__(self, mesh: Mesh, at: Coordinates, stack: Stack, modules: Sequence[nn.Module], sharded: bool) -> None:
        self._world_rank = at.world_rank
        self._stack = stack
        self._parameters = [named for module in modules for named in module.named_parameters()]
        self._device = self._parameters[0][1].device
        # Replicas that hold the whole gradient each add up their own model.
        self._members: Members = world_members(mesh) if sharded else model_members(mesh, at.dp_rank)
        self.uncounted = uncounted_parameters(mesh) | self._copies(at.tp_rank)
        """Parameters whose squares another rank adds; a drill that empties it counts the tied weight twice."""

    def _copies(self, tp_rank: int) -> frozenset[str]:
        """What every tensor-parallel rank holds whole is counted on the first of them."""
        names = (name for name, _ in self._parameters) if tp_rank else ()
        return frozenset(name for name in names if cut_of(name) is Cut.REPLICATED)

    def measure(self, communicator: Communicator) -> float:
        """The norm of the synchronised gradients, the same on every rank. Collective over the mesh."""
        counted = [parameter for name, parameter in self._parameters if name not in self.uncounted]
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for parameter in counted:
            total += sum_of_squares(select(self._stack.grad(parameter), self._stack.owned(parameter)))
        communicator.all_reduce(self._members, {self._world_rank: total})
        return math.sqrt(float(total))


def uncounted_parameters(mesh: Mesh) -> frozenset[str]:
    """The tied weight's second copy, where there is one: its gradient is in the first copy's already."""
    return frozenset({OUTPUT_LAYER} if mesh.num_stages > 1 else ())


def sum_of_squares(values_N: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, float64, scalar; a square of a float32 is exact in float64."""
    total = torch.zeros((), dtype=torch.float64, device=values_N.device)
    for block in values_N.split(BLOCK_ELEMENTS):
        doubled = block.double()
        total += doubled.dot(doubled)
    return total


@dataclass(frozen=True, slots=True)
class NormReference:
    """The norm of a global batch's unscaled gradient by single-process replays, and what bounds a run's distance."""

    value: float
    contributions: float
    """Sum over dp ranks of the norm of that rank's |terms|; not below the norm of the elementwise sum of |terms|."""
    floor: float
    """Sum over dp ranks of the distance between the replay and the same replay in float64."""
    num_elements: int
    exact: bool
    """No addition of gradients rounds."""

    def row(self, value: float, mesh: Mesh, scale: Prescale) -> NormRow:
        """`value`, measured after a clean sync, beside what it should be.

        |‖s‖ - ‖r‖| <= ‖s - r‖, and elementwise s is within `rounding_bound` of the sum of the ranks' own gradients,
        each of which is within twice its replay's floor of the replay (as `workers.divergence` has it).
        """
        # Of the tied weight both ends add, of layernorms every tensor-parallel rank does.
        num_terms = mesh.dp * max(2 if mesh.num_stages > 1 else 1, mesh.tp)
        reference = self.value * scale.factor
        floor = 2 * self.floor * scale.factor
        adding = (self.num_elements + 16) * DOUBLE_ROUNDOFF * (value + reference)
        if self.exact:
            return NormRow(value, reference, adding)
        magnitude = torch.tensor(self.contributions * scale.factor + floor, dtype=torch.float64)
        rounding = float(rounding_bound(magnitude, num_terms, scale))
        underflow = num_terms * SMALLEST_SUBNORMALS[scale.wire.dtype] * math.sqrt(self.num_elements)
        return NormRow(value, reference, rounding + underflow + floor + adding)


class NormReferences:
    """References, remembered: the orderings of one request share their data and so their truth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: Memo[tuple[TrialSpec, int], NormReference] = Memo(MAX_CACHED_REFERENCES)

    def __call__(
        self, spec: TrialSpec, step: int, at: Coordinates, communicator: ProcessGroups
    ) -> NormReference | None:
        """None on later stages, and for gpt after its first step, whose weights depend on the run under test.

        Collective over the first stage's replicas: each replays the next one's batch, nobody vouches for himself.
        """
        if at.pp_rank != 0 or not spec.is_replayable(step):
            return None
        compute = lambda: compute_reference(spec, step, at, communicator, self._device)  # noqa: E731
        return self._known.recall((data_of(spec), step), compute)


def compute_reference(
    spec: TrialSpec, step: int, at: Coordinates, communicator: ProcessGroups, device: torch.device
) -> NormReference:
    """Replay one dp rank's batch here, add the replays of all by all-to-all. Collective over the first stage."""
    members = dp_members(spec.mesh, at.pp_rank, at.tp_rank)
    replay = replay_gradient(spec, step, (at.dp_rank + 1) % spec.mesh.dp, device)
    floor = 0.0
    if spec.probe is ProbeName.GPT:
        precise = replay_gradient(spec, step, (at.dp_rank + 1) % spec.mesh.dp, device, dtype=torch.float64)
        floor = replay.minus(precise).norm_of_terms()
    summed_N = replay.summed()
    parts = list(summed_N.tensor_split(len(members)))
    mine = members.index(at.world_rank)
    received = communicator.all_to_all(members, parts, [parts[mine].numel()] * len(members))
    square = float(sum_of_squares(torch.stack(received).sum(dim=0)))
    said = torch.tensor([square, replay.norm_of_terms(), floor], dtype=torch.float64, device=device)
    heard = communicator.all_to_all(members, [said] * len(members), [3] * len(members))
    squares, magnitudes, floors = zip(*(message.tolist() for message in heard), strict=True)
    return NormReference(
        value=math.sqrt(math.fsum(squares)),
        contributions=math.fsum(magnitudes),
        floor=math.fsum(floors),
        num_elements=summed_N.numel(),
        exact=spec.probe is ProbeName.EXACT,
    )
