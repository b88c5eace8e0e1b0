"""What query strings may hold. Unknown parameters are refused: a misspelt filter must not read as no filter."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.api.problems import FieldError, Problem, invalid
from service.api.schemas import LABEL_PATTERN, MAX_LABELS, ClusterName
from service.domain.validation import State
from workers.contract import ProbeName, TrialOrdering, Verdict

__all__ = ["LABEL_PATTERN", "ListQuery", "RowQuery", "bad_cursor"]

Cursor = Annotated[str, Field(max_length=512, description="`next_cursor` of the page before.")]


class ListQuery(BaseModel):
    """Filters of GET /validations; all that are given must match."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    cluster: ClusterName | None = None
    state: State | None = None
    verdict: Verdict | None = None
    drill: bool | None = None
    label: list[str] = Field(default_factory=list, max_length=MAX_LABELS)
    """`name=value`; may be given several times."""
    cursor: Cursor | None = None
    limit: int = Field(default=50, ge=1, le=200)


class RowQuery(BaseModel):
    """Filters of a validation's rows."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    probe: ProbeName | None = None
    ordering: TrialOrdering | None = None
    step: int | None = Field(default=None, ge=0, le=2**31 - 1)
    cursor: Cursor | None = None
    limit: int = Field(default=500, ge=1, le=5000)


def bad_cursor(cursor: str | None) -> Problem:
    """The 422 for a cursor of another listing."""
    remedy = "pass next_cursor of the page before, or leave it out"
    return invalid([FieldError("query.cursor", cursor, "is not a cursor of this listing", remedy)])
