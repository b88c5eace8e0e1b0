"""Per-rank rows in and out: binary COPY in the caller's transaction, pages by keyset.

COPY because a large mesh sends hundreds of thousands of rows at once; binary because float8 then keeps every bit,
NaN and infinities included. Never commits: rows and the change of state that they belong to are one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.types.json import Jsonb
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    Integer,
    Select,
    Table,
    Text,
    and_,
    func,
    literal,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import JSONB, array

from service.domain import cursor as cursors
from service.domain.cursor import Page
from service.storage.session import Connection
from service.storage.tables import divergence, rank_steps, trace, trials
from workers.contract import NormRow, Phase, ProbeName, StepReport, TiedRow, TrialOrdering, TrialSummary
from workers.encoding import dumps

Row = tuple[Any, ...]

_PLACE = ("trial_index", "probe", "ordering", "repeat", "step", "world_rank", "dp_rank", "pp_rank", "tp_rank")
_TYPES: dict[type, str] = {Text: "text", Integer: "int4", BigInteger: "int8", Double: "float8", JSONB: "jsonb"}
_OF_STEP = (
    "tied_num_elements",
    "tied_unequal_elements",
    "tied_max_abs_difference",
    "tied_exceeded_elements",
    "weights_max_abs_difference",
    "weights_num_elements",
    "grad_norm",
    "grad_norm_reference",
    "grad_norm_allowed_error",
    "compute_seconds",
    "loss",
)
"""What a rank said about a step as a whole, beside its divergence rows."""
_place = attrgetter(*_PLACE)


async def copy_reports(connection: Connection, validation_id: str, reports: Sequence[StepReport]) -> None:
    """Write every row of `reports`. Raises psycopg.errors.UniqueViolation when a rank reported one step twice."""
    raw = (await connection.get_raw_connection()).driver_connection
    if not isinstance(raw, AsyncConnection):
        raise TypeError(f"{type(raw).__name__} cannot COPY; the database URL must be Postgres on psycopg 3")
    await _copy(raw, rank_steps, _rank_step_rows(validation_id, reports))
    await _copy(raw, divergence, _divergence_rows(validation_id, reports))
    await _copy(raw, trace, _trace_rows(validation_id, reports))


async def insert_trials(connection: Connection, validation_id: str, summaries: Sequence[TrialSummary]) -> None:
    """Write the judged trials, in the order in which they were judged."""
    names = [column.name for column in trials.columns if column.name not in ("validation_id", "trial")]
    rows = [
        {"validation_id": validation_id, "trial": trial} | {name: getattr(summary, name) for name in names}
        for trial, summary in enumerate(summaries)
    ]
    if rows:
        await connection.execute(trials.insert(), rows)


async def ranks_page(
    connection: Connection,
    validation_id: str,
    *,
    probe: ProbeName | None = None,
    ordering: TrialOrdering | None = None,
    step: int | None = None,
    cursor: str | None = None,
    limit: int = 500,
) -> Page[dict[str, Any]]:
    """Divergence rows with what the same rank said about the step: loss, ends, norm, own work; in a fixed order."""
    same_step = [divergence.c[name] == rank_steps.c[name] for name in rank_steps.primary_key.columns.keys()]  # noqa: SIM118
    query = (
        select(divergence, *(rank_steps.c[name] for name in _OF_STEP))
        .join_from(divergence, rank_steps, and_(*same_step))
        .where(*_report_filter(divergence, validation_id, probe, ordering, step))
    )
    key = (divergence.c.trial_index, divergence.c.step, divergence.c.world_rank, divergence.c.end)
    return await _rows_page(connection, "ranks", query, key, cursor, limit)


async def trace_page(
    connection: Connection,
    validation_id: str,
    *,
    probe: ProbeName | None = None,
    ordering: TrialOrdering | None = None,
    step: int | None = None,
    cursor: str | None = None,
    limit: int = 500,
) -> Page[dict[str, Any]]:
    """Trace rows: per trial and step, the phases in the order in which they happened, then rank, end and shard."""
    query = select(trace).where(*_report_filter(trace, validation_id, probe, ordering, step))
    phase = func.array_position(array([phase.value for phase in Phase]), trace.c.phase, type_=Integer)
    key = (trace.c.trial_index, trace.c.step, phase, trace.c.world_rank, trace.c.end, trace.c.shard)
    return await _rows_page(connection, "trace", query, key, cursor, limit)


async def _rows_page(
    connection: Connection,
    listing: str,
    query: Select[Any],
    key: tuple[ColumnElement[Any], ...],
    cursor: str | None,
    limit: int,
) -> Page[dict[str, Any]]:
    """The next `limit` rows of `query` in the order of `key`, whose last values become the cursor."""
    kinds = tuple(column.type.python_type for column in key)
    if cursor is not None:
        after = cursors.decode(listing, cursor, kinds)
        values = [literal(value, column.type) for value, column in zip(after, key, strict=True)]
        query = query.where(tuple_(*key) > tuple_(*values))
    keyed = query.add_columns(*(column.label(f"key_{i}") for i, column in enumerate(key)))
    found = (await connection.execute(keyed.order_by(*key).limit(limit + 1))).all()
    names = [str(column.key) for column in query.selected_columns]
    rows = tuple(dict(zip(names, row, strict=False)) for row in found[:limit])
    more = len(found) > limit
    return Page(rows, cursors.encode(listing, tuple(found[limit - 1])[-len(key) :]) if more else None)


def _report_filter(
    table: Table, validation_id: str, probe: ProbeName | None, ordering: TrialOrdering | None, step: int | None
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [table.c.validation_id == validation_id]
    wanted = {"probe": probe, "ordering": ordering, "step": step}
    return conditions + [table.c[name] == value for name, value in wanted.items() if value is not None]


async def _copy(raw: AsyncConnection[Any], table: Table, rows: Iterable[Row]) -> None:
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier(table.name), sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns)
    )
    async with raw.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types([_TYPES[type(column.type)] for column in table.columns])
        for row in rows:
            await copy.write_row(row)


def _rank_step_rows(validation_id: str, reports: Sequence[StepReport]) -> Iterator[Row]:
    for report in reports:
        yield (
            validation_id,
            *_place(report),
            report.loss,
            Jsonb(report.seconds, dumps),
            report.replica.initial_weights_digest,
            report.replica.weights_digest,
            *_tied_values(report.tied),
            *_norm_values(report.grad_norm),
            Jsonb(report.compute_seconds, dumps),
        )


def _tied_values(tied: TiedRow | None) -> Row:
    if tied is None:
        return (None,) * 6
    return (
        tied.num_elements,
        tied.unequal_elements,
        tied.max_abs_difference,
        tied.exceeded_elements,
        tied.weights_max_abs_difference,
        tied.weights_num_elements,
    )


def _norm_values(norm: NormRow | None) -> Row:
    return (None,) * 3 if norm is None else (norm.value, norm.reference, norm.allowed_error)


def _divergence_rows(validation_id: str, reports: Sequence[StepReport]) -> Iterator[Row]:
    values = _getter(divergence)
    for report in reports:
        for row in report.divergence:
            *figures, deviations = values(row)
            yield (validation_id, *_place(report), *figures, Jsonb(deviations, dumps))


def _trace_rows(validation_id: str, reports: Sequence[StepReport]) -> Iterator[Row]:
    values = _getter(trace)
    for report in reports:
        for row in report.trace:
            yield (validation_id, *_place(report), *values(row))


def _getter(table: Table) -> attrgetter[Row]:
    """Reads, from a row of `workers.contract`, the columns that follow the place: they carry its field names."""
    names = [column.name for column in table.columns][1 + len(_PLACE) :]
    return attrgetter(*names)
