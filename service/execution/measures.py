"""What a dispatcher counts, for Prometheus: attempts and how they ended, how long their phases took, gangs, leases.

Listens only where `GRADGATE_METRICS_PORT` is set. Counters begin at 0 with the process. No label holds an id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

PHASES = {
    "queued": "queued_s",
    "reserve": "reserve_s",
    "form": "form_s",
    "run": "run_s",
    "repeat": "repeat_s",
    "judge": "judge_s",
}
"""A phase's label and its key among a validation's timings."""
_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Measures:
    """The counters of one dispatcher process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leading = Gauge(
            "gradgate_dispatcher_leading", "Whether this dispatcher leads its cluster.", registry=self.registry
        )
        self.attempts_running = Gauge(
            "gradgate_attempts_running", "Attempts that this dispatcher holds.", registry=self.registry
        )
        self.gangs_idle = Gauge("gradgate_gangs_idle", "Warm gangs that wait for work.", registry=self.registry)
        self.leases_lost = Counter(
            "gradgate_leases_lost_total", "Attempts that turned out to be somebody else's.", registry=self.registry
        )
        self.leases_lapsed = Counter(
            "gradgate_leases_lapsed_total",
            "Attempts requeued since their dispatcher fell silent.",
            registry=self.registry,
        )
        self.driver_deaths = Counter(
            "gradgate_driver_deaths_total", "Driver processes that died or hung.", registry=self.registry
        )
        self.leaks = Counter(
            "gradgate_leaks_total",
            "Gangs that did not go away within their teardown's bound.",
            registry=self.registry,
        )
        self._attempts = Counter(
            "gradgate_attempts_total",
            "Attempts written down, by how they ended and, where completed, their verdict.",
            ("outcome", "verdict"),
            registry=self.registry,
        )
        self._phase_s = Histogram(
            "gradgate_phase_duration_seconds",
            "How long each phase of an attempt took.",
            ("phase",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def ended(self, outcome: str, verdict: str | None, timings: Mapping[str, Any]) -> None:
        """Take down one attempt whose end is stored; `timings` as the validation keeps them, in seconds."""
        self._attempts.labels(outcome, verdict or "").inc()
        for phase, key in PHASES.items():
            if isinstance(seconds := timings.get(key), int | float):
                self._phase_s.labels(phase).observe(seconds)

    def expose(self, host: str, port: int) -> None:
        """Answer scrapes at http://host:port/metrics from a thread of its own. Raises OSError where it is taken."""
        start_http_server(port, host, self.registry)
