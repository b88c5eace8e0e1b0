"""Running a validation from a terminal: post it, follow its events, print what came of it.

Everything shown comes from the server over HTTP. Must not know a database or Ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from service import terminal
from service.client import ClientError, GradgateClient
from workers.contract import Normalization, OrderingName, ProbeName
from workers.encoding import dumps
from workers.orderings import compose


def follow(client: GradgateClient, request: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Post a validation, print its events as they happen, and return it as it ended; cancels it on Ctrl-C."""
    validation = client.validate(request)
    validation_id: str = validation["id"]
    console.print(f"{validation_id}  {client.base_url}/validations/{validation_id}", soft_wrap=True)
    started_at: str | None = None
    try:
        for event in client.events(validation_id):
            console.print(terminal.event_line(event.type, event.at, event.data, started_at), soft_wrap=True)
            started_at = started_at or event.at
    except KeyboardInterrupt:
        with contextlib.suppress(ClientError):
            client.cancel(validation_id)
            console.print(f"asked the server to cancel {validation_id}")
        raise
    return client.get(validation_id)


def print_outcome(validation: Mapping[str, Any], console: Console) -> None:
    """The trials, where the time went, and the verdict."""
    console.print()
    if validation["trials"]:
        console.print(terminal.trials_table(validation["trials"]))
        console.print()
    if validation["timings"]:
        console.print(terminal.timing_line(validation["timings"]), soft_wrap=True)
    for line in terminal.verdict_lines(validation):
        console.print(line, soft_wrap=True)


def print_details(client: GradgateClient, validation: Mapping[str, Any], console: Console) -> None:
    """Per ordering: the report's three tables of the first step, then each rank's divergence."""
    request = validation["request"]
    default = Normalization.MICROBATCHES
    probe = ProbeName.GPT if ProbeName.GPT in request["probes"] else request["probes"][0]
    for ordering in request["orderings"]:
        trace = client.trace(validation["id"], probe=str(probe), ordering=ordering, step=0)
        rows = [row for row in trace if row["repeat"] == 0]
        console.print()
        console.rule(f"{ordering}: gradient of the tied weight, probe {probe}, step 0", align="left")
        composed = compose(
            OrderingName(ordering), request.get("overlap", False), Normalization(request.get("normalization", default))
        )
        for table in terminal.trace_tables(rows, composed):
            console.print()
            console.print(table)
        if rows:
            console.print("* owned by this rank: what its optimizer gets", style="dim")
        console.print()
        console.print(terminal.divergence_table(list(client.ranks(validation["id"], ordering=ordering))))


def print_json(document: Mapping[str, Any]) -> None:
    """Strict JSON on standard output: non-finite numbers are strings, as in the API."""
    print(dumps(document))  # noqa: T201 - the command's output
