import pytest

from service.api.bodies import MAX_BODY_BYTES, parse_model
from service.api.problems import Problem
from service.api.schemas import ValidateRequest


def refusal(body: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        parse_model(body, ValidateRequest)
    return caught.value


def test_an_empty_object_is_the_documented_default_request():
    asked = parse_model(b"{}", ValidateRequest)
    assert asked.model_dump(mode="json") == {
        "cluster": "default",
        "mesh": {"dp": 2, "pp": 2, "tp": 1, "vpp": 1},
        "model": "tiny",
        "batch": None,
        "schedule": "1f1b",
        "overlap": False,
        "bucket_size": None,
        "average_in_collective": False,
        "normalization": "microbatches",
        "probes": ["exact", "gpt"],
        "orderings": ["buggy", "fixed", "own_bucket"],
        "steps": 2,
        "repeats": 1,
        "dtype": "float32",
        "grad_reduce_dtype": "float32",
        "device": "auto",
        "placement": {"nodes": None, "exclude": [], "strategy": "PACK", "devices_per_node": None},
        "launcher": "pool",
        "stack": "reference",
        "seed": 0,
        "deadline_s": 120,
        "drill": None,
        "labels": {},
    }


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"steps": true}', "steps", True),
        (b'{"steps": 2.0}', "steps", 2.0),
        (b'{"steps": "2"}', "steps", "2"),
        (b'{"steps": null}', "steps", None),
        (b'{"mesh": {"dp": false}}', "mesh.dp", False),
        (b'{"overlap": 1}', "overlap", 1),
        (b'{"mesh": {"dq": 2}}', "mesh.dq", 2),
        (b'{"stepz": 2}', "stepz", 2),
        (b'{"orderings": ["buggy", "nope"]}', "orderings[1]", "nope"),
        (b'{"probes": "exact"}', "probes", "exact"),
        (b'{"model": 7}', "model", 7),
        (b'{"model": {"vocab_size": true}}', "model.vocab_size", True),
        (b'{"model": {"vocab": 3}}', "model.vocab", 3),
        (b'{"labels": {"a b": "x"}}', 'labels["a b"]', "a b"),
        (b'{"labels": {"a": 1}}', "labels.a", 1),
        (b'{"device": "tpu"}', "device", "tpu"),
        (b'{"deadline_s": 0}', "deadline_s", 0),
        (b'{"cluster": ""}', "cluster", ""),
        (b'{"cluster": "a/../b"}', "cluster", "a/../b"),
    ],
)
def test_types_names_and_shapes_are_refused_with_their_field(body, field, value):
    problem = refusal(body)
    assert problem.kind.code == "invalid_request"
    assert [(error.field, error.value) for error in problem.errors] == [(field, value)]
    assert problem.errors[0].rule
    assert problem.errors[0].remedy


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_non_finite_numbers_are_refused_where_they_stand(literal):
    problem = refusal(b'{"mesh": {"dp": %s}}' % literal)
    assert problem.errors[0].field == "mesh.dp"
    assert "finite" in problem.errors[0].rule


def test_a_repeated_name_is_refused_at_any_depth():
    problem = refusal(b'{"steps": 1, "steps": 2, "mesh": {"dp": 2, "dp": 2}}')
    assert {error.field for error in problem.errors} == {"steps", "mesh.dp"}


@pytest.mark.parametrize("text", [b"\\u0000", b"\\ud800"])
def test_text_that_the_database_cannot_hold_is_refused(text):
    assert refusal(b'{"labels": {"a": "x%s"}}' % text).errors[0].field == "labels.a"
    assert "U+0000" in refusal(b'{"labels": {"x%s": "a"}}' % text).errors[0].rule


def test_an_escaped_pair_of_surrogates_is_one_character():
    assert parse_model(b'{"labels": {"a": "\\ud83d\\ude00"}}', ValidateRequest).labels == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{} {}",
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b"[" * 60_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
)
def test_what_is_not_json_is_a_problem_and_not_a_crash(body):
    assert refusal(body).kind.code == "malformed_json"


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"x"'])
def test_only_an_object_is_a_request(body):
    assert refusal(body).errors[0].rule == "must be an object"


def test_an_error_list_is_bounded():
    body = b"{" + b",".join(b'"x%d": 1' % index for index in range(3000)) + b"}"
    assert len(body) < MAX_BODY_BYTES
    assert len(refusal(body).errors) == 20
