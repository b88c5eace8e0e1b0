"""What a person sees in a terminal: progress lines, the report's tables, divergence by rank, the verdict.

Takes the API's JSON as it comes and gives rich renderables and plain lines; it must neither fetch nor judge anything.
Numbers that are not finite arrive as strings and stay so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.contract import Phase
from workers.orderings import Ordering, SyncPhase

Row = Mapping[str, Any]

PLAIN_WIDTH = 118
"""Where output goes to a file or a pipe."""
MAX_SHARD_COLUMNS = 4
MAX_RANK_ROWS = 32
TIMINGS = ("queued_s", "reserve_s", "form_s", "run_s", "repeat_s", "judge_s", "attempt_s")
VERDICT_STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}

_PHASE_TITLES = {
    Phase.LOCAL: "local, before any sync",
    Phase.SCATTERED: "after the DP phase",
    Phase.TIED: "after the tie",
    Phase.NORMALIZED: "after the division",
}
_SYNC_NAMES = {
    SyncPhase.DP_REDUCE_SCATTER: "DP reduce-scatter",
    SyncPhase.DP_ALL_REDUCE: "DP all-reduce",
    SyncPhase.TIE_ALL_REDUCE: "tie all-reduce",
    SyncPhase.OWN_TOKENS_SCALE: "by each rank's own tokens",
    SyncPhase.NUM_TOKENS_SCALE: "by all valid tokens",
}
_PHASES_AFTER = {
    SyncPhase.DP_REDUCE_SCATTER: Phase.SCATTERED,
    SyncPhase.DP_ALL_REDUCE: Phase.SCATTERED,
    SyncPhase.TIE_ALL_REDUCE: Phase.TIED,
    SyncPhase.OWN_TOKENS_SCALE: Phase.NORMALIZED,
    SyncPhase.NUM_TOKENS_SCALE: Phase.NORMALIZED,
}


def open_console(*, stderr: bool = False) -> Console:
    """A console that neither wraps tables in a pipe nor interprets brackets in messages."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, markup=False, highlight=False)


def figure(value: Any, digits: int = 3) -> str:
    """A number for a table cell: counts with separators, floats in scientific notation, anything else as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return "0" if value == 0 else f"{value:.{digits}e}"


def largest(values: Iterable[Any]) -> Any:
    """The largest of numbers as the API sends them: NaN beats Infinity, which beats every finite one; None for none."""
    order = {"-Infinity": (0, 0.0), "Infinity": (2, 0.0), "NaN": (3, 0.0)}
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: order[value] if isinstance(value, str) else (1, value), default=None)


# Progress


def describe_event(kind: str, data: Row) -> str:
    """One line for one event of a validation's history."""
    if kind == "step":
        return f"{_describe_trial(data)} step {data.get('step')}: {_describe_counts(data)}"
    if kind == "trial_started":
        return _describe_trial(data)
    if kind == "trial_finished":
        return f"{_describe_trial(data)}: {_describe_counts(data)}, {_describe_seconds(data)}"
    if kind == "repeating_elsewhere":
        return f"{' '.join(data['trials'])} failed; now with the ranks on {' '.join(data['nodes'])}"
    if kind == "repeated_elsewhere":
        return f"cause {data['cause']}: {data['message']}"
    if kind == "failed":
        return str(data.get("message") or _describe_values(data))
    return _describe_values(data)


def event_line(kind: str, at: str, data: Row, started_at: str | None) -> Text:
    """A progress line: seconds since the first event, what happened, and its figure."""
    elapsed_s = (parse_time(at) - parse_time(started_at or at)).total_seconds()
    name = kind.replace("_", " ")
    style = {"completed": "bold", "failed": "bold red", "cancelled": "bold yellow", "step": "dim"}.get(kind, "")
    return Text.assemble((f"{elapsed_s:7.2f} s  ", "dim"), (f"{name:<15} ", style), describe_event(kind, data))


