import io
import json
import logging
from collections.abc import Iterator

import pytest

from service import telemetry


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    telemetry.configure_logging("INFO", stream)
    yield stream
    root.handlers[:], root.level = handlers, level


def test_a_line_is_json_with_the_request_and_the_extras(lines):
    token = telemetry.request_id.set("abc")
    logging.getLogger("gradgate.test").info("stored %s", "x", extra={"validation_id": "val_1"})
    telemetry.request_id.reset(token)
    line = json.loads(lines.getvalue())
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "gradgate.test",
        "message": "stored x",
        "request_id": "abc",
        "validation_id": "val_1",
    }


def test_an_error_stays_on_its_line(lines):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("gradgate.test").exception("broke")
    (text,) = lines.getvalue().splitlines()
    assert "two\nlines" in json.loads(text)["error"]


@pytest.mark.parametrize("offered", ["abc-1.2_3", "x" * 64])
def test_a_plain_offered_id_is_kept(offered):
    assert telemetry.choose_request_id(offered) == offered


@pytest.mark.parametrize("offered", [None, "", "a b", "x" * 65, "a\nb", "\u00e4"])
def test_anything_else_gets_a_new_id(offered):
    chosen = telemetry.choose_request_id(offered)
    assert chosen != offered
    assert len(chosen) == 32
