"""Command-line options into an API request. What was not given is left out, so that the server's defaults hold.

Checks the form only; whether a value is allowed is the server's to say, in one place for every client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.faults import read_drill

MODEL_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_len")


class UsageFault(Exception):  # noqa: N818 - the person's, not the program's
    """An option or a setting that cannot be understood."""


def build_request(
    *, model: str | None, labels: Sequence[str] | None, drill: str | None, **fields: Any
) -> dict[str, Any]:
    """The body of POST /validate. Raises UsageFault for what cannot be parsed."""
    fields["model"] = parse_model(model) if model is not None else None
    fields["labels"] = parse_labels(labels or ())
    fields["drill"] = parse_drill(drill) if drill is not None else None
    return {name: _plain(value) for name, value in fields.items() if _plain(value) not in (None, {}, [])}


def parse_model(text: str) -> str | dict[str, int]:
    """A model's name as it is; NAME=NUMBER pairs as sizes."""
    return _parse_sizes(text) if "=" in text else text


def parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE pairs."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageFault(f"--label {pair}: needs the form NAME=VALUE")
        if name in labels:
            raise UsageFault(f"--label {pair}: {name} is given twice; keep one of them")
        labels[name] = value
    return labels


def parse_drill(text: str) -> dict[str, Any]:
    """FAULT[:WORLD_RANK|@NODE[:STEP[:PROBABILITY]]]."""
    try:
        return read_drill(text)
    except ValueError as error:
        raise UsageFault(f"--drill {text}: {error}") from None


def _parse_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in MODEL_SIZES or not value.removeprefix("-").isdecimal():
            raise UsageFault(f"--model {pair}: needs NAME=NUMBER with NAME one of {', '.join(MODEL_SIZES)}")
        sizes[name] = int(value)
    return sizes


def _plain(value: Any) -> Any:
    """Without what was not given; enums as their strings."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
