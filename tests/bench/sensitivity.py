"""How small a fault each judge still sees, by width and dtype, on virtual ranks under own_bucket.

    python tests/bench/sensitivity.py [dp ...]

Two faults, each made smaller until nobody notices: an error in one element of the synchronised gradient (the largest
one, relative to its value), and a share of one rank's contribution that does not arrive. Beside them the floor: how
much of what the judge allows rounding really used in the clean run. Prints a table; nothing is asserted. `ends` sees
only what differs between the two ends; replicas are compared by hash, where one bit is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch
from rich.console import Console
from rich.table import Table

from workers.contract import TINY, BatchSpec, Dtype, Mesh, OrderingName, ProbeName, TrialSpec
from workers.divergence import EndJudgement
from workers.virtual import LocalStep, VirtualMesh, compute_local_step

WIDTHS = (2, 3, 8, 32, 128)
SMALLEST_TRIED = 2.0**-50
EPSILON = 2.0**-23
GUILTY_END = 1
"""The contributor that is struck is dp_rank 0 of lm_head."""


@dataclass(frozen=True)
class Judge:
    """One of the judges, and whether it said something."""

    name: str
    probe: ProbeName
    sees: Callable[[EndJudgement], bool]
    agreed: bool = False
    """The fault is one on which all ranks agree: what the rank remembers of its own gradient is wrong as well."""


JUDGES = (
    Judge("exact", ProbeName.EXACT, lambda judged: judged.divergence.diverged_elements > 0),
    Judge("sync", ProbeName.GPT, lambda judged: judged.divergence.diverged_elements > 0),
    Judge("reference", ProbeName.GPT, lambda judged: judged.divergence.reference_exceeded_elements > 0, agreed=True),
    Judge("ends", ProbeName.GPT, lambda judged: judged.tied is not None and judged.tied.exceeded_elements > 0),
)


class Bench:
    """One trial's local gradients, and faults put into copies of it."""

    def __init__(self, dp: int, dtype: Dtype, judge: Judge) -> None:
        batch = BatchSpec(1, 4 if judge.probe is ProbeName.EXACT else 2)
        mesh = Mesh(dp, 2)
        self.spec = TrialSpec(judge.probe, OrderingName.OWN_BUCKET, mesh, TINY, batch, dtype=dtype, steps=1)
        self.judge = judge
        self.local: LocalStep = compute_local_step(self.spec, 0)

    def run(
        self,
        before: Callable[[VirtualMesh], None] = lambda mesh: None,
        after: Callable[[VirtualMesh], None] = lambda mesh: None,
    ) -> list[EndJudgement]:
        mesh = VirtualMesh(self.spec, 0, self.local.stages)
        before(mesh)
        mesh.synchronise()
        after(mesh)
        return list(mesh.judge(self.local.replay_CP, self.local.floor_C).values())

    def sees_share(self, share: float) -> bool:
        """A share of one rank's whole contribution is lost."""

        def lose(mesh: VirtualMesh) -> None:
            contributor = GUILTY_END * self.spec.mesh.dp
            mesh.tied(mesh.members[contributor]).mul_(1 - share)
            if self.judge.agreed:
                mesh.local_CP[contributor].mul_(1 - share)

        return any(map(self.judge.sees, self.run(before=lose)))

    def sees_error(self, relative: float) -> bool:
        """One element is wrong: after the sync, or where all ranks are to agree in one rank's contribution."""

        def spoil(mesh: VirtualMesh) -> None:
            index = next(i for i in range(self.spec.mesh.dp, len(mesh.members)) if mesh.expectation.owned[i])
            owned = mesh.expectation.owned[index][0]
            values = mesh.tied(mesh.members[index])
            element = owned.start + int(values[owned.start : owned.stop].abs().argmax())
            values[element] *= 1 + relative
            if self.judge.agreed:
                mesh.local_CP[index][element] *= 1 + relative

        seen = self.run(before=spoil) if self.judge.agreed else self.run(after=spoil)
        return any(map(self.judge.sees, seen))

    def used(self) -> float:
        """The largest error of the clean run over what the judge allows."""
        return max(judged.divergence.max_error_over_bound for judged in self.run())


def smallest(sees: Callable[[float], bool]) -> float | None:
    """The smallest fault that is seen, to a hundredth, by halving; None where not even all of it is."""
    if not sees(1.0):
        return None
    high, low = 1.0, SMALLEST_TRIED
    while high / low > 1.01:
        middle = (high * low) ** 0.5
        high, low = (middle, low) if sees(middle) else (high, middle)
    return high


def rows(widths: list[int]) -> Iterator[tuple[str, ...]]:
    for judge in JUDGES:
        for dtype in Dtype if judge.probe is ProbeName.GPT else (Dtype.FLOAT32,):
            for dp in widths:
                bench = Bench(dp, dtype, judge)
                error, share = smallest(bench.sees_error), smallest(bench.sees_share)
                eps = "-" if error is None else f"{error / EPSILON:.2g}"
                used = f"{bench.used():.1%}" if judge.name == "sync" else "-"
                yield judge.name, dtype.value, str(dp), shown(error), eps, used, shown(share)


def shown(number: float | None) -> str:
    return "not seen" if number is None else f"{number:.1e}"


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="the smallest fault that is seen; own_bucket, pp=2, tiny, on virtual ranks")
    for heading in (
        "judge",
        "dtype",
        "dp",
        "error of one element",
        "in epsilon",
        "rounding used",
        "lost share of one rank",
    ):
        table.add_column(heading, justify="right")
    for row in rows([int(text) for text in sys.argv[1:]] or list(WIDTHS)):
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
