"""The home's files: its scratch folder, Ray's token, ports."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.home import MAX_SCRATCH_PATH, StackError, StackHome, choose_free_port, require_free_port


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gg-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_scratch_folder_is_new_and_private(short_dir: Path) -> None:
    home = StackHome(short_dir)
    (short_dir / "run").mkdir(mode=0o777)
    (short_dir / "run" / "old").touch()
    scratch, keep = home.make_scratch_dir()
    assert (scratch, keep) == (short_dir / "run", True)
    assert list(scratch.iterdir()) == []
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700


def test_a_long_home_gets_a_short_scratch_folder_elsewhere(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    scratch, keep = StackHome(short_dir / ("long" * 10)).make_scratch_dir()
    assert scratch.parent == short_dir
    assert not keep
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700


def test_no_short_path_at_all_says_what_to_set(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = short_dir / ("d" * MAX_SCRATCH_PATH)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(StackError, match="set GRADGATE_HOME or TMPDIR to a shorter path"):
        StackHome(deep).make_scratch_dir()
    assert list(deep.iterdir()) == []


def test_the_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    home = StackHome(tmp_path)
    token = home.ensure_ray_token().read_text()
    assert len(token) == 64
    assert StackHome(tmp_path).ensure_ray_token().read_text() == token
    assert stat.S_IMODE(home.token_path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["ray-token"]


def test_a_home_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match="set GRADGATE_HOME to a folder you own"):
        StackHome(tmp_path / "file" / "home").claim()


def test_a_taken_port_is_refused_and_zero_finds_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(StackError, match=rf"cannot listen on 127.0.0.1:{taken} .*set GRADGATE_PORT"):
            require_free_port("127.0.0.1", taken)
        assert require_free_port("127.0.0.1", 0) not in (0, taken)
    assert require_free_port("127.0.0.1", taken) == taken


def test_a_free_port_can_be_bound() -> None:
    port = choose_free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        pass
