"""Exit codes and messages of the command line; what needs a running stack is in tests/integration/stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from service import cli
from service.client import ProblemError
from service.faults import describe_expected
from service.home import choose_free_port


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "PORT", "HOST", "URL", "DATABASE_URL", "MAX_PARALLEL"):
        monkeypatch.delenv(f"GRADGATE_{name}", raising=False)


@pytest.mark.parametrize(
    ("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 2), (None, 3), ("something new", 3)]
)
def test_a_verdict_is_an_exit_code(verdict: str | None, code: int) -> None:
    assert cli.exit_code({"verdict": verdict}) == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["validat"],
        ["validate", "--foo"],
        ["validate", "--dp", "two"],
        ["validate", "--probe", "exakt"],
        ["validate", "--label", "x"],
        ["validate", "--drill", ""],
        ["predict", "--model", "gpt9"],
        ["predict", "--version", "v99x"],
        ["predict", "--dp", "0"],
        ["predict", "--ordering", "none"],
        ["predict", "--vary", "seq_len=1:3"],
        ["predict", "--sweep-dp", "2"],
        ["predict", "--sweep", "--dp", "2"],
        ["predict", "--sweep", "--ordering", "fixed"],
        ["predict", "--sweep", "--sweep-dp", "2,x"],
        ["predict", "--sweep", "--sweep-dp", "0"],
        ["predict", "--sweep", "--pp", "0"],
        ["predict", "--sweep", "--vary", "seq_len=5:3"],
        ["predict", "--sweep", "--vary", "depth=3:5"],
        ["predict", "--sweep", "--sweep-dp", "1000000"],
    ],
)
def test_bad_usage_is_an_error_and_says_why(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_no_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{choose_free_port('127.0.0.1')}"
    assert cli.run(["validate", "--url", url]) == 3
    assert f"error: {url} does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "dispatch", "migrate"])
def test_no_database_is_an_error_with_its_remedy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command]) == 3
    assert "set it to postgresql://" in capsys.readouterr().err


def test_every_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRADGATE_PORT", "70000")
    monkeypatch.setenv("GRADGATE_MAX_PARALLEL", "many")
    assert cli.run(["migrate"]) == 3
    message = capsys.readouterr().err
    assert "GRADGATE_PORT=70000" in message
    assert "GRADGATE_MAX_PARALLEL=many" in message


def test_a_refusal_names_every_field() -> None:
    errors = [{"field": "mesh.dp", "value": 0, "rule": "must be at least 1", "remedy": "ask for 1 or more"}]
    problem = ProblemError(422, {"title": "The request breaks a rule", "detail": "mesh.dp: ...", "errors": errors})
    assert (describe_expected(problem) or "").splitlines() == [
        "The request breaks a rule",
        "  mesh.dp = 0: must be at least 1; ask for 1 or more",
    ]


def test_help_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "demo" in capsys.readouterr().out


def test_predict_knows_the_reported_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["predict", "--json", "--version", "de4028a", "--version", "v0.14", "--ordering", "fixed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"dp": 2, "pp": 2, "tp": 1, "vpp": 1}
    wrong = {entry["subject"]: entry["misowned_elements"] for entry in found["predictions"]}
    assert wrong == {"de4028a": 2048, "v0.14": 0, "fixed": 0}


def test_predict_knows_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ordering", "fixed", "--overlap", "--bucket-size", "8000", "--vpp", "2"]
    assert cli.run(["predict", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"dp": 2, "pp": 2, "tp": 1, "vpp": 2}
    assert found["overlap"]
    assert found["predictions"][0]["wrong_elements"] > 0
    assert cli.run(["predict", "--bucket-size", "8000"]) == 3
    assert cli.run(["predict", "--overlap", "--bucket-size", "0"]) == 3
    assert cli.run(["predict", "--pp", "1", "--vpp", "2"]) == 3


def test_predict_counts_over_all_tensor_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["predict", "--json", "--ordering", "buggy", "--tp", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    (entry,) = found["predictions"]
    assert (found["mesh"]["tp"], entry["num_elements"]) == (2, 2048)
    assert entry["wrong_elements"] == sum(stop - start for start, stop in entry["ranges"])
    assert sum(entry["misowned_by_wte_owner"]) == entry["wrong_elements"] > 0
    assert cli.run(["predict", "--tp", "3"]) == 3
    assert "--tp 3" in capsys.readouterr().err


def test_predict_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["predict", "--model", "vocab_size=64", "--version", "0650d83"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["0650d83", "128", "2,048", "6.25%"]


def test_a_sweep_shows_which_sizes_a_version_gets_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--vary", "seq_len=16:18", "--model", "vocab_size=64,num_layers=2", "--sweep-dp", "2,3,4"]
    assert cli.run(["predict", "--sweep", *sizes, "--version", "v0.12", "--version", "v0.8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cases = {(c["version"], c["model"], c["dp"]): c for c in found["cases"]}
    assert len(cases) == 2 * 3 * 3
    assert [cases["v0.9", f"seq_len={length}", 2]["wrong_elements"] for length in (16, 17, 18)] == [0, 128, 128]
    assert cases["v0.8", "seq_len=17", 3]["asserts"]
    assert cli.run(["predict", "--sweep", *sizes, "--version", "v0.12", "--version", "v0.8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seq_len=17", "6%", ".", "12%"] in lines
    assert ["v0.9", "hit,", "of", "3", "models", "2", ".", "2"] in lines


def test_help_and_predict_load_neither_torch_nor_ray_nor_the_server() -> None:
    code = (
        "import sys; from service import cli; cli.run(['predict', '--json']); cli.run(['validate', '--help'])\n"
        "print([name for name in ('torch', 'ray', 'sqlalchemy', 'fastapi', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unreachable_database_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = choose_free_port("127.0.0.1")
    monkeypatch.setenv("GRADGATE_DATABASE_URL", f"postgresql://gradgate:secret@127.0.0.1:{port}/gradgate")
    assert cli.run(["migrate"]) == 3
    message = capsys.readouterr().err
    assert "the database of GRADGATE_DATABASE_URL does not answer" in message
    assert "secret" not in message


@pytest.mark.parametrize("arguments", [["predict"], ["predict", "--json"]])
def test_a_closed_pipe_is_an_error_and_not_a_failed_verdict(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "service.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 3
    assert done.stderr == ""


def test_a_bug_keeps_its_traceback() -> None:
    assert describe_expected(ValueError("x")) is None
