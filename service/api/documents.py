"""What responses hold: the shapes for OpenAPI, and the functions that make them from what storage returns.

The models document and test the shapes; responses are written by `json_response`, which keeps non-finite floats
(as strings) and gives every body its strong ETag.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.api.schemas import ValidateRequest
from service.domain.cause import Cause
from service.domain.validation import State, Validation
from service.storage.ledger import Tenure
from workers.contract import (
    CollectiveOp,
    DeviationKind,
    End,
    JudgeName,
    Phase,
    Primitive,
    ProbeName,
    RankPhase,
    Role,
    TrialOrdering,
    Verdict,
)
from workers.encoding import dumps, plain

JSON = "application/json"
CSV = "text/csv"

Number = Annotated[float | Literal["NaN", "Infinity", "-Infinity"], Field(description="Non-finite values are strings.")]


class Document(BaseModel):
    """Base of all response shapes."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ReasonDocument(Document):
    """Why the verdict is what it is; of a fault also who found it, and where it is as far as that is known."""

    code: str
    message: str
    judge: JudgeName | None
    world_rank: int | None
    """The rank at fault."""
    node: str | None
    phase: RankPhase | None
    """The first phase after which something was wrong."""
    parameter: str | None
    """The parameter in which all wrong elements lie."""
    element: int | None
    """The first wrong one of `parameter`, flat, row-major."""


class ObservationDocument(Document):
    """Something worth knowing that decides nothing."""

    code: str
    message: str
    world_rank: int | None


class CollectiveDocument(Document):
    """One primitive on all groups of one kind, self-tested with exact integers before the first step."""

    group: str
    """What the groups are for: dp, pp, tie, ends, world; joined by + where one group serves several."""
    primitive: Primitive
    op: CollectiveOp | None
    num_elements: list[int]
    """Sizes tested; of one member's part where a primitive scatters or gathers. A gang that has served this mesh before
    tests fewer."""
    num_ranks: int
    size_bytes: int
    """Of one rank's tensors, all sizes together."""
    seconds: Number
    """On the slowest rank."""
    wrong_elements: int
    ok: bool


class TrialDocument(Document):
    """One probe under one ordering; counts are summed over both ends, all steps and all repeats."""

    probe: ProbeName
    ordering: TrialOrdering
    """`stack` where a stack other than `reference` ran, as the request named it."""
    role: Role
    predicted_diverged_elements: int
    diverged_elements: int
    tied_max_abs: Number
    """Largest difference between the two copies of the tied gradient, over both ends' owners."""
    reference_max_abs: Number | None
    """Largest distance from a single-process run of the same global batch; null where none was run."""
    grad_norm: Number | None
    """The global gradient norm of the last step, the same on every rank; null where none was reported."""
    grad_norm_max_error: Number | None
    """Largest distance from the norm of a single-process run of the same global batch, where one was run."""
    ok: bool
    """A subject that is clean, or a control that diverged exactly where predicted."""


class ErrorDocument(Document):
    """Why the attempt failed: the first cause and its place, where known."""

    code: str
    message: str
    world_rank: int | None
    node: str | None
    phase: str | None


class ValidationDocument(Document):
    """One validation: the request, the queue entry and the result."""

    schema_version: int
    verdict_rules_version: int
    id: str
    state: State
    verdict: Verdict | None
    """Set exactly when the state is `completed`."""
    cause: Cause | None
    """Of a failed verdict, what it followed when its trials were repeated with the ranks in other seats; the reason
    `cause_...` says what was tried, and names the node of `hardware`."""
    reasons: list[ReasonDocument]
    observations: list[ObservationDocument]
    """Of a completed validation: stragglers and the like; they never change the verdict."""
    collectives: list[CollectiveDocument]
    """Of a completed validation: what was self-tested before its first step."""
    request: dict[str, Any]
    """As sent, with its defaults filled in."""
    trials: list[TrialDocument]
    error: ErrorDocument | None
    """Set exactly when the state is `failed`."""
    fingerprint: Any
    """What each rank ran on; the verdict covers only this."""
    timings: dict[str, Any]
    """Seconds by part of the work."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    cancel_requested_at: datetime | None
    created_by: str | None
    """The API key that it came with, by its id; null on a server without keys."""


class AttemptDocument(Document):
    """What one attempt held, from when to when by the database's clock; two of one validation never overlap."""

    attempt: int
    cluster: str
    dispatcher_id: str
    num_ranks: int
    nodes: list[str]
    """Empty until the ranks had room."""
    claimed_at: datetime
    reserved_at: datetime | None
    ended_at: datetime | None
    """When its end was stored, or its lease was taken away; null while it is held."""
    outcome: Literal["requeued", "handed_back", "completed", "failed", "cancelled"] | None
    """`requeued`: lost, which may happen three times; `handed_back`: its dispatcher stopped in good order."""


class DetailedValidation(ValidationDocument):
    """A validation with its attempts, and whether its details are still there."""

    attempts: list[AttemptDocument]
    """Oldest first."""
    details_removed_at: datetime | None
    """When retention removed its events and per-rank rows, which are 410 since; null while they are there."""


class ListedValidation(ValidationDocument):
    """A validation in a list: the fingerprint, which grows with the ranks, is null; GET the validation for it."""

    fingerprint: None


class PageDocument(Document):
    """A page; `next_cursor` is null on the last one."""

    next_cursor: str | None


class ValidationPage(PageDocument):
    """Validations, newest first."""

    items: list[ListedValidation]


