"""A whole mesh in one process: the trials of a gang of thousands of ranks, on a machine that has no such gang.

Every rank has its own gradient buffers; they are laid out, synchronised and judged by the code of the live step
(`workers.layout`, `workers.grad_sync`, `workers.divergence`) through another communicator. What is not run: the
pipeline (each replica's stages follow one another) and the optimizer, so that weights stay as they are. It says
nothing about a cluster; it shows what orderings and judges do at widths that nobody rents for a test.

Shape legend: P = elements of the tied weight; n = elements of one piece of an owner's intervals; C = contributors, in
the order of `workers.mesh.ends_members`; D = dp ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workers.checks.finiteness import count_nonfinite
from workers.checks.replicas import digest
from workers.communicator import VirtualRanks
from workers.contract import (
    REFERENCE_STACK,
    Device,
    NormRow,
    OrderingName,
    ParametersRow,
    Phase,
    ProbeName,
    ReplicaRow,
    StepReport,
    TrialSpec,
)
from workers.divergence import EndJudgement, judge_pieces
from workers.errors import SpecError
from workers.exchange import Expectation, Piece, cut_pieces
from workers.grad_buffer import GradBuffer, accumulate_into, select, tied_buffer
from workers.grad_sync import counted_tokens, prescale_of, sync_gradients
from workers.intervals import Intervals
from workers.models import build_stage, microbatch_loss, microbatches
from workers.orderings import ordering_of
from workers.parameters import tied_parameter_name
from workers.prediction import stage_layout
from workers.reference import signed_tied_sum
from workers.replays import compute_replays
from workers.step import MAX_ANSWER_ELEMENTS, expect
from workers.virtual_norm import measure_norms, sum_replicas
from workers.virtual_parameters import judge_parameters

_CPU = torch.device("cpu")

DataSource = Callable[[TrialSpec, int, int, torch.device], tuple[Tensor, Tensor]]
"""(spec, step, dp_rank, device) -> its tokens and targets, int64 [M * B, S] each, microbatch after microbatch."""

StageGradients = Mapping[str, Tensor]
"""By parameter: every replica's local gradient, float32 [D, numel], not signed."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What all replicas compute before any synchronisation; the same under every ordering."""

    stages: tuple[StageGradients, ...]
    weights_digests: tuple[str, ...]
    """By pp_rank, of all its chunks."""
    replay_CP: Tensor
    floor_C: Tensor


class VirtualSession:
    """Runs trials one after another; trials of one mesh and data share their local gradients, step by step."""

    def __init__(self) -> None:
        self._data: TrialSpec | None = None
        self._steps: dict[int, LocalStep] = {}

    def run(self, trials: Sequence[TrialSpec]) -> Iterator[StepReport]:
        """Every rank's report of every step, as a gang would give them. Raises SpecError for what it cannot run."""
        for spec in trials:
            _refuse_live_only(spec)
        for trial_index, spec in enumerate(trials):
            for step in range(spec.steps):
                yield from self._run_step(spec, trial_index, step)

    def _run_step(self, spec: TrialSpec, trial_index: int, step: int) -> Iterator[StepReport]:
        local = self._local_step(spec, step)
        mesh = VirtualMesh(spec, step, local.stages)
        mesh.synchronise()
        judged = mesh.judge(local.replay_CP, local.floor_C)
        parameters: dict[int, list[ParametersRow]] = {rank: [] for rank in range(spec.mesh.world_size)}
        for world_rank, row in mesh.judge_parameters(local.stages):
            parameters[world_rank].append(row)
        for world_rank, norm in enumerate(mesh.norms()):
            found = judged.get(world_rank)
            yield _report(mesh, trial_index, world_rank, found, parameters[world_rank], norm, local)

    def _local_step(self, spec: TrialSpec, step: int) -> LocalStep:
        # Neither the ordering nor the number of steps changes the data or the weights.
        data = replace(spec, ordering=OrderingName.FIXED, steps=1, repeat=0)
        if data != self._data:
            self._data, self._steps = data, {}
        if step not in self._steps:
            self._steps[step] = compute_local_step(spec, step)
        return self._steps[step]


