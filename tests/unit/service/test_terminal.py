"""What a terminal shows, from rows as the API sends them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from service import terminal
from workers.contract import Normalization, OrderingName
from workers.orderings import ORDERINGS, compose


def render(*renderables: RenderableType, width: int = 140) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, markup=False, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return output.getvalue()


def trace_row(phase: str, world_rank: int, shard: int, **values: Any) -> dict[str, Any]:
    end = "wte" if world_rank < 2 else "lm_head"
    row = {"phase": phase, "world_rank": world_rank, "dp_rank": world_rank % 2, "end": end, "shard": shard}
    return row | {"sum": 0.0, "l2": float(world_rank + shard / 10)} | values


def rank_row(probe: str = "gpt", world_rank: int = 0, end: str = "wte", **values: Any) -> dict[str, Any]:
    row = {"probe": probe, "world_rank": world_rank, "dp_rank": world_rank % 2, "pp_rank": world_rank // 2, "end": end}
    counts = {"owned_elements": 1024, "diverged_elements": 0, "predicted_elements": 0}
    return row | counts | {"max_abs_error": 0.0, "max_error_over_bound": 0.5, "ratio_to_expected": 1.0} | values


def validation(**values: Any) -> dict[str, Any]:
    empty = {"state": "completed", "verdict": "pass", "cause": None, "reasons": [], "observations": [], "error": None}
    return empty | values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2048, "2,048"),
        (0.0, "0"),
        (0.0505, "5.050e-02"),
        ("NaN", "NaN"),
        ("Infinity", "Infinity"),
        (None, "-"),
    ],
)
def test_figures(value: Any, text: str) -> None:
    assert terminal.figure(value) == text


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 2], 3.0), ([1e300, "Infinity"], "Infinity"), (["Infinity", "NaN", 5.0], "NaN"), ([None, 1.0], 1.0)],
)
def test_the_largest_never_hides_a_value_that_is_not_finite(values: list[Any], expected: Any) -> None:
    assert terminal.largest(values) == expected


def test_the_largest_of_nothing() -> None:
    assert terminal.largest([]) is None


def test_a_step_shows_its_figure() -> None:
    data = {
        "trial_index": 3,
        "probe": "gpt",
        "ordering": "buggy",
        "repeat": 0,
        "step": 1,
        "diverged_elements": 4096,
        "predicted_elements": 4096,
        "compared_elements": 4096,
        "max_abs_error": 0.0505,
        "tied_max_abs": "NaN",
        "seconds": 0.01,
    }
    line = render(terminal.event_line("step", "2026-01-01T00:00:03.5Z", data, "2026-01-01T00:00:01Z"))
    assert "2.50 s" in line
    assert "gpt/buggy step 1: 4,096 of 4,096 diverged, 4,096 predicted" in line
    assert "max error 5.05e-02, ends differ by NaN" in line


def test_a_finished_trial_shows_its_sums() -> None:
    counts = {"diverged_elements": 3, "predicted_elements": 3, "compared_elements": 8192}
    data = {"probe": "exact", "ordering": "buggy", "repeat": 2, "max_abs_error": 10.0, "seconds": 0.331} | counts
    assert terminal.describe_event("trial_finished", data) == (
        "exact/buggy repeat 2: 3 of 8,192 diverged, 3 predicted, max error 1.00e+01, 0.33 s"
    )


def test_the_first_event_is_at_zero() -> None:
    assert "0.00 s" in render(terminal.event_line("queued", "2026-01-01T00:00:03Z", {}, None))


def test_events_without_a_sentence_of_their_own_show_their_values() -> None:
    data = {"device": "cpu", "nodes": ["a", "b"], "warm": False, "seconds": 3.14159, "fingerprint": {"x": 1}}
    assert terminal.describe_event("reserved", data) == "device cpu, nodes a b, not warm, seconds 3.14"


def test_brackets_in_a_message_are_not_markup() -> None:
    line = render(terminal.event_line("failed", "2026-01-01T00:00:00Z", {"message": "lost [bold]rank[/bold]"}, None))
    assert "lost [bold]rank[/bold]" in line


def test_tables_follow_the_order_in_which_phases_ran() -> None:
    rows = [trace_row(phase, 0, 0) for phase in ("local", "scattered", "tied", "final")]
    titles = {name: [table.title for table in terminal.trace_tables(rows, each)] for name, each in ORDERINGS.items()}
    assert titles["buggy"] == [
        "local, before any sync",
        "after the DP phase (DP reduce-scatter)",
        "after the tie (tie all-reduce)",
    ]
    assert titles["fixed"] == [titles["buggy"][0], titles["buggy"][2], titles["buggy"][1]]
    assert titles["all_reduce"][1] == "after the DP phase (DP all-reduce)"


def test_tables_follow_what_the_request_made_of_the_ordering() -> None:
    rows = [trace_row(phase, 0, 0) for phase in ("local", "scattered", "tied", "normalized", "final")]
    composed = compose(OrderingName.FIXED, True, Normalization.NUM_TOKENS)
    assert [table.title for table in terminal.trace_tables(rows, composed)] == [
        "local, before any sync",
        "after the DP phase (DP reduce-scatter)",
        "after the tie (tie all-reduce)",
        "after the division (by all valid tokens)",
    ]


def test_a_table_has_a_row_a_rank_and_end_and_marks_owned_shards() -> None:
    rows = [trace_row("local", world_rank, shard) for world_rank in (3, 1, 0, 2) for shard in (1, 0)]
    (table,) = terminal.trace_tables(rows, ORDERINGS[OrderingName.BUGGY])
    lines = [line.split() for line in render(table).splitlines()[2:]]
    assert lines == [
        ["0", "wte", "*0", "*0", "0", "1.000e-01"],
        ["1", "wte", "0", "1.000e+00", "*0", "*1.100e+00"],
        ["2", "lm_head", "*0", "*2.000e+00", "0", "2.100e+00"],
        ["3", "lm_head", "0", "3.000e+00", "*0", "*3.100e+00"],
    ]


def test_without_shards_nothing_is_marked_as_owned() -> None:
    (table,) = terminal.trace_tables([trace_row("local", 0, 0)], ORDERINGS[OrderingName.ALL_REDUCE])
    assert "*" not in render(table)


def test_many_shards_are_cut_and_said_to_be() -> None:
    rows = [trace_row("local", 0, shard) for shard in range(16)]
    (table,) = terminal.trace_tables(rows, ORDERINGS[OrderingName.BUGGY])
    text = render(table)
    assert "12 more shards in the API" in text
    assert "shard 3 L2" in text
    assert "shard 4" not in text


def test_divergence_adds_counts_and_keeps_the_worst_error() -> None:
    rows = [
        rank_row(diverged_elements=3, predicted_elements=3, max_abs_error=1.0, ratio_to_expected=0.5),
        rank_row(diverged_elements=4, predicted_elements=4, max_abs_error="NaN", ratio_to_expected=0.5),
        rank_row(probe="exact", world_rank=3, end="lm_head"),
    ]
    lines = [line.split() for line in render(terminal.divergence_table(rows)).splitlines()[2:]]
    assert lines == [
        ["exact", "3", "(1,", "1)", "lm_head", "1,024", "0", "0", "0", "5.000e-01", "1"],
        ["gpt", "0", "(0,", "0)", "wte", "2,048", "7", "7", "NaN", "5.000e-01", "0.5"],
    ]


def test_one_rank_with_both_ends_has_two_rows() -> None:
    text = render(terminal.divergence_table([rank_row(end="lm_head"), rank_row(end="wte")]))
    assert text.index("wte") < text.index("lm_head")


def test_trials_show_what_is_not_ok() -> None:
    trial = {
        "probe": "exact",
        "ordering": "fixed",
        "role": "subject",
        "predicted_diverged_elements": 0,
        "diverged_elements": 12,
        "tied_max_abs": 2.0,
        "reference_max_abs": None,
        "ok": False,
    }
    assert render(terminal.trials_table([trial])).splitlines()[-1].split() == [
        *("exact", "fixed", "subject", "12", "0", "2.000e+00", "-", "NOT", "OK")
    ]


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_a_verdict_comes_with_its_reasons(verdict: str) -> None:
    reasons = [{"code": "subject_diverged", "message": "3 of 4 [elements] are wrong"}]
    text = render(*terminal.verdict_lines(validation(verdict=verdict, cause="unknown", reasons=reasons)))
    assert f"verdict: {verdict.upper()} (cause: unknown)" in text
    assert "subject_diverged: 3 of 4 [elements] are wrong" in text
    assert "noticed" not in text


def test_what_was_noticed_follows_the_verdict() -> None:
    seen = [{"code": "straggler", "message": "world_rank 1 held its peers up", "world_rank": 1}]
    text = render(*terminal.verdict_lines(validation(observations=seen)))
    assert text.splitlines()[-1].strip() == "noticed: world_rank 1 held its peers up"


def test_a_failure_is_no_verdict_and_names_its_place() -> None:
    error = {"code": "rank_died", "message": "killed by signal 9", "world_rank": 0, "node": "n1", "phase": "tie"}
    text = render(*terminal.verdict_lines(validation(state="failed", verdict=None, error=error)))
    assert "no verdict: the validation is failed" in text
    assert "rank_died: killed by signal 9 (world_rank 0, node n1, phase tie)" in text


def test_a_cancelled_validation_has_neither() -> None:
    text = render(*terminal.verdict_lines(validation(state="cancelled", verdict=None)))
    assert text.strip() == "no verdict: the validation is cancelled"


def test_timings_are_one_line() -> None:
    timings = {"other_s": 1, "run_s": 0.5, "form_s": 3.14159, "note": "x"}
    assert terminal.timing_line(timings).plain == "time: form 3.14 s, run 0.5 s, other 1 s"


def test_a_repeat_in_other_seats_is_told_as_it_happens() -> None:
    at = "2026-01-01T00:00:00Z"
    begun = {"trials": ["exact/fixed"], "suspects": [1], "nodes": ["node-b", "node-a"]}
    line = render(terminal.event_line("repeating_elsewhere", at, begun, None))
    assert "exact/fixed failed; now with the ranks on node-b node-a" in line
    ended = {"cause": "hardware", "message": "the fault stays on node-a", "node": "node-a", "seats": [], "seconds": 3.0}
    line = render(terminal.event_line("repeated_elsewhere", at, ended, None))
    assert "cause hardware: the fault stays on node-a" in line
