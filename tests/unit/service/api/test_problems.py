import json

import pytest

from service import telemetry
from service.api.problems import INVALID_REQUEST, KINDS, FieldError, Problem, echo, field_path, invalid, respond


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ((), ""),
        (("mesh", "dp"), "mesh.dp"),
        (("orderings", 1), "orderings[1]"),
        (("labels", "a.b"), 'labels["a.b"]'),
        (("header", "Idempotency-Key"), "header.Idempotency-Key"),
    ],
)
def test_a_field_path_reads_like_code(parts, path):
    assert field_path(parts) == path


def test_codes_are_unique_and_all_have_an_example():
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert all(kind.example and 400 <= kind.status < 600 for kind in KINDS)


def test_a_problem_document_has_the_members_of_the_rfc_and_ours():
    token = telemetry.request_id.set("r-1")
    try:
        error = FieldError("mesh.dp", float("nan"), "must be finite", "send a number")
        response = respond(invalid([error, error]), "/validate")
    finally:
        telemetry.request_id.reset(token)
    assert response.media_type == "application/problem+json"
    assert json.loads(bytes(response.body)) == {
        "type": "urn:gradgate:problem:invalid_request",
        "title": INVALID_REQUEST.title,
        "status": 422,
        "detail": "mesh.dp: must be finite; send a number (and 1 more)",
        "instance": "/validate",
        "code": "invalid_request",
        "request_id": "r-1",
        "errors": [{"field": "mesh.dp", "value": "NaN", "rule": "must be finite", "remedy": "send a number"}] * 2,
    }


def test_extra_members_and_headers_are_kept():
    response = respond(Problem(INVALID_REQUEST, "x", extra={"needs": 3}, headers={"Retry-After": "2"}), "/")
    assert json.loads(bytes(response.body))["needs"] == 3
    assert response.headers["retry-after"] == "2"


def test_what_was_given_comes_back_short():
    assert echo("x" * 5000) == "x" * 200 + "..."
    assert echo([1] * 5000).endswith("...")
    assert echo(1 << 4000) == "an integer of 4001 bits"
    assert echo(True) is True
    assert echo(12) == 12