def parse_time(text: str) -> datetime:
    """An RFC 3339 time."""
    return datetime.fromisoformat(text)


def _describe_trial(data: Row) -> str:
    repeat = f" repeat {data['repeat']}" if data.get("repeat") else ""
    return f"{data.get('probe')}/{data.get('ordering')}{repeat}"


def _describe_counts(data: Row) -> str:
    counts = (figure(data.get(f"{name}_elements")) for name in ("diverged", "compared", "predicted"))
    text = "{} of {} diverged, {} predicted".format(*counts) + f", max error {figure(data.get('max_abs_error'), 2)}"
    tied = data.get("tied_max_abs")
    return text if tied is None else f"{text}, ends differ by {figure(tied, 2)}"


def _describe_seconds(data: Row) -> str:
    seconds = data.get("seconds")
    return f"{seconds:.2f} s" if _is_number(seconds) else "-"


def _describe_values(data: Row) -> str:
    """Scalars of an event without a sentence of its own, as `name value`."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            parts.append(f"{_words(key)} {' '.join(value)}")
        elif isinstance(value, bool):
            parts.append(_words(key) if value else f"not {_words(key)}")
        elif isinstance(value, float):
            parts.append(f"{_words(key)} {value:.3g}")
        elif isinstance(value, str | int):
            parts.append(f"{_words(key)} {value}")
    return ", ".join(parts)


def _words(key: str) -> str:
    return key.replace("_", " ")


# The report's tables


def trace_tables(rows: Sequence[Row], ordering: Ordering) -> Iterator[Table]:
    """Tables of one trial's step: local, and after each sync phase in the order in which they ran.

    A row is a rank and its end of the tied weight, columns are the parts of it that each dp rank owns.
    """
    for phase, title in trace_phases(ordering):
        cells = [row for row in rows if row["phase"] == phase]
        if cells:
            yield _trace_table(cells, title, ordering.distributed_optimizer)


def trace_phases(ordering: Ordering) -> list[tuple[Phase, str]]:
    """The traced phases of an ordering in running order, each with its title."""
    found = [(Phase.LOCAL, _PHASE_TITLES[Phase.LOCAL])]
    for sync in ordering.phases:
        phase = _PHASES_AFTER[sync]
        found.append((phase, f"{_PHASE_TITLES[phase]} ({_SYNC_NAMES[sync]})"))
    return found


def _trace_table(rows: Sequence[Row], title: str, sharded: bool) -> Table:
    shards = sorted({row["shard"] for row in rows})
    shown = shards[:MAX_SHARD_COLUMNS]
    table = _table(_and_more(title, len(shards) - len(shown), "shards"))
    table.add_column("rank")
    table.add_column("end")
    for shard in shown:
        table.add_column(f"shard {shard} sum", justify="right")
        table.add_column(f"shard {shard} L2", justify="right")
    cells = {(row["world_rank"], row["dp_rank"], row["end"], row["shard"]): row for row in rows}
    places = sorted({(world_rank, dp_rank, end) for world_rank, dp_rank, end, _ in cells}, key=_place_order)
    for world_rank, dp_rank, end in places[:MAX_RANK_ROWS]:
        values: list[str] = []
        for shard in shown:
            cell = cells.get((world_rank, dp_rank, end, shard))
            mark = "*" if sharded and shard == dp_rank else ""
            values += [mark + figure(cell["sum"]), mark + figure(cell["l2"])] if cell else ["-", "-"]
        table.add_row(str(world_rank), end, *values)
    return table


def _place_order(place: tuple[int, int, str]) -> tuple[int, bool]:
    world_rank, _, end = place
    return world_rank, end != "wte"


# Divergence


def divergence_table(rows: Sequence[Row]) -> Table:
    """Each rank's divergence by probe and end, over all steps and repeats of the rows given."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["probe"], row["world_rank"], row["end"]), []).append(row)
    keys = sorted(groups, key=lambda key: (key[0], key[1], key[2] != "wte"))
    table = _table(_and_more("each rank's divergence, all steps", len(keys) - MAX_RANK_ROWS, "rows"))
    for name in ("probe", "rank (dp, pp)", "end"):
        table.add_column(name)
    for name in ("owned", "diverged", "predicted", "max error", "error / bound", "value / truth"):
        table.add_column(name, justify="right")
    for probe, world_rank, end in keys[:MAX_RANK_ROWS]:
        table.add_row(probe, *_divergence_cells(world_rank, end, groups[probe, world_rank, end]))
    return table


