"""What one rank holds of the model: its chunks, each a pipeline stage with its weights and gradients in buffers.

Built for one trial; must not communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workers.contract import TrialSpec
from workers.grad_buffer import GradBuffer, ParameterBuffer, accumulate_into
from workers.models import build_stage, seed_weights
from workers.parameters import tied_parameter_name
from workers.prediction import stage_layout


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stage; its parameters are views into `weights`, and every backward adds to `grads`, laid out alike."""

    stage: int
    module: nn.Module
    weights: ParameterBuffer
    grads: GradBuffer


def build_chunks(spec: TrialSpec, pp_rank: int, device: torch.device) -> tuple[Chunk, ...]:
    """A pipeline rank's chunks with their initial weights, in the order of its stages."""
    return tuple(_build_chunk(spec, stage, device) for stage in spec.mesh.stages(pp_rank))


def reseed(chunks: Sequence[Chunk], spec: TrialSpec, step: int) -> None:
    """Write the weights of `step` in place; see `workers.models.seed_weights`."""
    for chunk in chunks:
        seed_weights(chunk.module, spec, chunk.stage, step)


def _build_chunk(spec: TrialSpec, stage: int, device: torch.device) -> Chunk:
    module = build_stage(spec, stage, device)
    layout = stage_layout(spec, stage)
    grads = GradBuffer(layout, device, tied_parameter_name(spec.mesh.num_stages, stage))
    chunk = Chunk(stage, module, ParameterBuffer(module, layout), grads)
    accumulate_into(module, grads)
    return chunk
