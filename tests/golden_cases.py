"""The golden vectors as tests use them: one case is a training step of the real library, seen at the tied weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from workers.contract import Mesh, OrderingName
from workers.grad_buffer import GradBuffer
from workers.grad_sync import Prescale
from workers.intervals import Interval
from workers.layout import RULES, BufferLayout, LayoutRule, LayoutVersion, PrescaleKind, build_layout
from workers.orderings import ORDERINGS, Ordering
from workers.parameters import ParameterShape, tied_parameter_name

VECTORS = Path(__file__).parent / "golden" / "vectors"

_RULES: dict[str, LayoutRule] = {
    "de4028a_dp2": RULES[LayoutVersion.DE4028A],
    "daf0006_dp2": RULES[LayoutVersion.DAF0006],
    "0650d83_dp2": RULES[LayoutVersion("0650d83")],
    "v0.12.0_odd_dp2": RULES[LayoutVersion("v0.9")],
    "v0.12.0_odd_dp3": RULES[LayoutVersion("v0.9")],
    "v0.13.0_odd_dp2": RULES[LayoutVersion("v0.13")],
    "mcore0161_dp2": RULES[LayoutVersion("v0.13")],
    "mcore0161_no_own_bucket_dp3": replace(RULES[LayoutVersion("v0.13")], own_bucket=False),
}
NAMES = tuple(_RULES)


@dataclass(frozen=True)
class GoldenCase:
    name: str
    dp: int
    local: np.ndarray
    final: np.ndarray
    owned: np.ndarray
    reference: np.ndarray
    facts: dict[str, float]
    layouts: tuple[BufferLayout, BufferLayout]
    rule: LayoutRule

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.dp, 2)

    @property
    def ordering(self) -> Ordering:
        """Megatron's order of phases; the layout is the case's own."""
        return ORDERINGS[OrderingName.BUGGY]

    @property
    def prescale(self) -> Prescale:
        return Prescale(self.rule.prescale, self.dp)

    def buffers(self, world_rank: int) -> list[GradBuffer]:
        """A rank's one buffer with the captured local gradient of the tied weight in its place."""
        at = self.mesh.coordinates(world_rank)
        buffer = GradBuffer(self.layouts[at.pp_rank], torch.device("cpu"), tied_parameter_name(2, at.pp_rank))
        buffer.tied_grad().copy_(torch.from_numpy(self.local[at.pp_rank, at.dp_rank]))
        return [buffer]

    def expected_final(self, world_rank: int) -> np.ndarray:
        at = self.mesh.coordinates(world_rank)
        return self.final[at.pp_rank, at.dp_rank]

    def owned_intervals(self, world_rank: int) -> tuple[Interval, ...]:
        at = self.mesh.coordinates(world_rank)
        return self.layouts[at.pp_rank].owned_intervals(tied_parameter_name(2, at.pp_rank) or "", at.dp_rank)


def load(name: str) -> GoldenCase:
    document = json.loads((VECTORS / f"{name}.json").read_text())
    arrays = np.load(VECTORS / f"{name}.npz")
    rule = _RULES[name]
    assert rule.prescale is PrescaleKind(_PRESCALES[document["prescale"]])
    layouts = tuple(
        build_layout(registered(document["layout"][end], tied), rule, document["dp"])
        for end, tied in (("wte", "embedding.word_embeddings.weight"), ("lm_head", "output_layer.weight"))
    )
    facts = {key: value for key, value in document.items() if isinstance(value, float | int)}
    return GoldenCase(
        name,
        document["dp"],
        arrays["local"],
        arrays["final"],
        arrays["owned"],
        arrays["reference"],
        facts,
        (layouts[0], layouts[1]),
        rule,
    )


def registered(layout: dict[str, list[dict[str, int | str]]], tied: str) -> tuple[ParameterShape, ...]:
    """The captured parameters in registration order: names and sizes, nothing else."""
    return tuple(
        ParameterShape(str(param["name"]), (int(param["stop"]) - int(param["start"]),), param["name"] == tied)
        for param in reversed(layout["params"])
    )


_PRESCALES = {"divide_by_dp": "divide", "multiply_by_inverse_dp": "multiply_by_inverse"}
