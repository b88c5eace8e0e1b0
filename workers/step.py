"""One rank's part of a trial: training steps under one ordering, each measured and reported.

A step is forward and backward through the pipeline, the ordering's sync phases, the optimizer, and then the
judgement. The measured code never looks at the judgement's data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from workers.checks.fingerprint import read_settings
from workers.checks.finiteness import find_nonfinite, find_nonfinite_weights
from workers.checks.layernorms import LayernormJudge
from workers.checks.named import Named, name_parameters
from workers.checks.parameters import ParameterJudges, Scene
from workers.checks.replicas import GatherWatch, digest
from workers.communicator import ProcessGroups
from workers.contract import (
    REFERENCE_STACK,
    ComputeSettings,
    Coordinates,
    DivergenceRow,
    NonfiniteRow,
    Normalization,
    NormRow,
    ParametersRow,
    Phase,
    ProbeName,
    RankPhase,
    ReplicaRow,
    StackRow,
    StepReport,
    TiedRow,
    TraceRow,
    TrialSpec,
)
from workers.contributions import MeanOfMeans, TiedSync
from workers.divergence import judge_end
from workers.exchange import Answer, Expectation, Holding
from workers.foreign import ForeignStack
from workers.grad_buffer import select
from workers.grad_norm import BLOCK_ELEMENTS, GradNorm, NormReferences
from workers.grad_sync import mean_factors, prescale_of, scale_of
from workers.handshake import Handshake
from workers.intervals import Interval, Intervals
from workers.layout import BufferLayout
from workers.local_gradients import LocalGradients
from workers.mesh import MeshGroups, dp_members, end_of, ends_members, pp_members, tie_members, tp_members
from workers.models import UNCUT, build_stage, count_valid, microbatches, seed_weights
from workers.models.weights import Shard
from workers.optimizer import optimizer_for
from workers.orderings import RANK_PHASES, Ordering, ordering_of
from workers.parameters import Cut, cut_of, tied_elements, tied_parameter_name
from workers.phase_clock import PhaseClock
from workers.pipeline import Pipeline
from workers.prediction import stage_layout, trial_early, trial_exposed, trial_misowned
from workers.rank_code import rank_code, sign_gradients
from workers.reference import signed_tied_sum
from workers.replays import ReplaySource
from workers.stacks.protocol import Stack, StackContext
from workers.stacks.reference import ReferenceStack
from workers.strikes.arsenal import arm
from workers.strikes.strike import Victim
from workers.tensor_parallel import TensorGroup

_COMPUTING = (RankPhase.DP_SYNC, RankPhase.LAYERNORM, RankPhase.TIE, RankPhase.NORMALIZE, RankPhase.OPTIMIZER)
"""Phases whose own work is what is left of them outside of collectives."""

MAX_ANSWER_ELEMENTS = 1 << 26
"""Elements times dp ranks up to which an owner computes everybody's integers to find whose sum it holds (seconds)."""


