"""`gradgate predict --sweep`: one grid of models and widths, as JSON and as a table. Only calls `workers.sweep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.table import Table

from service.forecast import resolve_model
from service.options import MODEL_SIZES, UsageFault
from service.terminal import figure
from workers.layout import RULES, LayoutVersion, resolve
from workers.prediction import Overlap
from workers.public_models import MODELS
from workers.sweep import SweepCase, SweptModel, sweep

WIDTHS = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Data-parallel sizes that are tried where none is asked for."""
MAX_SHARDS = 2_000_000
"""Shards over all cases of one sweep: a few seconds."""


def forecast_grid(
    model: str | Mapping[str, int] | None,
    vary: str | None,
    widths: Sequence[int],
    pp: int | None,
    versions: Sequence[str],
    overlap: Overlap | None = None,
) -> dict[str, Any]:
    """Every case of a grid. Models are the one asked for, with one size varied if `vary` says so, or all known ones."""
    pp = 2 if pp is None else pp
    for name, value in (("pp", pp), *(("sweep-dp", width) for width in widths)):
        if value < 1:
            raise UsageFault(f"--{name} {value}: must be at least 1")
    models = _models(model, vary)
    subjects = [resolve(text) for text in versions] or list(RULES)
    num_shards = len(models) * len(subjects) * sum(widths)
    if num_shards > MAX_SHARDS:
        raise UsageFault(f"--sweep: {num_shards} shards over all cases, more than {MAX_SHARDS}; ask for fewer or less")
    cases = [_case(case, models[case.model].tied) for case in sweep(models, widths, pp, subjects, overlap)]
    return {"pp": pp, "overlap": overlap is not None, "dp": list(widths), "cases": cases}


def grid_table(found: Mapping[str, Any]) -> Table:
    """A line for each version, and one for each of its models that is hit at some width."""
    shape = f"pp {found['pp']}" + (", overlap" if found["overlap"] else "")
    title = f"wrong elements of the tied weight at each end, by dp; {shape}"
    caption = ". is clean, a share from 1% up, else a count; stops: that version ends with an assertion of its own"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None, show_edge=False)
    table.add_column("version")
    table.add_column("model")
    for dp in found["dp"]:
        table.add_column(str(dp), justify="right")
    for version, cases in groupby(found["cases"], lambda case: case["version"]):
        _add_version(table, version, list(cases))
    return table


def choose_grid(
    sweep: bool, sweep_dp: str | None, only_swept: Mapping[str, object], never_swept: Mapping[str, object]
) -> tuple[int, ...]:
    """The dp sizes of a sweep as the options say, none without one. Raises UsageFault for options that do not fit."""
    if not sweep:
        for name, value in ({"sweep-dp": sweep_dp} | dict(only_swept)).items():
            if value is not None:
                raise UsageFault(f"--{name} {value}: is for a sweep; add --sweep")
        return ()
    for name, value in never_swept.items():
        if value:
            raise UsageFault(f"--{name}: does not go with --sweep, which takes --sweep-dp and versions")
    return WIDTHS if sweep_dp is None else _parse_widths(sweep_dp)


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageFault(f"--sweep-dp {text}: needs numbers with commas between, as 2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def _models(model: str | Mapping[str, int] | None, vary: str | None) -> dict[str, SweptModel]:
    if model is None and vary is None:
        return {name: SweptModel(entry.model, entry.tied) for name, entry in MODELS.items()}
    sizes, tied = resolve_model("tiny" if model is None else model)
    if vary is None:
        return {model if isinstance(model, str) else "as given": SweptModel(sizes, tied)}
    name, values = _parse_vary(vary)
    return {f"{name}={value}": SweptModel(replace(sizes, **{name: value}), tied) for value in values}


def _parse_vary(text: str) -> tuple[str, range]:
    name, _, bounds = text.partition("=")
    numbers = bounds.split(":")
    if name not in MODEL_SIZES or len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
        needs = f"NAME=START:STOP[:STEP] with NAME one of {', '.join(MODEL_SIZES)}"
        raise UsageFault(f"--vary {text}: needs {needs}, as hidden_size=1024:2048:64")
    first, last, step = (*map(int, numbers), 1)[:3]
    if not 1 <= first <= last or step < 1:
        raise UsageFault(f"--vary {text}: needs 1 <= START <= STOP and STEP >= 1")
    return name, range(first, last + 1, step)


def _case(case: SweepCase, tied: bool) -> dict[str, Any]:
    return {
        "version": case.version.value,
        "model": case.model,
        "tied": tied,
        "dp": case.dp,
        "asserts": case.asserts,
        "num_elements": case.num_elements,
        "wrong_elements": case.wrong_elements,
        "fraction": case.fraction,
    }


def _add_version(table: Table, version: LayoutVersion, cases: Sequence[Mapping[str, Any]]) -> None:
    by_model = [list(of_model) for _, of_model in groupby(cases, lambda case: case["model"])]
    hits = [sum(of_dp) for of_dp in zip(*([bool(_hit(case)) for case in row] for row in by_model), strict=True)]
    table.add_row(version, f"hit, of {len(by_model)} models", *(str(number) if number else "." for number in hits))
    for row in by_model:
        if any(map(_hit, row)):
            name = row[0]["model"] + ("" if row[0]["tied"] else ", not tied")
            table.add_row("", name, *_cells(row))


def _hit(case: Mapping[str, Any]) -> bool:
    return case["asserts"] is not None or case["wrong_elements"] > 0


def _cells(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for case in cases:
        if case["asserts"] is not None:
            yield "stops"
        elif case["fraction"] >= 0.01:
            yield f"{case['fraction']:.0%}"
        else:
            yield figure(case["wrong_elements"]) if case["wrong_elements"] else "."
