import pytest
from fastapi import Request

from service.api.dependencies import accepted, idempotency_key, known_id, preferred_wait_s
from service.api.problems import Problem
from service.domain.validation import new_validation_id


def request(*headers: tuple[str, str]) -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


@pytest.mark.parametrize(
    ("values", "wait_s"),
    [
        (("wait=10",), 10.0),
        (("wait=0",), 0.0),
        (('Wait = "7"',), 7.0),
        (("respond-async, wait=5",), 5.0),
        (("return=minimal", "wait=3; x=y"), 3.0),
        ((), None),
        (("respond-async",), None),
        (("wait",), None),
        (("wait=-1",), None),
        (("wait=1.5",), None),
        (("wait=NaN",), None),
        (("wait=99999999999999999999",), None),
    ],
)
def test_prefer_wait_is_read_and_anything_else_is_ignored(values, wait_s):
    assert preferred_wait_s(request(*(("Prefer", value) for value in values))) == wait_s


@pytest.mark.parametrize(("given", "key"), [("abc", "abc"), ('"abc"', "abc"), ("a b", "a b"), ('"', '"')])
def test_an_idempotency_key_may_be_quoted(given, key):
    assert idempotency_key(request(("Idempotency-Key", given))) == key
    assert idempotency_key(request()) is None


@pytest.mark.parametrize("given", ["", '""', "x" * 256, "sn\u00f6"])
def test_an_unusable_idempotency_key_is_a_field_error(given):
    with pytest.raises(Problem) as caught:
        idempotency_key(request(("Idempotency-Key", given)))
    assert caught.value.errors[0].field == "header.Idempotency-Key"


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("text/csv", "text/csv"),
        ("text/*", "text/csv"),
        ("text/csv;q=0.5, application/json;q=0.4", "text/csv"),
        ("text/csv;q=0.5, */*", "application/json"),
        ("application/json;q=0, */*", "text/csv"),
        ("TEXT/CSV", "text/csv"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "application/json"),
    ],
)
def test_accept_chooses_the_representation(accept, chosen):
    headers = () if accept is None else (("Accept", accept),)
    assert accepted(request(*headers), ("application/json", "text/csv")) == chosen


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0, text/csv;q=0"])
def test_a_representation_that_does_not_exist_is_406(accept):
    with pytest.raises(Problem) as caught:
        accepted(request(("Accept", accept)), ("application/json", "text/csv"))
    assert caught.value.kind.status == 406


def test_an_id_of_another_shape_is_not_found():
    fresh = new_validation_id()
    assert known_id(fresh) == fresh
    for text in ("val_", fresh + "0", fresh.upper(), "val_" + "u" * 26, "../x", fresh[:-1] + "\0"):
        with pytest.raises(Problem) as caught:
            known_id(text)
        assert caught.value.kind.status == 404
