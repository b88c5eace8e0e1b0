"""A stored request becomes the order that was meant."""

from __future__ import annotations

import pytest

from service.api.schemas import ValidateRequest
from service.execution.messages import Placement, WorkKey
from service.execution.order import to_experiment, to_start
from workers.contract import BatchSpec, Device, Drill, Launcher, Mesh, ModelSpec, OrderingName
from workers.plan import ExperimentSpec

KEY = WorkKey("val_1", 2)


def test_the_empty_request_is_the_default_experiment() -> None:
    start = to_start(KEY, {}, 60)
    assert start.spec == ExperimentSpec()
    assert (start.launcher, start.placement, start.remaining_s) == (Launcher.POOL, Placement(), 60)


def test_what_the_api_stores_is_what_runs() -> None:
    stored = ValidateRequest().model_dump(mode="json")
    assert to_experiment(stored) == ExperimentSpec()


def test_every_field_arrives() -> None:
    request = {
        "mesh": {"dp": 3, "pp": 1, "tp": 1, "vpp": 1},
        "model": {"vocab_size": 10, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "seq_len": 4},
        "batch": {"micro_batch_size": 2, "num_microbatches": 3},
        "orderings": ["fixed"],
        "schedule": "gpipe",
        "overlap": True,
        "bucket_size": 700,
        "average_in_collective": True,
        "normalization": "num_tokens",
        "steps": 7,
        "device": "cpu",
        "seed": 5,
        "drill": {"fault": "kill_in_collective", "node": "a", "step": 3, "probability": 0.25},
        "launcher": "ray_train",
        "placement": {"nodes": 2, "exclude": ["z", "a"], "strategy": "SPREAD", "devices_per_node": 1},
    }
    start = to_start(KEY, request, 60)
    spec = start.spec
    assert spec.mesh == Mesh(3, 1)
    assert spec.model == ModelSpec(10, 8, 1, 2, 4)
    assert spec.batch == BatchSpec(2, 3)
    assert spec.orderings == (OrderingName.FIXED,)
    assert (spec.schedule, spec.overlap, spec.bucket_size, spec.average_in_collective) == ("gpipe", True, 700, True)
    assert spec.normalization == "num_tokens"
    assert (spec.steps, spec.device, spec.seed) == (7, Device.CPU, 5)
    assert spec.drill == Drill("kill_in_collective", step=3, node="a", probability=0.25)
    assert start.launcher is Launcher.RAY_TRAIN
    assert start.placement == Placement(2, ("a", "z"), "SPREAD", 1)


@pytest.mark.parametrize("request_", [{"mesh": {"dq": 1}}, {"device": "tpu"}, {"model": {"vocab_size": 1}}])
def test_a_request_of_another_version_is_refused(request_: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        to_start(KEY, request_, 60)
