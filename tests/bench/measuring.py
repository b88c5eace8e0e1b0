"""What measuring costs: a step with all statistics against the bare step, on real gloo ranks in one run.

    python tests/bench/measuring.py [tiny] [gpt2]

Prints ratios of medians; nothing is asserted. The bare step is forward, backward, sync and optimizer.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from gloo_world import run_world
from rich.console import Console
from rich.table import Table

from workers.contract import BatchSpec, Mesh, ModelSpec, OrderingName, ProbeName, RankPhase, TrialSpec

SIZES = {
    "tiny": (ModelSpec(64, 32, 4, 4, 16), BatchSpec(1, 2), 20),
    "gpt2": (ModelSpec(50257, 768, 1, 12, 128), BatchSpec(1, 2), 3),
}
"""Model, batch and steps. gpt2 is GPT-2's embedding (50257 x 768) with one layer."""


def main() -> None:
    table = Table(title="cost of measuring, dp=2 pp=2, gloo on CPU, gpt probe, ordering own_bucket")
    for heading in ("model", "bare step", "with statistics", "ratio", "sync judge", "judge / bare"):
        table.add_column(heading, justify="right")
    for name in sys.argv[1:] or list(SIZES):
        model, batch, steps = SIZES[name]
        spec = TrialSpec(ProbeName.GPT, OrderingName.OWN_BUCKET, Mesh(2, 2), model, batch, steps=steps)
        bare_s, measured_s, judge_s = measure(spec)
        table.add_row(
            f"{name} {model.vocab_size}x{model.hidden_size}",
            f"{bare_s * 1e3:.1f} ms",
            f"{measured_s * 1e3:.1f} ms",
            f"{measured_s / bare_s:.2f}",
            f"{judge_s * 1e3:.1f} ms",
            f"{judge_s / bare_s:.2f}",
        )
    Console(width=120).print(table)


def measure(spec: TrialSpec) -> tuple[float, float, float]:
    """Median seconds of the bare step, of the step with statistics but no judge, and of the judge; slowest rank."""
    by_rank = run_world(spec.mesh.world_size, time_rank, spec, timeout_s=900)
    return tuple(max(values) for values in zip(*by_rank, strict=True))  # type: ignore[return-value]


def time_rank(session: Any, spec: TrialSpec) -> tuple[float, float, float]:
    """On one rank: bare and measured steps in turn, so that both see the same machine."""
    import torch.distributed as dist

    trial = session.trial(spec)
    bare, measured, judged = [], [], []
    for step in range(1, spec.steps + 1):
        dist.barrier()
        started = time.perf_counter()
        trial.run_bare_step(step)
        dist.barrier()
        bare.append(time.perf_counter() - started)
        started = time.perf_counter()
        report = trial.run_step(step)
        dist.barrier()
        judge_s = report.seconds.get(RankPhase.JUDGEMENT, 0.0)
        measured.append(time.perf_counter() - started - judge_s)
        judged.append(judge_s)
        if session.world_rank == 0 and "-v" in sys.argv:
            print(report.seconds)
    return statistics.median(bare), statistics.median(measured), statistics.median(judged)


if __name__ == "__main__":
    main()
