"""How long `POST /validate` takes, against what people would do instead, all in one run.

    python tests/bench/validate.py

Starts a stack of its own in a fresh folder, measures the first and then warm default requests with `Prefer: wait`,
and compares them with (a) torchrun of a hand-written pipeline step and (b) an empty Ray Train job. Prints tables;
nothing is asserted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1])]

from rich.console import Console
from rich.table import Table

from service.client import GradgateClient
from service.settings import Settings
from service.stack import run_stack

NUM_WARM = 20
NUM_RIVAL = 5


def main() -> None:
    console = Console(width=120)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", str(HERE / "minimal_step.py")]
    torchrun_s = median_seconds(lambda: run(torchrun), NUM_RIVAL)
    train_s = median_seconds(lambda: run([sys.executable, str(HERE / "train_noop.py")]), 3)
    with tempfile.TemporaryDirectory(prefix="gradgate-bench-", dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        settings = Settings(home=Path(home), port=0)
        with run_stack(settings, lambda text: None) as (_, addresses), GradgateClient(addresses.api_url) as client:
            cold_s, _ = post(client)
            warm = [post(client) for _ in range(NUM_WARM)]
            one_by_one = [trials_only(client, probes) for probes in (["exact"], ["gpt"])]
    warm_s = statistics.median(seconds for seconds, _ in warm)
    console.print(ratios(cold_s, warm_s, torchrun_s, train_s))
    console.print(whereabouts([validation for _, validation in warm], warm_s))
    console.print(f"warm, exact alone {one_by_one[0] * 1e3:.0f} ms; gpt alone {one_by_one[1] * 1e3:.0f} ms")


def post(client: GradgateClient, request: dict[str, Any] | None = None) -> tuple[float, dict[str, Any]]:
    """Seconds of one POST that waits for the verdict."""
    started = time.perf_counter()
    validation = client.validate(request or {}, wait_s=60)
    seconds = time.perf_counter() - started
    if validation["verdict"] != "pass":
        raise SystemExit(f"{validation['id']} ended {validation['state']}, verdict {validation['verdict']}")
    return seconds, validation


def trials_only(client: GradgateClient, probes: list[str]) -> float:
    return statistics.median(post(client, {"probes": probes})[0] for _ in range(5))


def run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRADGATE_", "RAY_"))}
    subprocess.run(command, check=True, capture_output=True, env=environment | {"OMP_NUM_THREADS": "1"})


def median_seconds(action: Callable[[], None], num_runs: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return statistics.median(once() for _ in range(num_runs))


def ratios(cold_s: float, warm_s: float, torchrun_s: float, train_s: float) -> Table:
    table = Table(title="POST /validate, default request (12 steps: 2 probes x 3 orderings x 2), dp=2 pp=2")
    for heading in ("", "seconds", "against (a)", "against (b)"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, seconds in (
        ("warm", warm_s),
        ("first after start (cold gang)", cold_s),
        ("(a) torchrun, one hand-written step", torchrun_s),
        ("(b) Ray Train job that does nothing", train_s),
    ):
        table.add_row(name, f"{seconds:.3f}", fraction(seconds, torchrun_s), fraction(seconds, train_s))
    return table


def fraction(seconds: float, rival_s: float) -> str:
    return f"1/{rival_s / seconds:.1f}" if seconds < rival_s else f"{seconds / rival_s:.2f}x"


def whereabouts(validations: list[dict[str, Any]], warm_s: float) -> Table:
    """Where a warm request's time goes, by the service's own timings."""
    table = Table(title="where a warm request's time goes (median)")
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name in validations[0]["timings"]:
        values = [validation["timings"][name] for validation in validations]
        if all(isinstance(value, float) for value in values):
            seconds = statistics.median(values)
            table.add_row(name.removesuffix("_s"), f"{seconds * 1e3:.1f}", f"{seconds / warm_s:.0%}")
    table.add_row("whole request, as the client sees it", f"{warm_s * 1e3:.1f}", "100%")
    return table


if __name__ == "__main__":
    main()
