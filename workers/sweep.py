"""Which of many models and widths each Megatron-LM version gets wrong: the static analysis over a whole grid.

Pure; a case costs the number of shards. A slip hits single sizes only, so that one prediction says little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from workers.contract import Mesh, ModelSpec
from workers.layout import LayoutVersion
from workers.prediction import Overlap, predict_model


@dataclass(frozen=True, slots=True)
class SweptModel:
    """One model of a grid."""

    model: ModelSpec
    tied: bool = True


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One model at one width under one version's layout, scattering before the tie; counts are those of one end."""

    model: str
    version: LayoutVersion
    dp: int
    asserts: str | None
    num_elements: int
    wrong_elements: int

    @property
    def fraction(self) -> float:
        """Share of the tied weight that is wrong at each end."""
        return self.wrong_elements / self.num_elements if self.num_elements else 0.0


def sweep(
    models: Mapping[str, SweptModel],
    widths: Iterable[int],
    pp: int,
    versions: Iterable[LayoutVersion],
    overlap: Overlap | None = None,
) -> Iterator[SweepCase]:
    """Every case of the grid: by version, then model, then dp (`widths`). Raises SpecError for impossible sizes."""
    for version, (name, swept), dp in product(versions, models.items(), widths):
        found = predict_model(version, Mesh(dp=dp, pp=pp), swept.model, tied=swept.tied, overlap=overlap)
        yield SweepCase(name, version, dp, found.asserts, found.num_elements, found.wrong_elements)
