"""GET /orderings and POST /predict."""

from __future__ import annotations

import time

import pytest

from service.api.orderings import OrderingCatalogue
from service.api.predict import PredictionDocument
from workers.contract import OrderingName
from workers.public_models import MODELS


async def predict(api, **request):
    response = await api.post("/predict", json=request)
    assert response.status_code == 200, response.text
    PredictionDocument.model_validate(response.json())
    return response.json()


async def test_the_catalogue_lists_every_ordering(api):
    body = (await api.get("/orderings")).json()
    OrderingCatalogue.model_validate(body)
    assert [item["name"] for item in body["items"]] == list(OrderingName)
    assert body["items"][0]["phases"] == ["dp_reduce_scatter", "tie_all_reduce"]


async def test_the_default_prediction_is_the_reported_bug(api):
    body = await predict(api)
    assert (body["ordering"], body["layout"], body["version"]) == ("buggy", "de4028a", None)
    assert (body["num_elements"], body["misowned_elements"], body["fraction"]) == (2048, 2048, 1.0)
    assert (body["num_ranges"], body["ranges"]) == (1, [{"start": 0, "stop": 2048}])
    assert sum(owner["misowned_elements"] for owner in body["ends"]["wte"]["owners"]) == 2048
    assert sum(owner["misowned_elements"] for owner in body["ends"]["lm_head"]["owners"]) == 2048


@pytest.mark.parametrize("ordering", ["fixed", "own_bucket", "all_reduce"])
async def test_right_orderings_get_nothing_wrong(api, ordering):
    body = await predict(api, ordering=ordering, mesh={"dp": 8, "pp": 4}, model="gpt3-175b")
    assert (body["misowned_elements"], body["ranges"], body["ends"]["wte"]["owners"]) == (0, [], [])


@pytest.mark.parametrize(
    ("version", "dp", "seq_len", "misowned"),
    [
        ("0650d83", 2, 16, 128),
        ("v0.8", 2, 17, 128),
        ("v0.12", 2, 17, 128),
        ("0.12.1", 4, 17, 256),
        ("core_v0.12.0", 3, 17, 0),
        ("v0.13", 2, 17, 0),
    ],
)
async def test_versions_differ_as_they_did_in_the_real_library(api, version, dp, seq_len, misowned):
    body = await predict(api, version=version, mesh={"dp": dp}, model={"seq_len": seq_len})
    assert (body["version"], body["ordering"], body["misowned_elements"]) == (version, None, misowned)
    assert body["num_ranges"] == len(body["ranges"])
    assert sum(part["stop"] - part["start"] for part in body["ranges"]) == misowned


async def test_overlap_breaks_the_reporter_s_fix_and_what_lies_in_padding(api):
    fixed = await predict(api, ordering="fixed", overlap=True)
    assert (fixed["misowned_elements"], fixed["early_elements"], fixed["wrong_elements"]) == (2048, 0, 2048)
    padded = await predict(api, version="0650d83", overlap=True)
    assert (padded["overlap"], padded["early_elements"], padded["wrong_elements"]) == (True, 64, 128)


async def test_chunks_have_buffers_of_their_own_and_so_other_wrong_elements(api):
    whole, halved = [await predict(api, model="gpt2", mesh={"dp": 2, "pp": 2, "vpp": vpp}) for vpp in (1, 2)]
    assert halved["mesh"]["vpp"] == 2
    assert 0 < halved["misowned_elements"] != whole["misowned_elements"] > 0


async def test_a_version_that_would_stop_says_so(api):
    body = await predict(api, version="v0.8", mesh={"dp": 1023, "pp": 16}, model="gpt3-175b")
    assert "not a multiple of dp 1023" in body["asserts"]
    assert body["misowned_elements"] == 0


async def test_ranges_are_capped_and_counted(api):
    body = await predict(api, version="v0.12", mesh={"dp": 4}, model={"seq_len": 17}, max_ranges=1)
    assert body["num_ranges"] == 4
    assert len(body["ranges"]) == 1


async def test_the_largest_mesh_of_the_largest_model_is_quick(api):
    started_s = time.perf_counter()
    body = await predict(api, model="gpt3-175b", mesh={"dp": 1024, "pp": 96})
    assert time.perf_counter() - started_s < 2.0
    assert body["fraction"] == 1.0
    assert body["model"]["hidden_size"] == 12288


async def test_every_known_model_can_be_named(api):
    for name in MODELS:
        assert (await predict(api, model=name))["model"]["name"] == name


@pytest.mark.parametrize(
    ("request_body", "field"),
    [
        ({"ordering": "buggy", "version": "v0.8"}, "version"),
        ({"version": "v0.1"}, "version"),
        ({"version": "\u00e9"}, "version"),
        ({"ordering": "best"}, "ordering"),
        ({"ordering": "mean_of_means"}, "ordering"),
        ({"model": "gpt-17"}, "model"),
        ({"model": {"vocab_size": 0}}, "model.vocab_size"),
        ({"model": {"num_layers": 10**30}}, "model.num_layers"),
        ({"mesh": {"dp": 0}}, "mesh.dp"),
        ({"mesh": {"dp": 10**9}}, "mesh.dp"),
        ({"ordering": "layernorm_skipped", "mesh": {"tp": 2}}, "ordering"),
        ({"mesh": {"tp": 0}}, "mesh.tp"),
        ({"mesh": {"tp": 3}}, "mesh.tp"),
        ({"mesh": {"vpp": 65}}, "mesh.vpp"),
        ({"bucket_size": 8000}, "bucket_size"),
        ({"overlap": True, "bucket_size": 0}, "bucket_size"),
        ({"mesh": {"pp": 1, "vpp": 2}}, "mesh.vpp"),
        ({"max_ranges": 10**6}, "max_ranges"),
        ({"dp": 2}, "dp"),
    ],
)
async def test_bad_questions_are_422(api, request_body, field):
    response = await api.post("/predict", json=request_body)
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]