class VirtualMesh:
    """One step of one trial on all ranks: buffers filled with local gradients, then synchronised, then judged."""

    def __init__(self, spec: TrialSpec, step: int, stages: Sequence[StageGradients]) -> None:
        self.spec = spec
        self.step = step
        self.ordering = ordering_of(spec)
        self.expectation = expect(spec, self.ordering)
        self.members = self.expectation.members
        self.buffers = _fill_buffers(spec, stages, self.expectation)
        self.nonfinite = {rank: count_nonfinite(*(b.main_grad for b in held)) for rank, held in self.buffers.items()}
        self.local_CP = torch.stack([self.tied(rank) for rank in self.members])
        self._norm_reference = sum_replicas(spec, stages, self.local_CP)
        self._scattered: dict[int, Tensor] = {}

    def tied(self, world_rank: int) -> Tensor:
        """A holder's tied gradient as it now stands, float32 [P], as a view."""
        return tied_buffer(self.buffers[world_rank]).tied_grad()

    def synchronise(self) -> None:
        """Run the ordering's phases over all ranks."""
        mesh, prescale = self.spec.mesh, prescale_of(self.spec)
        virtual = VirtualRanks(mesh.world_size)
        tokens = counted_tokens(self.spec)
        sync_gradients(self.ordering, mesh, self.buffers, virtual, prescale, self._observe, tokens=tokens)

    def _observe(self, phase: Phase) -> None:
        if phase is Phase.SCATTERED and self.spec.mesh.pp > 1 and self.ordering.ties_after_sync:
            self._scattered = {rank: self.tied(rank).clone() for rank in self.members}

    def judge_parameters(self, stages: Sequence[StageGradients]) -> Iterator[tuple[int, ParametersRow]]:
        """Every rank's rows of its parameters, given all replicas' local gradients."""
        return judge_parameters(self.spec, self.buffers, self._signed(stages), self._scattered)

    def _signed(self, stages: Sequence[StageGradients]) -> list[StageGradients]:
        """Local gradients as the buffers had them: the tied weight's signed."""
        dp, num_stages = self.spec.mesh.dp, self.spec.mesh.num_stages
        signed = list(stages)
        for stage, local_DP in ((0, self.local_CP[:dp]), (num_stages - 1, self.local_CP[-dp:])):
            if name := tied_parameter_name(num_stages, stage):
                signed[stage] = {**signed[stage], name: local_DP}
        return signed

    def assemble(self, end_index: int) -> Tensor:
        """An end's whole gradient (0 for wte, 1 for lm_head), each element from an owner; float32 [P]."""
        dp = self.spec.mesh.dp
        whole_P = self.local_CP.new_full((self.local_CP.shape[1],), torch.nan)
        for index in range(end_index * dp, (end_index + 1) * dp):
            grad_P = self.tied(self.members[index])
            for part in self.expectation.owned[index]:
                whole_P[part.start : part.stop] = grad_P[part.start : part.stop]
        return whole_P

    def judge(self, replay_CP: Tensor, floor_C: Tensor) -> dict[int, EndJudgement]:
        """Every holder's judgement by world rank. `replay_CP` float32 [C, P] and `floor_C` [C] as in `Piece`."""
        dp, spec = self.spec.mesh.dp, self.spec
        last_end = self.assemble(1) if len(self.members) > dp and self.expectation.sharded else None
        asked = spec.probe is ProbeName.EXACT and dp * replay_CP.shape[1] <= MAX_ANSWER_ELEMENTS
        answer = (lambda: signed_tied_sum(spec, self.step)) if asked else None

        def pieces_of(index: int) -> Iterator[Piece]:
            for wanted in cut_pieces(self.expectation.owned[index], len(self.members)):
                yield self._piece(index, wanted, replay_CP, floor_C, last_end)

        return {
            rank: judge_pieces(self.expectation, rank, pieces_of(index), self.tied(rank), answer)
            for index, rank in enumerate(self.members)
        }

    def norms(self) -> list[NormRow]:
        """The global gradient norm as every rank has it, by world rank."""
        return measure_norms(self.spec, self.buffers, self.expectation.sharded, self._norm_reference)

    def _piece(
        self, index: int, wanted: Intervals, replay_CP: Tensor, floor_C: Tensor, last_end: Tensor | None
    ) -> Piece:
        dp = self.spec.mesh.dp
        other: Tensor | None = None
        if index < dp < len(self.members):
            other = self.tied(self.members[dp + index]) if last_end is None else last_end
        synced_n = select(self.tied(self.members[index]), wanted)
        return Piece(
            intervals=wanted,
            synced_n=synced_n,
            local_Cn=_columns(self.local_CP, wanted),
            replay_Cn=_columns(replay_CP, wanted),
            floor_C=floor_C,
            other_end_n=None if other is None else select(other, wanted),
            weight_n=synced_n[:0],
            other_weight_n=None,
            late_Cn=None,
        )


def compute_local_step(spec: TrialSpec, step: int) -> LocalStep:
    """All replicas' local gradients of one step, and the single-process answer that they are held against."""
    replays = [compute_replays(spec, step, dp_rank, _CPU) for dp_rank in range(spec.mesh.dp)]
    digests = tuple(_weights_digest(spec, pp_rank, step) for pp_rank in range(spec.mesh.pp))
    num_ends = 2 if spec.mesh.pp > 1 else 1
    by_contributor = [replays[dp_rank][end] for end in range(num_ends) for dp_rank in range(spec.mesh.dp)]
    replay_CP = torch.stack([replay.grad_P for replay in by_contributor])
    floor_C = replay_CP.new_tensor([replay.floor for replay in by_contributor])
    return LocalStep(replica_gradients(spec, step), digests, replay_CP, floor_C)


def _weights_digest(spec: TrialSpec, pp_rank: int, step: int) -> str:
    modules = (build_stage(spec, stage, _CPU, step) for stage in spec.mesh.stages(pp_rank))
    return digest([torch.cat([weight.detach().flatten() for module in modules for weight in module.parameters()])])