class RankTrial:
    """One rank, one trial. Building it and each `run_step` are collective over the mesh."""

    def __init__(
        self,
        spec: TrialSpec,
        trial_index: int,
        coordinates: Coordinates,
        groups: MeshGroups,
        device: torch.device,
        clock: PhaseClock,
        replay: ReplaySource,
        references: NormReferences,
        node: str,
    ) -> None:
        self._spec = spec
        self._trial_index = trial_index
        self._at = coordinates
        self._clock = clock
        self._replay = replay
        self._references = references
        self._ordering = ordering_of(spec)
        self._end = end_of(spec.mesh, coordinates.pp_rank)
        communicator = ProcessGroups(coordinates.world_rank, groups)
        # Collectives inside the model are no drill's: those strike at the gradients' sync.
        self._inside = inside = ProcessGroups(coordinates.world_rank, groups)
        clock.waited_s = lambda: communicator.waited_s + inside.waited_s
        self._communicator = communicator
        self._watch = GatherWatch(communicator)
        self._prescale = prescale_of(spec)
        clock.enter(RankPhase.BUILDING, trial_index)
        where = lambda: (clock.position.phase, clock.position.step)  # noqa: E731
        self._strike = arm(Victim(spec, coordinates, where, self._communicator), node)
        self._build(groups, device)
        expectation = expect(spec, self._ordering, coordinates.tp_rank)
        self._expectation = self._foreign.expect(expectation) if self._foreign else expectation
        self._layernorms = LayernormJudge(spec, coordinates, self._modules, self._communicator)

    def _build(self, groups: MeshGroups, device: torch.device) -> None:
        spec, at = self._spec, self._at
        self._stages = spec.mesh.stages(at.pp_rank)
        tensor_group = TensorGroup(tp_members(spec.mesh, at.dp_rank, at.pp_rank), self._inside)
        shard = UNCUT if spec.mesh.tp == 1 else Shard(tensor_group, at.tp_rank)
        self._modules = tuple(build_stage(spec, stage, device, shard=shard) for stage in self._stages)
        layouts = [stage_layout(spec, stage) for stage in self._stages]
        self._tied: nn.Parameter | None = None
        self._shards: list[Intervals] = []
        for stage, module, layout in zip(self._stages, self._modules, layouts, strict=True):
            if name := tied_parameter_name(spec.mesh.num_stages, stage):
                self._tied = module.get_parameter(name)
                self._shards = [layout.owned_intervals(name, shard) for shard in range(spec.mesh.dp)]
        self._named = name_parameters(self._modules)
        self._strike.modules_built(self._modules)
        self._signer = sign_gradients(spec, self._tied, self._end, at.dp_rank)
        # Before the stack's hooks, so that they see a gradient before the stack does.
        watched = spec.overlap or spec.stack != REFERENCE_STACK
        self._local = LocalGradients(tuple(self._parameters()), self._tied) if watched else None
        self._foreign: ForeignStack | None = None
        self._reference: ReferenceStack | None = None
        self._stack = self._build_stack(groups, layouts)
        self._handshake = self._shake_hands(layouts)
        self._judges = self._build_judges()
        pp_group = groups[pp_members(spec.mesh, at.dp_rank, at.tp_rank)]
        self._pipeline = Pipeline(self._modules, spec, at.pp_rank, pp_group, device, shard)
        self.norm = GradNorm(spec.mesh, at, self._stack, self._modules, self._ordering.distributed_optimizer)
        self._strike.step_built(self._pipeline, self.norm)
        self._device = device
        self._local_P: Tensor | None = None
        self._tied_digest: str | None = None
        self._initial_digest = self._digest_weights()

    def _build_stack(self, groups: MeshGroups, layouts: list[BufferLayout]) -> Stack:
        spec, at = self._spec, self._at
        self._tested = self._strike.around_communicator(self._watch)
        holds_an_end = self._tied is not None and spec.mesh.pp > 1
        context = StackContext(
            mesh=spec.mesh,
            at=at,
            modules=self._modules,
            tied=self._tied,
            dp_group=groups[dp_members(spec.mesh, at.pp_rank, at.tp_rank)],
            pp_group=groups[pp_members(spec.mesh, at.dp_rank, at.tp_rank)],
            tie_group=groups[tie_members(spec.mesh, at.dp_rank, at.tp_rank)] if holds_an_end else None,
            communicator=self._tested,
            divisor=self._prescale.divisor,
            num_microbatches=spec.batch.num_microbatches,
            make_optimizer=optimizer_for(spec.probe),
            probe=spec.probe,
            grad_reduce_dtype=spec.grad_reduce_dtype,
            num_tokens=self._count_tokens if spec.normalization is Normalization.NUM_TOKENS else None,
        )
        if spec.stack != REFERENCE_STACK and self._local is not None:
            self._foreign = ForeignStack(spec, context, self._local, self._communicator)
            self._shards = self._foreign.shards
            return self._foreign.stack
        self._reference = stack = ReferenceStack(context, self._ordering, layouts, self._prescale, spec.overlap)
        return self._strike.around_stack(stack, [each.parameter for each in self._named], self._tied)

    def _shake_hands(self, layouts: list[BufferLayout]) -> Handshake:
        """From now on the ranks agree on each collective; the judge's small ones are no exception."""
        spec, at = self._spec, self._at
        buckets = [
            (chunk, bucket.offset, bucket.numel) for chunk, each in enumerate(layouts) for bucket in each.buckets
        ]
        # A foreign stack has buckets of its own, and gradients that it need not show before a step.
        ours = self._reference
        plan = (None if spec.overlap else tuple(buckets)) if ours else ()
        handshake = Handshake(at.world_rank, dp_members(spec.mesh, at.pp_rank, at.tp_rank), plan)
        if ours is not None:
            handshake.know(map(ours.grad, self._parameters()))
            ours.announce = handshake.announce
        handshake.know(self._parameters())
        self._communicator.handshake = handshake
        return handshake

    def _build_judges(self) -> ParameterJudges | None:
        """None for a foreign stack, which has an audit of its own."""
        spec, at = self._spec, self._at
        if self._foreign is not None:
            return None
        scene = Scene(spec, at, self._stack, self._local_grad, self._communicator)
        return ParameterJudges(scene, self._named, self._tied)

    def run(self) -> Iterator[StepReport]:
        """Every step of the trial, in order."""
        for step in range(self._spec.steps):
            yield self.run_step(step)

    def run_step(self, step: int) -> StepReport:
        """One measured step. Collective over the mesh."""
        self._clock.restart()
        loss = self._compute_gradients(step)
        self._enter(RankPhase.STATISTICS, step)
        local_P, trace = self._observe_local()
        self._layernorms.remember(self._local_grad)
        late_P = None if self._local is None else self._local.last_P
        if self._judges is not None:
            self._judges.remember(local_P, late_P)
        broken = self._synchronise(step, trace)
        if self._foreign is not None:
            self._enter(RankPhase.STATISTICS, step)
            self._foreign.remember()
        self._enter(RankPhase.OPTIMIZER, step)
        # A foreign stack is judged element by element; its ownership need not be one that our norm can add up.
        norm = None if self._foreign else self.norm.measure(self._tested)
        self._stack.step()
        settings = read_settings()
        self._strike.after_step()
        self._enter(RankPhase.JUDGEMENT, step)
        divergence, tied = self._judge(step, local_P)
        parameters = self._judge_parameters(step)
        norm_row = None if norm is None else self._judge_norm(step, norm)
        stack = self._foreign.conclude() if self._foreign else None
        self._enter(RankPhase.STATISTICS, step)
        broken += find_nonfinite_weights(self._named, self._stack.owned)
        replica = self._watch.conclude(self._initial_digest, self._digest_weights(), self._tied_digest)
        replica = replace(replica, copies_digest=self._digest_copies())
        self._enter(RankPhase.IDLE, step)
        return self._report(
            step, divergence, tuple(trace), tied, parameters, replica, loss, broken, norm_row, settings, stack
        )

    def run_bare_step(self, step: int) -> None:
        """The same step with nothing measured: what the statistics' cost is compared with."""
        self._compute_gradients(step)
        self._stack.finalize(lambda _: None)
        self.norm.measure(self._tested)
        self._stack.step()

    def _compute_gradients(self, step: int) -> float | None:
        self._enter(RankPhase.FORWARD_BACKWARD, step)
        if self._spec.probe is ProbeName.EXACT and step > 0:
            # What an update left could outgrow the exact range.
            for stage, module in zip(self._stages, self._modules, strict=True):
                seed_weights(module, self._spec, stage, step)
            self._stack.weights_changed()
        if self._foreign is not None:
            self._foreign.begin_step()
        self._stack.zero_grad()
        # On a GPU the host would wait for queued work: there one step must do.
        self._handshake.begin_step(is_due=step == 0 or self._device.type != "cuda")
        if self._local is not None:
            self._local.zero()
        self._signer.begin_step()
        self._strike.before_forward()
        tokens, targets = microbatches(self._spec, step, self._at.dp_rank, self._device)
        self._targets = targets
        loss = self._pipeline.run_step(tokens, targets)
        self._strike.after_backward()
        return loss

    def _count_tokens(self) -> Tensor:
        """Valid tokens of this step, int64 [1]; only the last stage looks at targets."""
        is_last = self._at.pp_rank == self._spec.mesh.pp - 1
        return count_valid(self._targets) if is_last else self._targets.new_zeros(1)

    def _observe_local(self) -> tuple[Tensor | None, list[TraceRow]]:
        if self._tied is None:
            return None, []
        grad_P = self._local_grad(self._tied)
        if self._local_P is None:
            self._local_P = torch.empty_like(grad_P)
        self._local_P.copy_(grad_P)
        return self._local_P, self._trace(Phase.LOCAL, grad_P)

    def _local_grad(self, parameter: nn.Parameter) -> Tensor:
        """The sum over this rank's microbatches; with overlap the stack's own is being synchronised already."""
        return self._stack.grad(parameter) if self._local is None else self._local.grad(parameter)

    def _synchronise(self, step: int, trace: list[TraceRow]) -> list[NonfiniteRow]:
        """Run the sync, observed phase by phase; what was not finite when a phase began."""
        upcoming = [RANK_PHASES[phase] for phase in self._ordering.phases]
        broken = find_nonfinite(upcoming[0], self._passing_through(upcoming[0]), self._local_grad)

        def observe(phase: Phase) -> None:
            # Booked as statistics, though it happens in the midst of the sync.
            self._enter(RankPhase.STATISTICS, step)
            if self._tied is not None and phase is not Phase.LAYERNORM:
                trace.extend(self._trace(phase, self._stack.grad(self._tied)))
            if self._judges is not None:
                self._judges.observe(phase)
            if phase is Phase.TIED and self._tied is not None and not self._ordering.ties_after_sync:
                self._tied_digest = digest([self._stack.grad(self._tied)])
            del upcoming[:1]  # a foreign stack may show any number of phases
            if upcoming:
                broken.extend(find_nonfinite(upcoming[0], self._passing_through(upcoming[0]), self._stack.grad))
                self._enter(upcoming[0], step)

        self._enter(upcoming[0], step)
        self._stack.finalize(observe)
        if trace and trace[-1].phase is Phase.LOCAL and self._tied is not None:
            # A foreign stack need not show its phases.
            trace.extend(self._trace(Phase.FINAL, self._stack.grad(self._tied)))
            return broken
        last = trace[-self._spec.mesh.dp :]
        trace.extend(_relabel(row, Phase.FINAL) for row in last)
        return broken

    def _passing_through(self, phase: RankPhase) -> list[Named]:
        """Only the tied weight goes through a tie."""
        return [each for each in self._named if phase is not RankPhase.TIE or each.parameter is self._tied]

    def _trace(self, phase: Phase, grad_P: Tensor) -> list[TraceRow]:
        if self._end is None:
            return []
        rows = []
        for shard, owned in enumerate(self._shards):
            part_n = select(grad_P, owned)
            total, l2 = moments(part_n)
            rows.append(TraceRow(phase, self._end, shard, part_n.numel(), total, l2, digest([part_n])))
        return rows

    def _judge(self, step: int, local_P: Tensor | None) -> tuple[tuple[DivergenceRow, ...], TiedRow | None]:
        inner = self._layernorms.judge(step, self._stack, self._replay)
        if local_P is None or self._tied is None or self._end is None:
            return inner, None
        neighbour = (self._at.dp_rank + 1) % self._spec.mesh.dp
        holding = Holding(
            local_P=local_P,
            replay=self._replay(self._spec, step, neighbour, self._end, self._at.tp_rank),
            synced_P=self._foreign.synced(self._tied) if self._foreign else self._stack.grad(self._tied),
            weight_P=self._tied.detach().flatten(),
            late_P=None if self._local is None else self._local.last_P,
            answer=self._answer(step),
        )
        judgement = judge_end(self._expectation, holding, self._at.world_rank, self._communicator)
        return (judgement.divergence, *inner), judgement.tied

    def _judge_parameters(self, step: int) -> tuple[ParametersRow, ...]:
        if self._judges is None:
            return ()
        neighbour = (self._at.dp_rank + 1) % self._spec.mesh.dp
        return self._judges.judge(self._replay.inner(self._spec, step, neighbour, self._stages, self._at.tp_rank))

    def _judge_norm(self, step: int, value: float) -> NormRow:
        reference = self._references(self._spec, step, self._at, self._communicator)
        if reference is None:
            return NormRow(value, None, None)
        return reference.row(value, self._spec.mesh, scale_of(self._spec))

    def _compute_seconds(self) -> dict[str, float]:
        """Own work before and between this step's collectives; on a GPU, whose queue hides it, up to the first."""
        computing, booked = RankPhase.FORWARD_BACKWARD.value, self._clock.compute_seconds
        seconds = {computing: self._pipeline.take_compute_seconds()}
        # How long a foreign stack waits in collectives of its own is not known.
        if self._device.type != "cuda" and self._foreign is None:
            # A sync that starts during backward may also wait there, inside of what the pipeline measured.
            seconds[computing] -= self._clock.seconds[computing] - booked[computing]
            seconds |= {phase.value: booked[phase.value] for phase in _COMPUTING if phase.value in booked}
        return seconds

    def _answer(self, step: int) -> Answer | None:
        """The integer answer of every element, where there is one and one rank may take the time to compute it."""
        spec, tp_rank = self._spec, self._at.tp_rank
        work = spec.mesh.dp * spec.mesh.tp * tied_elements(spec.model, spec.mesh.tp)
        if spec.probe is ProbeName.GPT or work > MAX_ANSWER_ELEMENTS:
            return None
        return lambda: signed_tied_sum(spec, step, tp_rank)

    def _digest_copies(self) -> str | None:
        """Of the weights that every tensor-parallel rank holds whole."""
        if self._spec.mesh.tp == 1:
            return None
        named = (pair for module in self._modules for pair in module.named_parameters())
        return digest([weight.detach().flatten() for name, weight in named if cut_of(name) is Cut.REPLICATED])

    def _digest_weights(self) -> str:
        return digest([torch.cat([parameter.detach().flatten() for parameter in self._parameters()])])

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Of all chunks of this rank."""
        return (parameter for module in self._modules for parameter in module.parameters())

    def _enter(self, phase: RankPhase, step: int) -> None:
        self._clock.enter(phase, self._trial_index, step)

    def _report(
        self,
        step: int,
        divergence: tuple[DivergenceRow, ...],
        trace: tuple[TraceRow, ...],
        tied: TiedRow | None,
        parameters: tuple[ParametersRow, ...],
        replica: ReplicaRow,
        loss: float | None,
        broken: list[NonfiniteRow],
        grad_norm: NormRow | None,
        settings: ComputeSettings,
        stack: StackRow | None,
    ) -> StepReport:
        spec, at = self._spec, self._at
        return StepReport(
            trial_index=self._trial_index,
            probe=spec.probe,
            ordering=spec.ordering,
            repeat=spec.repeat,
            step=step,
            world_rank=at.world_rank,
            dp_rank=at.dp_rank,
            pp_rank=at.pp_rank,
            tp_rank=at.tp_rank,
            divergence=divergence,
            trace=trace,
            tied=tied,
            replica=replica,
            loss=loss,
            seconds=dict(self._clock.seconds),
            nonfinite_elements=sum(row.num_elements for row in broken),
            grad_norm=grad_norm,
            compute_seconds=self._compute_seconds(),
            parameters=parameters,
            nonfinite=tuple(broken),
            settings=settings,
            drill_struck=self._strike.has_struck,
            stack=stack,
        )


def expect(spec: TrialSpec, ordering: Ordering, tp_rank: int = 0) -> Expectation:
    """What the ordering does to one tp rank's part of the tied weight: pure, the same on every rank that holds it."""
    mesh = spec.mesh
    owned = []
    everything = (Interval(0, tied_elements(spec.model, mesh.tp)),)
    members = ends_members(mesh, tp_rank)
    for world_rank in members:
        at = mesh.coordinates(world_rank)
        stage = 0 if at.pp_rank == 0 else mesh.num_stages - 1
        name = tied_parameter_name(mesh.num_stages, stage) or ""
        owned_here = stage_layout(spec, stage).owned_intervals(name, at.dp_rank)
        owned.append(owned_here if ordering.distributed_optimizer else everything)
    return Expectation(
        probe=spec.probe,
        mesh=mesh,
        members=members,
        prescale=scale_of(spec),
        sharded=ordering.distributed_optimizer,
        bit_tied=ordering.bit_tied,
        tied_sync=_tied_sync(spec),
        owned=tuple(owned),
        code=rank_code(spec),
    )


