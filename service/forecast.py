"""`gradgate predict`: the static analysis without a server, as JSON and as a table. Only calls `workers.prediction`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from service.options import UsageFault
from service.terminal import figure
from workers.contract import TINY, Mesh, ModelSpec, OrderingName
from workers.layout import RULES, LayoutVersion, resolve
from workers.orderings import ORDERINGS
from workers.prediction import Overlap, Prediction, predict_model, undivided
from workers.public_models import MODELS

MAX_RANGES = 3


def forecast(
    model: str | Mapping[str, int],
    sizes: Mapping[str, int | None],
    versions: Sequence[str],
    orderings: Sequence[OrderingName],
    overlap: Overlap | None = None,
) -> dict[str, Any]:
    """Predictions for versions and orderings; with neither, for every known version.

    `sizes` are those of the mesh (dp, pp, tp, vpp); None takes the default, 2 x 2 with one chunk a rank.
    """
    mesh = _resolve_mesh(sizes)
    model_sizes, tied = resolve_model(model)
    if isinstance(model, str):
        model_sizes = MODELS[model].allocated(mesh.tp)
    for rule in undivided(model_sizes, mesh.tp):
        raise UsageFault(f"--tp {mesh.tp}: {rule}; choose a divisor of it")
    subjects: list[tuple[str, LayoutVersion | OrderingName]] = [(text, resolve(text)) for text in versions]
    subjects += [(ordering.value, ordering) for ordering in orderings]
    subjects = subjects or [(version.value, version) for version in RULES]
    found = [
        _describe(name, subject, predict_model(subject, mesh, model_sizes, tied=tied, overlap=overlap))
        for name, subject in subjects
    ]
    shape = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp, "vpp": mesh.vpp}
    return {"model": model, "tied": tied, "mesh": shape, "overlap": overlap is not None, "predictions": found}


def choose_overlap(overlap: bool, bucket_size: int | None) -> Overlap | None:
    """How the gradient sync overlaps with backward, as the options say. Raises UsageFault for a size that cuts none."""
    if bucket_size is not None and not overlap:
        raise UsageFault(f"--bucket-size {bucket_size}: buckets are cut by size only with overlap; add --overlap")
    if bucket_size is not None and bucket_size < 1:
        raise UsageFault(f"--bucket-size {bucket_size}: must be at least 1")
    return Overlap(bucket_size) if overlap else None


def forecast_table(found: Mapping[str, Any]) -> Table:
    """One line a version or ordering."""
    mesh = found["mesh"]
    model = _model_name(found["model"]) + ("" if found["tied"] else ", not tied")
    shape = f"dp {mesh['dp']}, pp {mesh['pp']}"
    shape += "".join(f", {name} {mesh[name]}" for name in ("tp", "vpp") if mesh[name] > 1)
    shape += ", overlap" if found["overlap"] else ""
    title = f"wrong elements of the tied weight: {model}, {shape}"
    table = Table(title=title, title_justify="left", box=None, show_edge=False, pad_edge=False)
    for name in ("for", "wrong at each end", "of", "share", "where"):
        table.add_column(name, justify="right" if name in ("wrong at each end", "of", "share") else "left")
    for entry in found["predictions"]:
        table.add_row(entry["subject"], *_cells(entry))
    return table


def _resolve_mesh(sizes: Mapping[str, int | None]) -> Mesh:
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if size < 1:
            raise UsageFault(f"--{name} {size}: must be at least 1")
    mesh = Mesh(**given)
    if mesh.vpp > 1 and mesh.pp == 1:
        raise UsageFault(f"--vpp {mesh.vpp}: chunks are interleaved over pipeline ranks; ask for --pp 2 or more")
    return mesh


def _describe(name: str, subject: LayoutVersion | OrderingName, prediction: Prediction) -> dict[str, Any]:
    rule = ORDERINGS[subject].rule if isinstance(subject, OrderingName) else RULES[subject]
    return {
        "subject": name,
        "layout": rule.version.value,
        "source": rule.source,
        "asserts": prediction.asserts,
        "num_elements": prediction.num_elements,
        "wrong_elements": prediction.wrong_elements,
        "misowned_elements": prediction.misowned_elements,
        "early_elements": prediction.early_elements,
        "fraction": prediction.fraction,
        "ranges": [[interval.start, interval.stop] for interval in prediction.ranges],
        "misowned_by_wte_owner": list(prediction.misowned_by_wte_owner),
        "misowned_by_lm_head_owner": list(prediction.misowned_by_lm_head_owner),
    }


def _cells(entry: Mapping[str, Any]) -> Iterator[str]:
    if entry["asserts"] is not None:
        yield from ("-", "-", "-", f"stops by itself: {entry['asserts']}")
        return
    yield figure(entry["wrong_elements"])
    yield figure(entry["num_elements"])
    yield f"{entry['fraction']:.2%}"
    shown = [f"{start:,} to {stop:,}" for start, stop in entry["ranges"][:MAX_RANGES]]
    more = len(entry["ranges"]) - MAX_RANGES
    yield ", ".join(shown) + (f" and {more} more ranges" if more > 0 else "")


def resolve_model(model: str | Mapping[str, int]) -> tuple[ModelSpec, bool]:
    """A model's sizes and whether its weights are tied; sizes that are not given are tiny's. UsageFault if unknown."""
    if not isinstance(model, str):
        tiny = {name: getattr(TINY, name) for name in ModelSpec.__dataclass_fields__}
        return ModelSpec(**(tiny | dict(model))), True
    if model not in MODELS:
        raise UsageFault(f"--model {model}: unknown; name one of {', '.join(MODELS)}, or give sizes")
    return MODELS[model].model, MODELS[model].tied


def _model_name(model: str | Mapping[str, int]) -> str:
    return model if isinstance(model, str) else ", ".join(f"{name} {size}" for name, size in model.items())
