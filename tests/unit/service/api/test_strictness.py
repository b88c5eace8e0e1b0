"""Whatever comes in: an accepted request or a problem with usable fields, never another exception."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.bodies import parse_model
from service.api.problems import Problem, document
from service.api.schemas import ValidateRequest
from service.api.validations import plan_order
from workers.encoding import dumps
from workers.plan import Limits

NUMBERS = st.integers() | st.floats() | st.integers(-3, 12) | st.sampled_from([2**31, 2**63, 2**64, 10**40])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["tiny", "buggy", "gpt", "cuda"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dp", "pp", "hidden_size", "num_heads", "num_layers", "num_microbatches", "fault", "x y"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
REQUESTS = st.dictionaries(
    st.sampled_from(list(ValidateRequest.model_fields)) | st.text(max_size=5), VALUES, max_size=6
)


@settings(max_examples=300, deadline=None)
@given(REQUESTS | VALUES)
def test_any_json_is_an_order_or_a_problem(request_body):
    with contextlib.suppress(Problem):
        try:
            asked = parse_model(json.dumps(request_body).encode(), ValidateRequest)
            order = plan_order(asked, Limits(), None)
        except Problem as problem:
            written = json.loads(dumps(document(problem, "/validate")))
            assert written["status"] == 422
            assert all(error["rule"] and error["remedy"] for error in written["errors"])
            raise
        assert 1 <= order.num_ranks <= 1024
        assert json.loads(dumps(order.request)) == order.request


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_order_or_a_problem(body):
    with contextlib.suppress(Problem):
        parse_model(body or b"{}", ValidateRequest)
