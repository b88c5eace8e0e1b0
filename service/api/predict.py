"""POST /predict: which elements of the tied weight an ordering, or a Megatron version, gets wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from service.api import examples
from service.api.access import Reader
from service.api.bodies import read_model
from service.api.dependencies import accepted
from service.api.documents import JSON, Document, json_response
from service.api.openapi import body_schema, protected
from service.api.problems import (
    BODY_TOO_LARGE,
    INVALID_REQUEST,
    MALFORMED_JSON,
    UNSUPPORTED_MEDIA_TYPE,
    FieldError,
    invalid,
)
from service.api.schemas import MeshRequest, ModelChoice, Strict
from workers.contract import ModelSpec, OrderingName
from workers.errors import SpecError
from workers.layout import RULES, LayoutVersion, resolve
from workers.orderings import ORDERINGS
from workers.prediction import BLIND_TO_OWNERS, Overlap, Prediction, predict_model, undivided
from workers.public_models import MODELS

MAX_DP = 16_384
MAX_PP = 1_024
MAX_DP_X_TP = 65_536
"""Every tensor-parallel rank has its own dp shards, and each may be a range."""
MAX_VPP = 64
MAX_LAYERS = 4_096
MAX_SIZE = 2**24
MAX_BUCKET_SIZE = 2**40
MAX_RANGES = 1_000

router = APIRouter(tags=["analysis"])


class PredictRequest(Strict):
    """Give `ordering` or `version`, not both; with neither, the ordering is `buggy`."""

    ordering: OrderingName | None = None
    version: str | None = Field(default=None, max_length=64, examples=["v0.10", "core_v0.12.1", "0650d83"])
    """A Megatron-LM release from 0.8 on, or a commit of the catalogue; it scatters before it ties."""
    mesh: MeshRequest = MeshRequest()
    model: ModelChoice = Field(default="tiny", json_schema_extra={"examples": list(MODELS)})
    """A known model by name, or sizes."""
    overlap: bool = False
    """The gradient sync starts in the midst of backward: `fixed` cannot tie before it."""
    bucket_size: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    """Elements at which a bucket closes, with overlap, on the first stage; null takes Megatron-LM's default."""
    max_ranges: int = Field(default=100, ge=0, le=MAX_RANGES)
    """How many ranges to list at most."""


class RangeDocument(Document):
    """Elements start to stop (exclusive) of the tied weight, flat, row-major."""

    start: int
    stop: int


class OwnerDocument(Document):
    """How many misowned elements one data-parallel rank owns, and so updates with a wrong gradient."""

    dp_rank: int
    misowned_elements: int


class EndDocument(Document):
    """One copy of the tied weight."""

    misowned_elements: int
    owners: list[OwnerDocument]
    """Only ranks that own misowned elements."""


class EndsDocument(Document):
    """The first and the last stage's copies."""

    wte: EndDocument
    lm_head: EndDocument


class PredictedModel(Document):
    """The sizes that were used."""

    name: str | None
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    tied: bool
    """Whether the model's embeddings are tied; untied weights are never misowned."""


class PredictionDocument(Document):
    """The analysis. With `asserts` set that version stops by itself on this mesh, and the counts are 0."""

    ordering: OrderingName | None
    version: str | None
    layout: LayoutVersion
    source: str
    mesh: MeshRequest
    model: PredictedModel
    overlap: bool
    asserts: str | None
    num_elements: int
    misowned_elements: int
    """Owned by another rank at one end than at the other; the same set at both."""
    early_elements: int
    """Scattered before their last gradient came, with overlap; wrong at both ends."""
    wrong_elements: int
    """Either of the two, at each end."""
    fraction: float
    """Share of the tied weight that is wrong."""
    num_ranges: int
    ranges: list[RangeDocument]
    """The first `max_ranges` of them; `num_ranges` counts all."""
    ends: EndsDocument


@router.post(
    "/predict",
    operation_id="predict",
    summary="What a layout gets wrong, from sizes alone",
    response_model=PredictionDocument,
    responses=protected(INVALID_REQUEST, MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE),
    openapi_extra={"requestBody": body_schema(PredictRequest, examples.PREDICT_REQUESTS)},
)
async def predict(request: Request, _: Reader) -> Response:
    """Any scale: the layout of a 175-billion-parameter model takes milliseconds."""
    accepted(request, (JSON,))
    asked = await read_model(request, PredictRequest)
    if broken := list(_violations(asked)):
        raise invalid(broken)
    subject = _subject(asked)
    model, tied = _model(asked)
    if rules := undivided(model, asked.mesh.tp):
        raise invalid([FieldError("mesh.tp", asked.mesh.tp, rule, "choose a divisor of it") for rule in rules])
    # Off the event loop: the largest meshes take a tenth of a second.
    overlap = Overlap(asked.bucket_size) if asked.overlap else None
    prediction = await asyncio.to_thread(predict_model, subject, asked.mesh.spec(), model, tied=tied, overlap=overlap)
    return json_response(request, _document(asked, subject, model, tied, prediction))