def _divergence_cells(world_rank: int, end: str, rows: Sequence[Row]) -> Iterator[str | Text]:
    yield f"{world_rank} ({rows[0]['dp_rank']}, {rows[0]['pp_rank']})"
    yield end
    diverged, predicted = (sum(row[f"{name}_elements"] for row in rows) for name in ("diverged", "predicted"))
    yield figure(sum(row["owned_elements"] for row in rows))
    yield Text(figure(diverged), style="" if diverged == predicted else "bold red")
    yield figure(predicted)
    yield figure(largest(row["max_abs_error"] for row in rows))
    yield figure(largest(row["max_error_over_bound"] for row in rows))
    yield " ".join(dict.fromkeys(_ratio(row["ratio_to_expected"]) for row in rows))


def _ratio(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


# The verdict


def trials_table(trials: Sequence[Row]) -> Table:
    """One line a trial."""
    table = _table("trials, both ends, all steps and repeats")
    for name in ("probe", "ordering", "role"):
        table.add_column(name)
    for name in ("diverged", "predicted", "max |wte - lm_head|", "from one process"):
        table.add_column(name, justify="right")
    table.add_column("")
    for trial in trials:
        counts = (trial["diverged_elements"], trial["predicted_diverged_elements"])
        errors = (trial["tied_max_abs"], trial["reference_max_abs"])
        mark = Text("ok", style="green") if trial["ok"] else Text("NOT OK", style="bold red")
        cells = [figure(value) for value in (*counts, *errors)]
        table.add_row(trial["probe"], trial["ordering"], trial["role"], *cells, mark)
    return table


def verdict_lines(validation: Row) -> Iterator[Text]:
    """The end of a validation in words: its verdict with reasons, or why there is none."""
    state, verdict = validation["state"], validation["verdict"]
    if verdict is not None:
        cause = f" (cause: {validation['cause']})" if validation.get("cause") else ""
        yield Text.assemble("verdict: ", (verdict.upper(), VERDICT_STYLES.get(verdict, "bold")), cause)
        for reason in validation["reasons"]:
            yield Text(f"  {reason['code']}: {reason['message']}")
        for observation in validation["observations"]:
            yield Text(f"  noticed: {observation['message']}", style="yellow")
        return
    yield Text.assemble("no verdict: the validation is ", (state, "bold red"))
    if error := validation.get("error"):
        place = [f"{name} {error[name]}" for name in ("world_rank", "node", "phase") if error.get(name) is not None]
        yield Text(f"  {error['code']}: {error['message']}" + (f" ({', '.join(place)})" if place else ""))


def timing_line(timings: Row) -> Text:
    """Where the time went, in the order of the work; parts that this file does not know come last."""
    names = [name for name in TIMINGS if name in timings] + [name for name in timings if name not in TIMINGS]
    parts = [f"{_words(name.removesuffix('_s'))} {timings[name]:.3g} s" for name in names if _is_number(timings[name])]
    return Text("time: " + ", ".join(parts), style="dim")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="italic", show_edge=False, pad_edge=False, box=None)


def _and_more(title: str, num_left_out: int, what: str) -> str:
    return f"{title}; {num_left_out} more {what} in the API" if num_left_out > 0 else title
