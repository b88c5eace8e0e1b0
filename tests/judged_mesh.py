"""A mesh in one process, up to the judgement: local gradients, the real sync, then every rank's real judge.

Tests tamper with what the sync reads (`held`), with what it leaves (`synced`) or with what ranks remember (`local`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lockstep import Lockstep
from torch import Tensor

from workers.communicator import ProcessGroups, VirtualRanks
from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, TrialSpec
from workers.divergence import EndJudgement, judge_end
from workers.exchange import Holding, Replay
from workers.grad_buffer import GradBuffer, tied_buffer
from workers.grad_sync import counted_tokens, prescale_of, sync_gradients
from workers.mesh import dp_members, ends_members
from workers.orderings import ordering_of
from workers.parameters import tied_parameter_name
from workers.prediction import stage_layout, trial_misowned
from workers.step import expect

MODEL = ModelSpec(vocab_size=401, hidden_size=12, num_layers=4, num_heads=3, seq_len=5)


class JudgedMesh:
    def __init__(
        self,
        ordering: OrderingName,
        mesh: Mesh,
        probe: ProbeName = ProbeName.GPT,
        model: ModelSpec = MODEL,
        floor: float = 0.0,
        **changes: Any,
    ) -> None:
        self.spec = replace(TrialSpec(probe, ordering, mesh, model, BatchSpec(1, max(2, mesh.pp))), **changes)
        self.ordering = ordering_of(self.spec)
        self.expectation = expect(self.spec, self.ordering)
        self.holders = ends_members(mesh)
        self.floor = floor
        self.buffers = {rank: self._buffers(rank) for rank in range(mesh.world_size)}
        self.local = {rank: self.held(rank).clone() for rank in self.holders}
        self.replayed = {rank: grad.clone() for rank, grad in self.local.items()}
        self.synced: dict[int, Tensor] = {}

    @property
    def mesh(self) -> Mesh:
        return self.spec.mesh

    def held(self, rank: int) -> Tensor:
        """What the sync will read of a rank's tied gradient, as a view."""
        return tied_buffer(self.buffers[rank]).tied_grad()

    def synchronise(self) -> None:
        prescale = prescale_of(self.spec)
        virtual = VirtualRanks(self.mesh.world_size)
        tokens = counted_tokens(self.spec)
        sync_gradients(self.ordering, self.mesh, self.buffers, virtual, prescale, lambda _: None, tokens=tokens)
        self.synced = {rank: self.held(rank) for rank in self.holders}

    def judge(self) -> dict[int, EndJudgement]:
        if not self.synced:
            self.synchronise()

        def rank_main(rank: int, communicator: ProcessGroups) -> EndJudgement | None:
            if rank not in self.holders:
                return None
            return judge_end(self.expectation, self.holding(rank), rank, communicator)

        judged = Lockstep(self.mesh.world_size).run(rank_main)
        return {rank: judgement for rank, judgement in enumerate(judged) if judgement is not None}

    def holding(self, rank: int) -> Holding:
        at = self.mesh.coordinates(rank)
        neighbour = dp_members(self.mesh, at.pp_rank)[(at.dp_rank + 1) % self.mesh.dp]
        return Holding(
            self.local[rank],
            Replay(self.replayed[neighbour], self.floor),
            self.synced[rank],
            torch.zeros_like(self.local[rank]),
            self.answer if self.spec.probe is ProbeName.EXACT else None,
        )

    def answer(self) -> Tensor:
        """The true sum of all of the tied weight."""
        return torch.stack(list(self.replayed.values())).double().sum(dim=0)

    def owned(self, rank: int) -> list[int]:
        intervals = self.expectation.owned[self.holders.index(rank)]
        return [element for interval in intervals for element in range(interval.start, interval.stop)]

    def misowned(self) -> set[int]:
        return {e for interval in trial_misowned(self.spec) for e in range(interval.start, interval.stop)}

    def owners(self, element: int) -> list[int]:
        return [rank for rank in self.holders if element in self.owned(rank)]

    def _buffers(self, rank: int) -> list[GradBuffer]:
        """One a chunk."""
        generator = torch.Generator().manual_seed(rank)
        stages = self.mesh.stages(self.mesh.coordinates(rank).pp_rank)
        buffers = [self._buffer(stage, generator) for stage in stages]
        code = self.expectation.code
        for buffer in buffers:
            if code is not None and buffer.tied_name is not None:
                tied_P = buffer.tied_grad()
                tied_P.copy_(code.sign(tied_P.long(), self.holders.index(rank)))
        return buffers

    def _buffer(self, stage: int, generator: torch.Generator) -> GradBuffer:
        layout = stage_layout(self.spec, stage)
        buffer = GradBuffer(layout, torch.device("cpu"), tied_parameter_name(self.mesh.num_stages, stage))
        for placed in layout.params:
            buffer.grad(placed.name).copy_(self._values(placed.stop - placed.start, generator))
        return buffer

    def _values(self, size: int, generator: torch.Generator) -> Tensor:
        if self.spec.probe is ProbeName.EXACT:
            return torch.randint(1, 9, (size,), generator=generator).float()
        return torch.randn(size, generator=generator)


def each(judged: dict[int, EndJudgement], count: Callable[[EndJudgement], int]) -> dict[int, int]:
    """A count by world rank, zeros left out."""
    return {rank: count(judgement) for rank, judgement in judged.items() if count(judgement)}