def _tied_sync(spec: TrialSpec) -> TiedSync | MeanOfMeans | None:
    exposed, prescale = trial_exposed(spec), prescale_of(spec)
    if not exposed:
        return None
    if ordering_of(spec).averages_means:
        return MeanOfMeans(exposed, mean_factors(spec), num_ends=2 if spec.mesh.pp > 1 else 1)
    if spec.normalization is Normalization.NUM_TOKENS:
        factor = scale_of(spec).factor
        return TiedSync(spec.mesh.dp, factor, factor, trial_misowned(spec), trial_early(spec), afterwards=factor)
    return TiedSync(spec.mesh.dp, prescale.factor, prescale.local_factor, trial_misowned(spec), trial_early(spec))


def moments(values_n: Tensor) -> tuple[float, float]:
    """Sum and L2 norm of a flat tensor, added in float64."""
    total = torch.zeros((), dtype=torch.float64, device=values_n.device)
    squared = torch.zeros_like(total)
    for block in values_n.split(BLOCK_ELEMENTS):
        doubled = block.double()
        total += doubled.sum()
        squared += doubled.dot(doubled)
    return float(total), float(squared.sqrt())


def _relabel(row: TraceRow, phase: Phase) -> TraceRow:
    return TraceRow(phase, row.end, row.shard, row.num_elements, row.sum, row.l2, row.digest)
