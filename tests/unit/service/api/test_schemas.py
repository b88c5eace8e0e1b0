import pytest

from service.api.schemas import MeshRequest, ValidateRequest
from workers.contract import BatchSpec, ModelSpec, OrderingName
from workers.plan import ExperimentSpec, resolve


def ask(text: str) -> ValidateRequest:
    return ValidateRequest.model_validate_json(text)


def test_the_default_request_is_the_default_experiment():
    assert ask("{}").spec() == resolve(ExperimentSpec())


def test_every_field_reaches_the_experiment():
    spec = ask(
        """{"mesh": {"dp": 3, "pp": 4}, "model": {"hidden_size": 48}, "batch": {"num_microbatches": 9}, "overlap": true,
        "bucket_size": 5, "probes": ["gpt"], "orderings": ["all_reduce"], "steps": 7, "repeats": 5, "dtype": "bfloat16",
        "device": "cuda", "seed": 11, "drill": {"fault": "kill_in_collective", "world_rank": 2, "step": 1}}"""
    ).spec()
    assert (spec.mesh.dp, spec.mesh.pp, spec.steps, spec.repeats, spec.seed) == (3, 4, 7, 5, 11)
    assert spec.model == ModelSpec(vocab_size=64, hidden_size=48, num_layers=4, num_heads=4, seq_len=16)
    assert spec.batch == BatchSpec(micro_batch_size=1, num_microbatches=9)
    assert spec.orderings == (OrderingName.ALL_REDUCE,)
    assert (spec.overlap, spec.bucket_size, spec.dtype, spec.device) == (True, 5, "bfloat16", "cuda")
    assert spec.drill is not None
    assert (spec.drill.fault, spec.drill.world_rank, spec.drill.step) == ("kill_in_collective", 2, 1)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("null", {"micro_batch_size": 1, "num_microbatches": 5}),
        ('{"micro_batch_size": 3}', {"micro_batch_size": 3, "num_microbatches": 5}),
        ('{"num_microbatches": 8}', {"micro_batch_size": 1, "num_microbatches": 8}),
    ],
)
def test_what_is_stored_has_the_batch_that_will_run(batch, expected):
    asked = ask('{"mesh": {"pp": 5}, "model": {"num_layers": 5}, "batch": ' + batch + "}")
    assert asked.stored(asked.spec())["batch"] == expected


def test_what_is_stored_can_be_asked_for_again():
    asked = ask('{"model": {"num_layers": 8}, "labels": {"a": "b"}, "drill": {"fault": "raise_in_collective"}}')
    stored = asked.stored(asked.spec())
    again = ValidateRequest.model_validate(stored, strict=False)
    assert again.stored(again.spec()) == stored


def test_defaults_are_not_shared_between_requests():
    first, second = ask("{}"), ask("{}")
    assert first.probes is not second.probes
    assert first.mesh == MeshRequest()
