"""Reading validations: one, many, their rows; cancelling them."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest

from service.api.documents import (
    DetailedValidation,
    RankPage,
    RankRow,
    TracePage,
    TraceRow,
    ValidationPage,
)
from service.domain.validation import new_validation_id
from service.domain.weeks import Week
from service.storage.tables import removed_weeks

CONTRACT_TRIAL = {
    "probe",
    "ordering",
    "role",
    "predicted_diverged_elements",
    "diverged_elements",
    "tied_max_abs",
    "reference_max_abs",
    "grad_norm",
    "grad_norm_max_error",
    "ok",
}


async def create(api, **request) -> str:
    return str((await api.post("/validate", json=request)).json()["id"])


async def test_a_completed_validation_has_verdict_trials_and_non_finite_numbers(api, dispatcher):
    validation_id = await create(api)
    await dispatcher.complete(await dispatcher.start(validation_id))
    body = (await api.get(f"/validations/{validation_id}")).json()
    DetailedValidation.model_validate(body)
    assert (body["state"], body["verdict"], body["attempt"]) == ("completed", "pass", 1)
    nowhere = dict.fromkeys(("judge", "world_rank", "node", "phase", "parameter", "element"))
    assert body["reasons"] == [{"code": "clean", "message": "every subject is clean"} | nowhere]
    assert body["observations"] == [{"code": "straggler", "message": "world_rank 1 held its peers up", "world_rank": 1}]
    (tested,) = body["collectives"]
    assert (tested["group"], tested["primitive"], tested["op"]) == ("dp", "reduce_scatter", "sum")
    assert (tested["num_elements"], tested["size_bytes"], tested["seconds"]) == ([1, 129], 1040, 0.1 + 0.2)
    assert all(set(trial) == CONTRACT_TRIAL for trial in body["trials"])
    control, subject = body["trials"]
    assert (control["tied_max_abs"], control["reference_max_abs"]) == ("Infinity", "NaN")
    assert (subject["ordering"], subject["role"], subject["reference_max_abs"]) == ("fixed", "subject", None)
    assert (control["grad_norm"], control["grad_norm_max_error"]) == (7969.489067688091, "Infinity")
    assert body["fingerprint"] == [{"node": "n0"}]
    assert body["finished_at"] > body["started_at"] > body["created_at"]
    (held,) = body["attempts"]
    assert (held["attempt"], held["outcome"]) == (1, "completed")
    assert body["created_at"] < held["claimed_at"] < held["ended_at"]


async def test_a_failed_validation_has_an_error_with_its_place_and_no_verdict(api, dispatcher):
    validation_id = await create(api)
    await dispatcher.fail(await dispatcher.start(validation_id))
    body = (await api.get(f"/validations/{validation_id}")).json()
    DetailedValidation.model_validate(body)
    assert (body["state"], body["verdict"]) == ("failed", None)
    assert body["error"] == {
        "code": "rank_died",
        "message": "rank 3 died",
        "world_rank": 3,
        "node": "n1",
        "phase": "dp_sync",
    }


@pytest.mark.parametrize("path", ["", "/ranks", "/trace", "/events"])
@pytest.mark.parametrize("validation_id", [new_validation_id(), "val_x", "val_%00", "%F0%9F%98%80"])
async def test_an_unknown_id_is_404(api, path, validation_id):
    response = await api.get(f"/validations/{validation_id}{path}")
    assert (response.status_code, response.json()["code"]) == (404, "validation_not_found")


async def test_an_etag_saves_the_body_until_something_changes(api, dispatcher):
    validation_id = await create(api)
    path = f"/validations/{validation_id}"
    etag = (await api.get(path)).headers["etag"]
    assert etag.startswith('"')
    for given in (etag, f'"other", {etag}', "*"):
        response = await api.get(path, headers={"If-None-Match": given})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    await dispatcher.claim(validation_id)
    changed = await api.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag


async def test_lists_are_filtered(api, dispatcher):
    labels = {"team": "red", "x": "=&"}
    done = await create(api, cluster="lists", labels=labels)
    await dispatcher.complete(await dispatcher.start(done, "lists"))
    waiting = await create(api, cluster="lists", labels={"team": "red"})
    drill = await create(api, cluster="lists", drill={"fault": "raise_in_collective"})

    async def listed(**parameters) -> list[str]:
        response = await api.get("/validations", params={"cluster": "lists", **parameters})
        assert response.status_code == 200, response.text
        ValidationPage.model_validate(response.json())
        return [item["id"] for item in response.json()["items"]]

    assert await listed() == [drill, waiting, done]
    assert await listed(state="queued") == [drill, waiting]
    assert await listed(verdict="pass") == [done]
    assert await listed(verdict="fail") == []
    assert await listed(label="team=red") == [waiting, done]
    assert await listed(label=["team=red", "x==&"]) == [done]
    assert await listed(drill="true") == [drill]


async def test_pages_follow_each_other_and_new_validations_do_not_shift_them(api):
    ids = [await create(api, cluster="pages") for _ in range(5)]
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        parameters = {"cluster": "pages", "limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await api.get("/validations", params=parameters)).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        await create(api, cluster="pages")
    assert seen == ids[::-1]
    assert cursor is None


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"limit": "0"}, "query.limit"),
        ({"limit": "201"}, "query.limit"),
        ({"limit": "x"}, "query.limit"),
        ({"state": "done"}, "query.state"),
        ({"verdict": "maybe"}, "query.verdict"),
        ({"stat": "queued"}, "query.stat"),
        ({"cursor": "abc"}, "query.cursor"),
        ({"cursor": "\0"}, "query.cursor"),
        ({"label": "team"}, "query.label"),
        ({"label": "te\0am=x"}, "query.label"),
        ({"cluster": "a\0"}, "query.cluster"),
    ],
)
async def test_a_bad_filter_is_a_422_and_never_ignored(api, parameters, field):
    response = await api.get("/validations", params=parameters)
    assert response.status_code == 422, response.text
    assert response.json()["errors"][0]["field"] == field


async def test_rank_rows_page_through_in_json(api, dispatcher):
    validation_id = await create(api)
    path = f"/validations/{validation_id}/ranks"
    assert (await api.get(path)).json() == {"items": [], "next_cursor": None}
    await dispatcher.complete(await dispatcher.start(validation_id), num_ranks=3)
    first = await api.get(path, params={"step": 1, "limit": 4})
    RankPage.model_validate(first.json())
    cursor = first.json()["next_cursor"]
    assert first.headers["link"] == f'<{path}?step=1&limit=4&cursor={cursor}>; rel="next"'
    second = await api.get(first.headers["link"].split(">")[0][1:])
    assert second.json()["next_cursor"] is None
    rows = first.json()["items"] + second.json()["items"]
    assert [(row["world_rank"], row["end"]) for row in rows] == [
        (world_rank, end) for world_rank in range(3) for end in ("lm_head", "wte")
    ]
    row = rows[0]
    assert row["max_abs_error"] == 0.1 + 0.2, "every bit survives"
    assert (row["relative_l2_error"], row["ratio_to_expected"], row["sum"]) == ("Infinity", "NaN", "-Infinity")
    (deviation,) = row["deviations"]
    assert deviation["contributors"] == [{"end": "lm_head", "dp_rank": 0, "world_rank": 2}]
    assert (deviation["kind"], deviation["num_elements"], deviation["uncertainty"]) == ("dropped", 512, "NaN")
    assert (row["tied_unequal_elements"], rows[2]["tied_unequal_elements"]) == (3, None)
    norms = [(row["grad_norm"], row["grad_norm_reference"], row["grad_norm_allowed_error"]) for row in rows[1:3]]
    assert norms == [("NaN", 2.0, 1e-9), (2.0, None, None)]
    assert row["compute_seconds"] == {"forward_backward": 0.1 + 0.2}


async def test_rank_rows_as_csv_are_the_same_rows(api, dispatcher):
    validation_id = await create(api)
    await dispatcher.complete(await dispatcher.start(validation_id))
    path = f"/validations/{validation_id}/ranks"
    response = await api.get(path, headers={"Accept": "text/csv"}, params={"limit": 5})
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    assert 'rel="next"' in response.headers["link"]
    rows = list(csv.DictReader(io.StringIO(response.text)))
    json_page = await api.get(path, params={"limit": 5})
    assert list(rows[0]) == list(RankRow.model_fields) == list(json_page.json()["items"][0])
    assert len(rows) == 5
    for row, item in zip(rows, json_page.json()["items"], strict=True):
        assert row["digest"] == item["digest"]
        assert float(row["max_abs_error"]) == item["max_abs_error"]
        assert math.isnan(float(row["ratio_to_expected"]))
        assert row["reference_max_abs_error"] == ""
        assert json.loads(row["compute_seconds"]) == item["compute_seconds"]
        assert json.loads(row["deviations"]) == item["deviations"]
    assert json_page.headers["etag"] != response.headers["etag"]
    assert json_page.headers["vary"] == "Accept"


async def test_trace_rows(api, dispatcher):
    validation_id = await create(api)
    await dispatcher.complete(await dispatcher.start(validation_id))
    response = await api.get(f"/validations/{validation_id}/trace", params={"step": 0})
    TracePage.model_validate(response.json())
    items = response.json()["items"]
    assert [(item["phase"], item["world_rank"]) for item in items] == [
        ("local", 0),
        ("local", 1),
        ("final", 0),
        ("final", 1),
    ]
    assert set(items[0]) == set(TraceRow.model_fields)
    for parameters in ({"probe": "gpt"}, {"ordering": "fixed"}, {"step": 9}):
        filtered = await api.get(f"/validations/{validation_id}/trace", params=parameters)
        assert filtered.json()["items"] == []


async def test_a_cursor_of_one_listing_is_refused_by_another(api, dispatcher):
    validation_id = await create(api)
    await dispatcher.complete(await dispatcher.start(validation_id))
    cursor = (await api.get(f"/validations/{validation_id}/ranks", params={"limit": 1})).json()["next_cursor"]
    response = await api.get(f"/validations/{validation_id}/trace", params={"cursor": cursor})
    assert response.json()["errors"][0]["field"] == "query.cursor"


async def test_rows_of_another_type_are_406(api):
    validation_id = await create(api)
    for path in ("/ranks", "/trace", "", "/events"):
        response = await api.get(f"/validations/{validation_id}{path}", headers={"Accept": "image/png"})
        assert (response.status_code, response.json()["code"]) == (406, "not_acceptable")


async def test_cancelling_is_idempotent_and_waits_for_the_gang(api, dispatcher):
    waiting = await create(api, cluster="cancelled")
    for _ in range(2):
        response = await api.post(f"/validations/{waiting}/cancel")
        assert (response.status_code, response.json()["state"]) == (200, "cancelled")
    running = await create(api, cluster="cancelled")
    claim = await dispatcher.start(running, "cancelled")
    asked = [(await api.post(f"/validations/{running}/cancel")) for _ in range(2)]
    assert [response.status_code for response in asked] == [202, 202]
    assert asked[0].json()["cancel_requested_at"] == asked[1].json()["cancel_requested_at"] is not None
    assert asked[1].json()["state"] == "running"
    await dispatcher.cancel(claim)
    final = await api.post(f"/validations/{running}/cancel")
    assert (final.status_code, final.json()["state"]) == (200, "cancelled")
    assert (await api.post(f"/validations/{new_validation_id()}/cancel")).status_code == 404


async def test_details_that_retention_removed_are_gone_with_the_date_and_the_setting(api, dispatcher, database):
    validation_id = await create(api)
    await dispatcher.complete(await dispatcher.start(validation_id))
    assert (await api.get(f"/validations/{validation_id}")).json()["details_removed_at"] is None
    week = Week.of_validation(validation_id)
    mark = {"first_id": week.first_id, "end_id": week.end_id, "retention_days": 90}
    async with database.transaction() as connection:
        await connection.execute(removed_weeks.insert().values(mark))
    try:
        for path in ("ranks", "trace", "events"):
            response = await api.get(f"/validations/{validation_id}/{path}")
            assert (response.status_code, response.json()["code"]) == (410, "details_expired")
            assert response.json()["retention_days"] == 90
            assert "GRADGATE_RETENTION_DAYS was 90" in response.json()["detail"]
        seen = {"Last-Event-ID": "4"}
        assert (await api.get(f"/validations/{validation_id}/events", headers=seen)).status_code == 204
        body = (await api.get(f"/validations/{validation_id}")).json()
        DetailedValidation.model_validate(body)
        assert body["details_removed_at"] == response.json()["removed_at"]
        assert (body["verdict"], len(body["trials"]), len(body["reasons"])) == ("pass", 2, 1)
        assert (await api.get(f"/validations/{new_validation_id()}/ranks")).status_code == 404
    finally:
        async with database.transaction() as connection:
            await connection.execute(removed_weeks.delete())
