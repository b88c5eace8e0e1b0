"""GET /metrics: what a Prometheus server asks this process for.

HTTP requests are counted here, in the process; the queue, verdicts and clusters are read from the database at each
scrape, so that every replica of the server says the same of them. What only a dispatcher knows (durations of phases,
gangs, leases) it exposes itself: `service.execution.measures`. No label holds an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import Scope

from service.api.access import Reader
from service.api.dependencies import ServicesDep
from service.api.openapi import protected
from service.storage.overview import Overview, survey

UNKNOWN_ROUTE = "(none)"
"""The label of what no route takes: paths of strangers must not become labels."""

router = APIRouter(tags=["operations"])


class HttpMetrics:
    """What one process counts of its requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "gradgate_http_requests_total",
            "Requests answered, by route and status; 499: the client left first.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._duration_s = Histogram(
            "gradgate_http_request_duration_seconds",
            "From the request's start to the end of its answer; waits and event streams included.",
            ("route",),
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "gradgate_http_requests_in_flight", "Requests being answered, waits and event streams included.",
            registry=self.registry,
        )  # fmt: skip

    def count(self, scope: Scope, status: int, duration_s: float) -> None:
        """Take down one request that has ended."""
        route = route_of(scope)
        self._requests.labels(scope["method"], route, str(status)).inc()
        self._duration_s.labels(route).observe(duration_s)


def route_of(scope: Scope) -> str:
    """The pattern of the path that was asked for, once the request was routed."""
    return getattr(scope.get("route"), "path", UNKNOWN_ROUTE)


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="What Prometheus scrapes",
    response_class=Response,
    responses={200: {"description": "Text of the Prometheus format.", "content": {"text/plain": {}}}, **protected()},
)
async def get_metrics(request: Request, services: ServicesDep, principal: Reader) -> Response:
    """Of clusters only those within the key's reach. Without a database it is 503, and counters go on meanwhile."""
    async with services.database.read() as connection:
        overview = (await survey(connection)).only(principal.clusters)
    metrics: HttpMetrics = request.app.state.metrics
    counted, stored = generate_latest(metrics.registry), generate_latest(_Stored(overview))
    return Response(counted + stored, media_type=CONTENT_TYPE_LATEST)


class _Stored(Collector):
    """One scrape's view of the database, as metrics."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        counts, queues, clusters = self._overview.counts, self._overview.queues, self._overview.clusters
        yield _gauge(
            "validations",
            "Validations stored, by state and, where completed, verdict.",
            ["cluster", "state", "verdict"],
            [((row.cluster, row.state, row.verdict or ""), row.count) for row in counts],
        )
        yield _gauge(
            "queue_depth", "Validations that wait to start.", ["cluster"], [((q.cluster,), q.depth) for q in queues]
        )
        yield _gauge(
            "queue_oldest_age_seconds",
            "How long the oldest of them has waited.",
            ["cluster"],
            [((q.cluster,), q.oldest_age_s) for q in queues],
        )
        yield _gauge(
            "cluster_report_age_seconds",
            "Since a dispatcher last reported the cluster's capacity.",
            ["cluster"],
            [((c.cluster,), c.report_age_s) for c in clusters],
        )
        yield _gauge("cluster_nodes", "Nodes in that report.", ["cluster"], [((c.cluster,), c.nodes) for c in clusters])
        yield _gauge("cluster_gpus", "GPUs in that report.", ["cluster"], [((c.cluster,), c.gpus) for c in clusters])


def _gauge(name: str, help_text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"gradgate_{name}", help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family