def _violations(asked: PredictRequest) -> Iterator[FieldError]:
    if asked.ordering and asked.version:
        rule = "cannot be given together with ordering"
        yield FieldError("version", asked.version, rule, "give the one that you mean")
    if isinstance(asked.model, str) and asked.model not in MODELS:
        yield FieldError("model", asked.model, f"must be one of {', '.join(MODELS)}", "name one, or give sizes")
    if asked.ordering in BLIND_TO_OWNERS:
        rule = "goes wrong by what ranks hold, not by who owns it"
        yield FieldError("ordering", str(asked.ordering), rule, "name another ordering")
    if asked.bucket_size is not None and not asked.overlap:
        rule = "cuts buckets only with overlap, which is false"
        yield FieldError("bucket_size", asked.bucket_size, rule, "set overlap to true, or leave bucket_size out")
    for name, value, least, most in _bounded(asked):
        if not least <= value <= most:
            rule = f"must be from {least} to {most}"
            yield FieldError(
                name,
                value,
                rule,
                f"send a value {'of at least' if value < least else 'of at most'} {least if value < least else most}",
            )


def _bounded(asked: PredictRequest) -> Iterator[tuple[str, int, int, int]]:
    mesh = asked.mesh
    yield "mesh.dp", mesh.dp, 1, MAX_DP
    yield "mesh.pp", mesh.pp, 1, MAX_PP
    yield "mesh.tp", mesh.tp, 1, MAX_DP_X_TP // min(max(mesh.dp, 1), MAX_DP)
    yield "mesh.vpp", mesh.vpp, 1, 1 if mesh.pp == 1 else MAX_VPP
    if asked.bucket_size is not None:
        yield "bucket_size", asked.bucket_size, 1, MAX_BUCKET_SIZE
    if not isinstance(asked.model, str):
        for name, value in asked.model.model_dump().items():
            yield f"model.{name}", value, 1, MAX_LAYERS if name == "num_layers" else MAX_SIZE


def _subject(asked: PredictRequest) -> OrderingName | LayoutVersion:
    if asked.version is None:
        return asked.ordering or OrderingName.BUGGY
    try:
        return resolve(asked.version)
    except SpecError as error:
        remedy = f"send a release such as v0.12, or one of {', '.join(LayoutVersion)}"
        raise invalid([FieldError("version", asked.version, "has no known layout", remedy)]) from error


def _model(asked: PredictRequest) -> tuple[ModelSpec, bool]:
    if isinstance(asked.model, str):
        entry = MODELS[asked.model]
        return entry.allocated(asked.mesh.tp), entry.tied
    return asked.model.spec(), True


def _document(
    asked: PredictRequest, subject: OrderingName | LayoutVersion, model: ModelSpec, tied: bool, found: Prediction
) -> dict[str, Any]:
    ordering = subject if isinstance(subject, OrderingName) else None
    layout = ORDERINGS[ordering].layout if ordering else LayoutVersion(subject)
    return {
        "ordering": ordering,
        "version": asked.version,
        "layout": layout,
        "source": ORDERINGS[ordering].source if ordering else RULES[layout].source,
        "mesh": asked.mesh.model_dump(),
        "model": {"name": asked.model if isinstance(asked.model, str) else None, **asdict(model), "tied": tied},
        "asserts": found.asserts,
        "num_elements": found.num_elements,
        "overlap": asked.overlap,
        "misowned_elements": found.misowned_elements,
        "early_elements": found.early_elements,
        "wrong_elements": found.wrong_elements,
        "fraction": found.fraction,
        "num_ranges": len(found.ranges),
        "ranges": [{"start": part.start, "stop": part.stop} for part in found.ranges[: asked.max_ranges]],
        "ends": {
            "wte": _end(found.misowned_elements, found.misowned_by_wte_owner),
            "lm_head": _end(found.misowned_elements, found.misowned_by_lm_head_owner),
        },
    }


def _end(misowned_elements: int, by_owner: tuple[int, ...]) -> dict[str, Any]:
    owners = [{"dp_rank": dp_rank, "misowned_elements": n} for dp_rank, n in enumerate(by_owner) if n]
    return {"misowned_elements": misowned_elements, "owners": owners}
