"""Stacks by name: packages' entry points, the operator's setting, and what can be wrong with either."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.contract import StackOrigin
from workers.errors import StackError, UnknownStackError
from workers.stacks import registry


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, distribution: str, *entries: str) -> None:
    """A package's metadata, as an installer leaves it."""
    info = folder / f"{distribution}-3.4.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.4\n")
    (info / "entry_points.txt").write_text("\n".join(["[gradgate.stacks]", *entries, ""]))
    monkeypatch.syspath_prepend(str(folder))


def test_the_setting_reads_several() -> None:
    parsed = registry.parse_setting(" a=m:f , b-2 = p.q:C.build,")
    assert parsed == {"a": "m:f", "b-2": "p.q:C.build"}
    assert registry.parse_setting("") == {}


@pytest.mark.parametrize("text", ["a", "a=m", "a=m:", "=m:f", "a b=m:f", "a=m:f()", "reference=m:f", "a=m:f,a=m:g"])
def test_a_setting_that_cannot_be_read_is_refused_with_what_it_holds(text: str) -> None:
    with pytest.raises(StackError, match="GRADGATE_STACKS holds "):
        registry.parse_setting(text)


def test_an_entry_point_brings_its_package_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "beta", "beta = beta_stack:build [extra]")
    assert registry.known_stacks("") == ("reference", "beta")
    assert registry.find_stack("beta") == StackOrigin("beta", "beta_stack:build", "beta", "3.4")


def test_a_name_that_two_packages_claim_needs_the_operators_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "1", "one", "both = one:build")
    install(monkeypatch, tmp_path / "2", "two", "both = two:build")
    with pytest.raises(StackError, match=r"'both' is claimed by .*one 3\.4"):
        registry.known_stacks("")
    assert registry.installed_stacks("both=two:build")["both"].target == "two:build"


def test_no_package_takes_the_references_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "thief", "reference = thief:build")
    assert registry.known_stacks("") == ("reference",)


def test_an_unknown_name_is_told_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGATE_STACKS", "mine=m:f")
    with pytest.raises(UnknownStackError, match="'yours' is not installed here; there is reference, mine"):
        registry.find_stack("yours")


def test_of_an_installed_module_the_setting_knows_the_package() -> None:
    origin = registry.installed_stacks("mine=pytest:main")["mine"]
    assert (origin.distribution, origin.version) == ("pytest", pytest.__version__)


@pytest.mark.parametrize(
    ("target", "why"),
    [("absent_module:f", "No module named"), ("math:nothing", "no attribute"), ("math:pi", "is a float")],
)
def test_what_does_not_load_is_named_with_its_entry(target: str, why: str) -> None:
    with pytest.raises(StackError, match=f"stack 'mine' .{target}.*{why}"):
        registry.load_factory(StackOrigin("mine", target, None, None))
