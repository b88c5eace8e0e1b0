"""Which stacks there are on this machine: installed packages' entry points, and those of the operator's setting.

A request can only name one. Standard library only: dispatchers list stacks without loading any.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from typing import Any

from workers.contract import REFERENCE_STACK, StackOrigin
from workers.errors import StackError, UnknownStackError

GROUP = "gradgate.stacks"
SETTING = "GRADGATE_STACKS"
NAME_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_TARGET_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"


def parse_setting(text: str) -> dict[str, str]:
    """`name=module:attribute`, several divided by commas, as a mapping. Raises StackError for what cannot be read."""
    found: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, target = (part.strip() for part in item.partition("="))
        if not re.fullmatch(NAME_PATTERN, name) or not re.fullmatch(_TARGET_PATTERN, target):
            raise StackError(f"{SETTING} holds {item!r}; each stack reads name=module:attribute, divided by commas")
        if name == REFERENCE_STACK or name in found:
            raise StackError(f"{SETTING} holds {name!r} again; {REFERENCE_STACK!r} is taken, and a name is given once")
        found[name] = target
    return found


def installed_stacks(setting: str | None = None) -> Mapping[str, StackOrigin]:
    """Every foreign stack by name. The operator's setting (None: this process's environment) wins over packages.

    Raises StackError for a setting that cannot be read, and where two packages claim one name.
    """
    text = os.environ.get(SETTING, "") if setting is None else setting
    chosen = {name: _from_setting(name, target) for name, target in parse_setting(text).items()}
    found: dict[str, StackOrigin] = {}
    for point in entry_points(group=GROUP):
        origin = _from_entry_point(point)
        if found.setdefault(point.name, origin) != origin and point.name not in chosen:
            both = f"{found[point.name]} and {origin}"
            raise StackError(f"stack {point.name!r} is claimed by {both}; remove one, or choose one in {SETTING}")
    found.pop(REFERENCE_STACK, None)
    return found | chosen


def known_stacks(setting: str | None = None) -> tuple[str, ...]:
    """Names that a request may give here, the reference first."""
    return (REFERENCE_STACK, *sorted(installed_stacks(setting)))


def find_stack(name: str) -> StackOrigin:
    """Where a foreign stack of this process's environment is. Raises UnknownStackError listing what there is."""
    known = installed_stacks()
    if name not in known:
        raise UnknownStackError(unknown_stack(name, (REFERENCE_STACK, *sorted(known))))
    return known[name]


def unknown_stack(name: str, known: tuple[str, ...]) -> str:
    """Why a name is no stack, what there is, and how one gets there."""
    return (
        f"stack {name!r} is not installed here; there is {', '.join(known)}; install a package with an entry point in "
        f"the group {GROUP}, or add name=module:attribute to {SETTING}"
    )


def load_factory(origin: StackOrigin) -> Callable[[Any], Any]:
    """Import a stack's factory (`workers.stacks.protocol.StackFactory`).

    Raises StackError where its module or attribute cannot be had.
    """
    module_name, _, attribute = origin.target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise StackError(
            f"stack {origin.name!r} ({origin}) cannot be loaded: {type(error).__name__}: {error}; install its package "
            "where the ranks run, or correct its entry point"
        ) from error
    if not callable(found):
        raise StackError(f"stack {origin.name!r} ({origin}) is a {type(found).__name__}; it must be a factory")
    return found


def _from_setting(name: str, target: str) -> StackOrigin:
    top_level = target.partition(":")[0].partition(".")[0]
    distribution = next(iter(packages_distributions().get(top_level, ())), None)
    return StackOrigin(name, target, distribution, version(distribution) if distribution else None)


def _from_entry_point(point: EntryPoint) -> StackOrigin:
    target = point.value.partition("[")[0].strip()
    if point.dist is None:
        return StackOrigin(point.name, target, None, None)
    return StackOrigin(point.name, target, point.dist.name, point.dist.version)
