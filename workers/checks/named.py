"""A rank's parameters by the names under which findings speak of them. Local; looks at no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from workers.parameters import chunk_prefixes


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter of this rank by its name."""

    name: str
    parameter: nn.Parameter


def name_parameters(modules: Sequence[nn.Module]) -> list[Named]:
    """Every parameter of a rank's chunks, as registered; with several chunks the names say which."""
    return [
        Named(prefix + name, parameter)
        for prefix, module in zip(chunk_prefixes(len(modules)), modules, strict=True)
        for name, parameter in module.named_parameters()
    ]
