"""Runs one stage of the pipeline for one rank: microbatches through torch.distributed.pipelining.

Gradients leave through hooks that the gradient buffer installs on the parameters; this file must not read, scale or
clear a `.grad`, and must not know about data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workers.contract import TrialSpec
from workers.models import LossFunction, mean_loss, microbatch_loss, stage_example
from workers.stopwatch import Stopwatch


class Pipeline:
    """One stage and its 1F1B schedule; serves any number of steps of one trial."""

    def __init__(
        self, stage: nn.Module, spec: TrialSpec, pp_rank: int, pp_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._spec = spec
        self._is_first = pp_rank == 0
        self._is_last = pp_rank == spec.mesh.pp - 1
        input_example, output_example = stage_example(spec, pp_rank)
        through_host = device.type != "cpu" and dist.get_backend(pp_group) == dist.Backend.GLOO
        self._stopwatch = Stopwatch(device)
        pipeline_stage = TimedStage(
            _ThroughHost(stage, device, self._is_last) if through_host else stage,
            stage_index=pp_rank,
            num_stages=spec.mesh.pp,
            device=torch.device("cpu") if through_host else device,
            input_args=input_example,
            output_args=output_example,
            group=pp_group,
        )
        pipeline_stage.stopwatch = self._stopwatch
        self._stage = pipeline_stage
        # The loss is already divided by the number of microbatches where it has to be.
        self._schedule = Schedule1F1B(
            pipeline_stage, spec.batch.num_microbatches, loss_fn=self._timed(microbatch_loss(spec)), scale_grads=False
        )

    def run_step(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> float | None:
        """Forward and backward of all microbatches: the mean loss on the last stage, None elsewhere.

        tokens_BS, targets_BS: int64 [num_microbatches * micro_batch_size, S], the same on every stage of one dp rank
        (only the first reads the tokens and only the last the targets). Every rank of `pp_group` must call it.
        """
        losses: list[torch.Tensor] = []
        arguments = (tokens_BS,) if self._is_first else ()
        target = targets_BS if self._is_last else None
        self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        return mean_loss(self._spec, losses) if self._is_last else None

    def take_compute_seconds(self) -> float:
        """Time spent in forward, loss and backward since it was last asked, without any wait for another stage."""
        return self._stopwatch.take()

    def before_backward(self, act: Callable[[], None] | None) -> None:
        """Have `act` called, as part of this rank's own work, before each microbatch's backward. For drills."""
        self._stage.before_backward = act

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