def replica_gradients(spec: TrialSpec, step: int, source: DataSource = microbatches) -> tuple[StageGradients, ...]:
    """By stage, every replica's local gradient of every parameter: microbatch after microbatch through all stages.

    The exact probe's batch goes through in one piece: its integers add up to the same in any order.
    """
    spec_dp, num_stages = spec.mesh.dp, spec.mesh.num_stages
    modules = [build_stage(spec, stage, _CPU, step) for stage in range(num_stages)]
    buffers = [GradBuffer(stage_layout(spec, stage), _CPU, None) for stage in range(num_stages)]
    for module, buffer in zip(modules, buffers, strict=True):
        accumulate_into(module, buffer)
    gradients = [{p.name: torch.empty(spec_dp, p.stop - p.start) for p in buffer.layout.params} for buffer in buffers]
    for dp_rank in range(spec_dp):
        for buffer in buffers:
            buffer.zero()
        _backward(spec, modules, *source(spec, step, dp_rank, _CPU))
        for buffer, of_stage in zip(buffers, gradients, strict=True):
            for name, gradient_DP in of_stage.items():
                gradient_DP[dp_rank] = buffer.grad(name)
    return tuple(gradients)


def _backward(spec: TrialSpec, modules: Sequence[nn.Module], tokens_BS: Tensor, targets_BS: Tensor) -> None:
    num_parts = 1 if spec.probe is ProbeName.EXACT else spec.batch.num_microbatches
    loss_function = microbatch_loss(spec)
    for tokens, targets in zip(tokens_BS.chunk(num_parts), targets_BS.chunk(num_parts), strict=True):
        x = tokens
        for module in modules:
            x = module(x)
        loss_function(x, targets).backward()


def _fill_buffers(
    spec: TrialSpec, stages: Sequence[StageGradients], expectation: Expectation
) -> dict[int, list[GradBuffer]]:
    """Every rank's buffers, one a chunk, with its replica's gradients; the tied weight's signed with the rank code."""
    mesh, code = spec.mesh, expectation.code
    layouts = [stage_layout(spec, stage) for stage in range(mesh.num_stages)]
    buffers: dict[int, list[GradBuffer]] = {}
    for world_rank in range(mesh.world_size):
        at = mesh.coordinates(world_rank)
        buffers[world_rank] = []
        for stage in mesh.stages(at.pp_rank):
            buffer = GradBuffer(layouts[stage], _CPU, tied_parameter_name(mesh.num_stages, stage))
            for name, gradient_DP in stages[stage].items():
                buffer.grad(name).copy_(gradient_DP[at.dp_rank])
            if code is not None and buffer.tied_name is not None:
                tied_P = buffer.tied_grad()
                tied_P.copy_(code.sign(tied_P.long(), expectation.members.index(world_rank)))
            buffers[world_rank].append(buffer)
    return buffers


def _columns(values_CP: Tensor, wanted: Intervals) -> Tensor:
    """The elements of every contributor inside `wanted`, float32 [C, n]; a view where there is one interval."""
    if len(wanted) == 1:
        return values_CP[:, wanted[0].start : wanted[0].stop]
    return torch.cat([values_CP[:, part.start : part.stop] for part in wanted], dim=1)


def _report(
    mesh: VirtualMesh,
    trial_index: int,
    world_rank: int,
    judged: EndJudgement | None,
    parameters: Sequence[ParametersRow],
    norm: NormRow,
    local: LocalStep,
) -> StepReport:
    spec = mesh.spec
    at = spec.mesh.coordinates(world_rank)
    weights = local.weights_digests[at.pp_rank]
    return StepReport(
        trial_index=trial_index,
        probe=spec.probe,
        ordering=spec.ordering,
        repeat=spec.repeat,
        step=mesh.step,
        world_rank=world_rank,
        dp_rank=at.dp_rank,
        pp_rank=at.pp_rank,
        tp_rank=at.tp_rank,
        divergence=(judged.divergence,) if judged else (),
        trace=(),
        tied=judged.tied if judged else None,
        replica=ReplicaRow(weights, weights),
        loss=None,
        seconds={},
        nonfinite_elements=mesh.nonfinite[world_rank],
        grad_norm=norm,
        parameters=tuple(parameters),
    )


def _refuse_live_only(spec: TrialSpec) -> None:
    """What needs a real backward, an optimizer, or somebody to strike."""
    for name, present, remedy in (
        ("tensor parallelism", spec.mesh.tp > 1, "its ranks meet inside the model; set tp to 1"),
        ("overlap", spec.overlap, "it starts inside a real backward; set overlap to false"),
        ("somebody else's stack", spec.stack != REFERENCE_STACK, "it needs process groups; run it on real ranks"),
        ("a drill", spec.drill is not None, "there is nobody to strike; leave it out"),
        ("more than one gpt step", spec.probe is ProbeName.GPT and spec.steps > 1, "nothing is updated; ask for 1"),
        ("cuda", spec.device is not Device.CPU, "virtual ranks compute on the cpu; ask for that"),
    ):
        if present:
            raise SpecError(f"{name} cannot run on virtual ranks: {remedy}")
