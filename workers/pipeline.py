"""Runs one rank's stages of the pipeline: microbatches through torch.distributed.pipelining.

Gradients leave through hooks that the gradient buffer installs on the parameters; this file must not read, scale or
clear a `.grad`, and must not know about data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from workers.contract import Schedule, TrialSpec
from workers.models import LossFunction, mean_loss, microbatch_loss, stage_example
from workers.stopwatch import Stopwatch


class Pipeline:
    """A rank's chunks (by chunk, each one stage) and their schedule; serves any number of steps of one trial."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        spec: TrialSpec,
        pp_rank: int,
        pp_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._is_first = pp_rank == 0
        self._is_last = pp_rank == spec.mesh.pp - 1
        self._stopwatch = Stopwatch(device)
        self._timed_stages = [
            _pipeline_stage(module, spec, stage, pp_group, device, self._stopwatch)
            for module, stage in zip(modules, spec.mesh.stages(pp_rank), strict=True)
        ]
        self._schedule = _schedule(spec, self._timed_stages, self._timed(microbatch_loss(spec)))

    def run_step(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> float | None:
        """Forward and backward of all microbatches: the mean loss on the last stage, None elsewhere.

        tokens_BS, targets_BS: int64 [num_microbatches * micro_batch_size, S], the same on every stage of one dp rank
        (only the first reads the tokens and only the last the targets). Every rank of `pp_group` must call it.
        """
        losses: list[torch.Tensor] = []
        arguments = (tokens_BS,) if self._is_first else ()
        target = targets_BS if self._is_last else None
        self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        return mean_loss(self._spec, losses, targets_BS) if self._is_last else None

    def take_compute_seconds(self) -> float:
        """Time spent in forward, loss and backward since it was last asked, without any wait for another stage."""
        return self._stopwatch.take()

    def before_backward(self, act: Callable[[], None] | None) -> None:
        """Have `act` called, as part of this rank's own work, before each microbatch's backward. For drills."""
        for stage in self._timed_stages:
            stage.before_backward = act

    def _timed(self, loss_function: LossFunction) -> LossFunction:
        def timed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with self._stopwatch.running():
                return loss_function(output, target)

        return timed


class TimedStage(PipelineStage):
    """A stage that measures its own forwards and backwards; the schedule sends and receives outside of them."""

    stopwatch: Stopwatch
    before_backward: Callable[[], None] | None = None

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        """See `PipelineStage`."""
        with self.stopwatch.running():
            return super().forward_one_chunk(*arguments, **keywords)

    def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        """See `PipelineStage`."""
        with self.stopwatch.running():
            if self.before_backward is not None:
                self.before_backward()
            return super().backward_one_chunk(*arguments, **keywords)


def _pipeline_stage(
    module: nn.Module,
    spec: TrialSpec,
    stage: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
    stopwatch: Stopwatch,
) -> TimedStage:
    input_example, output_example = stage_example(spec, stage)
    through_host = device.type != "cpu" and dist.get_backend(pp_group) == dist.Backend.GLOO
    is_last = stage == spec.mesh.num_stages - 1
    timed = TimedStage(
        _ThroughHost(module, device, is_last) if through_host else module,
        stage_index=stage,
        num_stages=spec.mesh.num_stages,
        device=torch.device("cpu") if through_host else device,
        input_args=input_example,
        output_args=output_example,
        group=pp_group,
    )
    timed.stopwatch = stopwatch
    return timed


def _schedule(
    spec: TrialSpec, stages: list[TimedStage], loss_function: LossFunction
) -> Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B:
    """The loss is already divided by the number of microbatches where it has to be."""
    num_microbatches = spec.batch.num_microbatches
    if len(stages) > 1:
        return ScheduleInterleaved1F1B([*stages], num_microbatches, loss_fn=loss_function, scale_grads=False)
    schedule = ScheduleGPipe if spec.schedule is Schedule.GPIPE else Schedule1F1B
    return schedule(stages[0], num_microbatches, loss_fn=loss_function, scale_grads=False)


class _ThroughHost(nn.Module):
    """A stage whose hidden states enter and leave in host memory, since gloo sends nothing else from rank to rank.

    Copies are differentiable, so gradients take the same way back; they change no bit.
    """

    def __init__(self, stage: nn.Module, device: torch.device, is_last: bool) -> None:
        super().__init__()
        self._stage, self._device, self._is_last = stage, device, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the stage computes; logits stay on the device, where the loss is computed."""
        output: torch.Tensor = self._stage(x.to(self._device))
        return output if self._is_last else output.cpu()
