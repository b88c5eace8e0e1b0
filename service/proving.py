"""What `gradgate selftest` takes and shows: choices read from text, and findings as a table or as plain values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from service.options import UsageFault
from workers.contract import Mesh
from workers.faults import FaultName
from workers.selftest import Attribution, Finding

_WIDTHS = (39, 4, 8, 38, 52, 0)
_TITLES = ("fault", "rank", "outcome", "found by", "named: rank, node, phase, parameter", "expected")


def read_mesh(text: str) -> Mesh:
    """A mesh written as DPxPP or DPxPPxTP. Raises UsageFault for another form."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text)
    if found is None:
        raise UsageFault(f"--mesh {text}: needs the form DPxPP or DPxPPxTP, as 2x2 or 1x2x2")
    return Mesh(int(found[1]), int(found[2]), int(found[3] or 1))


def read_faults(text: str | None) -> list[FaultName]:
    """Names of the catalogue, parted by commas; all of it for None. Raises UsageFault for an unknown one."""
    if text is None:
        return list(FaultName)
    unknown = [name for name in text.split(",") if name not in list(FaultName)]
    if unknown:
        raise UsageFault(f"--faults {', '.join(unknown)}: the catalogue has {', '.join(FaultName)}")
    return [FaultName(name) for name in text.split(",")]


def read_world_ranks(text: str | None, mesh: Mesh) -> list[int]:
    """World ranks of a mesh, parted by commas; every one for None. Raises UsageFault outside of it."""
    if text is None:
        return list(range(mesh.world_size))
    if not all(part.isdecimal() and int(part) < mesh.world_size for part in text.split(",")):
        raise UsageFault(f"--world-ranks {text}: needs numbers from 0 to {mesh.world_size - 1}, as 0,1")
    return [int(part) for part in text.split(",")]


def print_heading(console: Console) -> None:
    """The table's heads."""
    console.print(Text(_row(*_TITLES), style="bold"), soft_wrap=True)


def print_finding(finding: Finding, console: Console) -> None:
    """One line of the table, and where something is not as expected, a second one that says what."""
    if not finding.is_exercised:
        line = _row(finding.title, str(finding.world_rank), "-", "-", "-", f"not there: {finding.outcome}")
        console.print(Text(line, style="dim"), soft_wrap=True)
        return
    judges = ", ".join(judge.value for judge in finding.found.judges) or "-"
    named = finding.reported or _named(finding.found)
    cells = (finding.title, str(finding.world_rank), _outcome(finding), judges, named, _expected(finding))
    console.print(Text(_row(*cells), style="" if finding.ok else "bold red"), soft_wrap=True)
    if not finding.ok:
        console.print(Text(f"  not as expected: {'; '.join(finding.mismatches)}", style="bold red"), soft_wrap=True)


def print_summary(findings: Sequence[Finding], console: Console) -> None:
    """How many there were, and how many were not as expected."""
    exercised = [finding for finding in findings if finding.is_exercised]
    told = f"{sum(finding.ok for finding in exercised)} of {len(exercised)} exercises are as expected"
    skipped = len(findings) - len(exercised)
    console.print(told + (f"; {skipped} have nothing to strike on their rank" if skipped else "") + ".")


def _row(*cells: str) -> str:
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _outcome(finding: Finding) -> str:
    if finding.expected_outcome.value != "fail":
        return finding.outcome
    return "caught" if finding.outcome == "fail" else f"MISSED ({finding.outcome})"


def _expected(finding: Finding) -> str:
    if finding.reported_as is not None:
        return f"not fail; {finding.reported_as} names {finding.world_rank}"
    if finding.expected_outcome.value == "harmless":
        return "not fail"
    return _named(finding.expected)


def _named(attribution: Attribution) -> str:
    names = (attribution.parameter or "").split(", ")
    parts = [
        None if attribution.world_rank is None else str(attribution.world_rank),
        attribution.node,
        None if attribution.phase is None else attribution.phase.value,
        attribution.parameter if len(names) == 1 else f"{names[0]} ... ({len(names)})",
    ]
    return " ".join(filter(None, parts)) or "nobody"


def plain_finding(finding: Finding) -> dict[str, Any]:
    """The same for `--json`."""
    from workers.encoding import plain

    document: dict[str, Any] = plain(finding)
    return document | {"ok": finding.ok}
