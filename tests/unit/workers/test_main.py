"""What `python -m workers` refuses before anything starts: exit code 3, one rank speaking, field and rule named."""

from __future__ import annotations

import json
import os

import pytest

from workers.__main__ import main
from workers.rollcall import ERROR_CODE


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def refuse(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dp", "2", "--pp", "2"), "2 ranks were started for a mesh of dp 2 x pp 2 = 4"),
        (("--dp", "1", "--orderings", "buggy", "sideways"), "'sideways' is unknown; name one of buggy, fixed"),
        (("--dp", "1", "--probes", "guess"), "'guess' is unknown; name one of exact, gpt"),
        (("--dp", "1", "--dtype", "float8"), "'float8' is unknown; name one of float32, bfloat16"),
        (("--dp", "1", "--num-microbatches", "1"), "batch.num_microbatches is 1"),
        (("--dp", "1", "--num-microbatches", "0"), "batch.num_microbatches is 0"),
        (("--dp", "1", "--micro-batch-size", "0"), "batch.micro_batch_size is 0"),
        (("--dp", "1", "--model", "10,20"), "'10,20': use one of"),
        (("--dp", "1", "--model", "64,32,2,5,16"), "model.num_heads is 5"),
        (("--dp", "1", "--model", "64,32,1,4,16"), "mesh.pp is 2"),
        (("--dp", "1", "--drill", "explode:0"), "drill.fault is 'explode'"),
        (("--dp", "1", "--drill", "raise_in_collective:-1"), "needs the form FAULT[:WORLD_RANK|@NODE"),
        (("--dp", "1", "--drill", "raise_in_collective:9"), "drill.world_rank is 9"),
        (("--dp", "1", "--steps", "0"), "steps is 0"),
        (("--dp", "one"), "invalid int value: 'one'"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
    ],
)
def test_what_cannot_run_is_refused_by_one_rank(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refuse(*arguments) == ERROR_CODE
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
    monkeypatch.setenv("RANK", "1")
    assert refuse(*arguments) == ERROR_CODE
    assert capsys.readouterr().err == ""


def test_without_a_launcher_it_says_how_to_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK")
    assert refuse() == ERROR_CODE
    assert "torchrun --nproc_per_node 4 -m workers" in capsys.readouterr().err


def test_a_mesh_of_thousands_runs_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual", "--dp", "256", "--pp", "4", "--probes", "exact", "--steps", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["exit_code"], document["virtual"]) == ("pass", 0, True)
    assert document["fingerprint"] == []
    assert [trial["diverged_elements"] > 0 for trial in document["trials"]] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dp", "2", "--overlap"), "overlap cannot run on virtual ranks"),
        (("--dp", "2"), "more than one gpt step cannot run on virtual ranks"),
        (("--dp", "1000000"), "at most 131072 ranks"),
        (("--dp", "0"), "mesh.dp is 0"),
    ],
)
def test_what_virtual_ranks_cannot_run_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--virtual", *arguments]) == ERROR_CODE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
