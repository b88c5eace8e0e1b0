"""What happened in one attempt, as the events and timings that people see: figures over all ranks. Pure.

Reports arrive rank by rank; a step is told once every rank has reported it, in the order of the plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from service.domain.cause import Attribution
from service.domain.validation import EventType
from service.execution.messages import Repeated, Repeating
from workers.contract import Reason, StepReport, TrialSpec
from workers.encoding import plain

Entry = tuple[str, dict[str, Any]]


class Chronicle:
    """Turns reports into trial_started, step and trial_finished entries, each as soon as it is complete."""

    def __init__(self, trials: Sequence[TrialSpec]) -> None:
        self.reports: list[StepReport] = []
        self._trials = trials
        self._world_size = trials[0].mesh.world_size
        self._waiting: defaultdict[tuple[int, int], list[StepReport]] = defaultdict(list)
        self._finished: list[dict[str, Any]] = []

    def open(self) -> list[Entry]:
        """The first entry: the gang stands and the first trial begins."""
        return [self._started(0)]

    def hear(self, reports: Iterable[StepReport]) -> list[Entry]:
        """Entries that these reports complete."""
        entries: list[Entry] = []
        for report in reports:
            self.reports.append(report)
            of_step = self._waiting[report.trial_index, report.step]
            of_step.append(report)
            if len(of_step) == self._world_size:
                entries += self._close_step(self._waiting.pop((report.trial_index, report.step)))
        return entries

    def seconds_by_phase(self) -> dict[str, float]:
        """Time by phase, summed over steps, mean over ranks."""
        totals: defaultdict[str, float] = defaultdict(float)
        for report in self.reports:
            for phase, seconds in report.seconds.items():
                totals[phase] += seconds / self._world_size
        return {phase: round(seconds, 6) for phase, seconds in sorted(totals.items())}

    def _close_step(self, reports: list[StepReport]) -> list[Entry]:
        first = reports[0]
        trial = self._trials[first.trial_index]
        figures = step_figures(reports)
        entries: list[Entry] = [(EventType.STEP, {**self._name(first.trial_index), "step": first.step, **figures})]
        self._finished.append(figures)
        if first.step == trial.steps - 1:
            entries.append((EventType.TRIAL_FINISHED, self._trial_figures(first.trial_index)))
            if first.trial_index + 1 < len(self._trials):
                entries.append(self._started(first.trial_index + 1))
        return entries

    def _started(self, trial_index: int) -> Entry:
        return EventType.TRIAL_STARTED, self._name(trial_index)

    def _trial_figures(self, trial_index: int) -> dict[str, Any]:
        steps, self._finished = self._finished, []
        counts = ("diverged_elements", "predicted_elements", "compared_elements")
        return {
            **self._name(trial_index),
            **{name: sum(figures[name] for figures in steps) for name in counts},
            "max_abs_error": largest(figures["max_abs_error"] for figures in steps),
            "tied_max_abs": largest(figures["tied_max_abs"] for figures in steps),
            "seconds": sum(figures["seconds"] for figures in steps),
        }

    def _name(self, trial_index: int) -> dict[str, Any]:
        trial = self._trials[trial_index]
        return {
            "trial_index": trial_index,
            "probe": trial.probe,
            "ordering": trial.ordering,
            "repeat": trial.repeat,
        }


def step_figures(reports: Sequence[StepReport]) -> dict[str, Any]:
    """One step over all ranks: counts are sums over both ends, errors the largest, seconds the slowest rank's."""
    rows = [row for report in reports for row in report.divergence]
    return {
        "diverged_elements": sum(row.diverged_elements for row in rows),
        "predicted_elements": sum(row.predicted_elements for row in rows),
        "compared_elements": sum(row.owned_elements for row in rows),
        "max_abs_error": largest(row.max_abs_error for row in rows),
        "tied_max_abs": largest(report.tied.max_abs_difference for report in reports if report.tied),
        "seconds": max(sum(report.seconds.values()) for report in reports),
    }


def largest(values: Iterable[float | None]) -> float | None:
    """The largest value; NaN if any is, since a maximum that drops it would hide a fault; None of none."""
    present = [value for value in values if value is not None]
    if any(math.isnan(value) for value in present):
        return math.nan
    return max(present, default=None)


def told_repeating(message: Repeating) -> dict[str, Any]:
    """The event of a repeat that begins: what failed, whom it points to, and on which node each rank will be."""
    return {"trials": message.trials, "suspects": message.suspects, "nodes": message.nodes}


def told_repeated(repeated: Repeated) -> dict[str, Any]:
    """The event of a repeat that has ended: what the fault follows, and where each rank was."""
    return {
        **plain(repeated.attribution),
        "seats": repeated.seats,
        "reasons": repeated.reasons,
        "seconds": repeated.seconds,
    }


def cause_reason(attribution: Attribution) -> Reason:
    """What a failed verdict says of its cause."""
    world_rank = attribution.world_ranks[0] if len(attribution.world_ranks) == 1 else None
    message = f"{attribution.message[:1].upper()}{attribution.message[1:]}."
    return Reason(f"cause_{attribution.cause.value}", message, world_rank=world_rank, node=attribution.node)
