"""From a stored request to an order for the driver. The API has checked every field; this only builds.

Pure: no I/O. Must not import the API's schemas (layers point down).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.execution.messages import Placement, Start, WorkKey
from workers.contract import (
    BatchSpec,
    Device,
    Drill,
    Dtype,
    Launcher,
    Mesh,
    ModelSpec,
    Normalization,
    OrderingName,
    ProbeName,
    Schedule,
)
from workers.plan import ExperimentSpec


def to_start(key: WorkKey, request: Mapping[str, Any], remaining_s: float) -> Start:
    """The driver's order for one attempt. Raises KeyError, TypeError or ValueError for a request of another version."""
    launcher = Launcher(request.get("launcher", Launcher.POOL))
    return Start(key, to_experiment(request), to_placement(request.get("placement") or {}), launcher, remaining_s)


def to_experiment(request: Mapping[str, Any]) -> ExperimentSpec:
    """The experiment in a stored request, whose defaults are filled in."""
    default = ExperimentSpec()
    model, batch, drill = request.get("model", default.model), request.get("batch"), request.get("drill")
    return ExperimentSpec(
        mesh=Mesh(**request.get("mesh", {})),
        model=model if isinstance(model, str) else ModelSpec(**model),
        batch=BatchSpec(**batch) if batch else None,
        schedule=Schedule(request.get("schedule", default.schedule)),
        overlap=request.get("overlap", default.overlap),
        bucket_size=request.get("bucket_size"),
        average_in_collective=request.get("average_in_collective", default.average_in_collective),
        normalization=Normalization(request.get("normalization", default.normalization)),
        probes=tuple(ProbeName(name) for name in request.get("probes", default.probes)),
        orderings=tuple(OrderingName(name) for name in request.get("orderings", default.orderings)),
        steps=request.get("steps", default.steps),
        repeats=request.get("repeats", default.repeats),
        dtype=Dtype(request.get("dtype", default.dtype)),
        grad_reduce_dtype=Dtype(request.get("grad_reduce_dtype", default.grad_reduce_dtype)),
        device=Device(request.get("device", default.device)),
        seed=request.get("seed", default.seed),
        drill=Drill(**drill) if drill else None,
        stack=request.get("stack", default.stack),
    )


def to_placement(placement: Mapping[str, Any]) -> Placement:
    """Where ranks may go."""
    return Placement(
        num_nodes=placement.get("nodes"),
        exclude=tuple(sorted(placement.get("exclude") or ())),
        strategy=placement.get("strategy", "PACK"),
        devices_per_node=placement.get("devices_per_node"),
    )
