"""The least a person would write by hand: one pipeline step of a small model on gloo ranks, started by torchrun.

    torchrun --nproc_per_node 4 tests/bench/minimal_step.py

dp=2 x pp=2, hidden 32, vocabulary 64. What a validation's time is compared with; it checks nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

VOCAB, HIDDEN, SEQ, MICROBATCHES = 64, 32, 16, 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pp_rank, dp_rank = divmod(dist.get_rank(), 2)
    pipelines = [dist.new_group([dp, dp + 2]) for dp in range(2)]
    replicas = [dist.new_group([2 * pp, 2 * pp + 1]) for pp in range(2)]
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    stage = (
        nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *layers)
        if pp_rank == 0
        else nn.Sequential(*layers, nn.Linear(HIDDEN, VOCAB))
    )
    schedule = Schedule1F1B(
        PipelineStage(stage, pp_rank, 2, torch.device("cpu"), group=pipelines[dp_rank]),
        MICROBATCHES,
        loss_fn=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    )
    tokens = torch.randint(VOCAB, (MICROBATCHES, SEQ))
    schedule.step(tokens) if pp_rank == 0 else schedule.step(target=tokens)
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=replicas[pp_rank])
    torch.optim.Adam(stage.parameters()).step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