class ReportRow(Document):
    """Where in the experiment a row was measured."""

    trial_index: int
    probe: ProbeName
    ordering: TrialOrdering
    repeat: int
    step: int
    world_rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    end: End


class ContributorDocument(Document):
    """One rank's copy of the tied weight, whose own gradient is one term of every sum."""

    end: End
    dp_rank: int
    world_rank: int


class DeviationDocument(Document):
    """What some wrong elements consist of: whose share is missing, doubled or scaled, or whose sum they are."""

    kind: DeviationKind
    contributors: list[ContributorDocument]
    """The first few; empty where it is about the whole sum, or nobody can be named for certain."""
    num_contributors: int
    factor: Number | None
    uncertainty: Number
    first_element: int
    num_elements: int


class RankRow(ReportRow):
    """What one rank's owned elements of one end show in one step (padding excluded)."""

    owned_elements: int
    diverged_elements: int
    predicted_elements: int
    missed_elements: int
    unexpected_elements: int
    nonfinite_elements: int
    first_diverged: int | None
    last_diverged: int | None
    max_abs_error: Number
    relative_l2_error: Number
    max_error_over_bound: Number
    ratio_to_expected: Number
    reference_max_abs_error: Number | None
    reference_exceeded_elements: int
    min_detectable_share: Number
    sum: Number
    l2: Number
    digest: str
    deviations: list[DeviationDocument]
    """Most elements first; relative to the true sum, also where the ordering is expected to be wrong."""
    tied_num_elements: int | None
    """Elements of both ends that this rank compared after assembly; null on ranks that compared none."""
    tied_unequal_elements: int | None
    tied_max_abs_difference: Number | None
    tied_exceeded_elements: int | None
    weights_max_abs_difference: Number | None
    weights_num_elements: int | None
    grad_norm: Number | None
    """The global gradient norm as this rank has it."""
    grad_norm_reference: Number | None
    """The norm of a single-process run of the same global batch; on the first stage, where one was run."""
    grad_norm_allowed_error: Number | None
    """Largest distance between the two that rounding can explain."""
    compute_seconds: dict[str, Number]
    """This rank's own work by phase, in seconds, without what it waited for others; a JSON object also in CSV."""
    loss: Number | None


class TraceRow(ReportRow):
    """One dp shard of one end on one rank, after one phase."""

    phase: Phase
    shard: int
    num_elements: int
    sum: Number
    l2: Number
    digest: str


class RankPage(PageDocument):
    """Divergence rows."""

    items: list[RankRow]


class TracePage(PageDocument):
    """Trace rows."""

    items: list[TraceRow]


_TRIAL_FIELDS = tuple(TrialDocument.model_fields)


def validation_document(validation: Validation) -> dict[str, Any]:
    """The contract's object for a validation, ready for JSON."""
    return {
        "schema_version": validation.schema_version,
        "verdict_rules_version": validation.verdict_rules_version,
        "id": validation.id,
        "state": validation.state.value,
        "verdict": plain(validation.verdict),
        "cause": plain(validation.cause),
        "reasons": plain(validation.reasons),
        "observations": plain(validation.observations),
        "collectives": plain(validation.collectives),
        "request": _in_order(validation.request),
        "trials": [{name: plain(getattr(trial, name)) for name in _TRIAL_FIELDS} for trial in validation.trials],
        "error": plain(validation.error),
        "fingerprint": plain(validation.fingerprint),
        "timings": plain(validation.timings),
        "created_at": plain(validation.created_at),
        "started_at": plain(validation.started_at),
        "finished_at": plain(validation.finished_at),
        "attempt": validation.attempt,
        "cancel_requested_at": plain(validation.cancel_requested_at),
        "created_by": validation.created_by or None,
    }


def attempt_documents(tenures: Sequence[Tenure]) -> list[dict[str, Any]]:
    """A validation's part of the ledger, ready for JSON."""
    return [{name: plain(getattr(tenure, name)) for name in AttemptDocument.model_fields} for tenure in tenures]


def _in_order(request: Mapping[str, Any]) -> dict[str, Any]:
    """The stored request in the contract's order: jsonb keeps none."""
    known = {name: request[name] for name in ValidateRequest.model_fields if name in request}
    return known | dict(request)


def json_response(
    request: Request, content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response with its ETag; 304 where a GET already has it."""
    return tagged(request, dumps(content).encode(), JSON, status=status, headers=headers)


def csv_response(
    request: Request, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], headers: Mapping[str, str]
) -> Response:
    """Rows as RFC 4180 CSV with a header line; null is empty, non-finite floats read NaN, Infinity, -Infinity."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in rows)
    return tagged(request, text.getvalue().encode(), f"{CSV}; charset=utf-8", headers=headers)


def tagged(
    request: Request, body: bytes, media_type: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A body; to a GET with a strong ETag made from its bytes, so that equal tags always mean equal bytes."""
    all_headers = {"Cache-Control": "no-cache", "Vary": "Accept", **(headers or {})}
    if request.method != "GET":
        return Response(body, status, all_headers, media_type)
    etag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
    all_headers["ETag"] = etag
    if _matches(request.headers.getlist("if-none-match"), etag):
        return Response(status_code=304, headers=all_headers)
    return Response(body, status, all_headers, media_type)


def _matches(headers: Sequence[str], etag: str) -> bool:
    offered = [tag.strip().removeprefix("W/") for header in headers for tag in header.split(",")]
    return etag in offered or offered == ["*"]


def _cell(value: object) -> object:
    """Empty for null; floats by their shortest exact form; lists and objects as JSON."""
    if isinstance(value, list | Mapping):
        return dumps(value)
    return "" if value is None else plain(value)
