"""Hash of this package's source, standard library only: the driver compares it with the ranks' without torch."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def workers_digest() -> str:
    """Hash of the package's source files, compared before a gang forms: all ranks must run the same code."""
    root = Path(__file__).resolve().parent.parent
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        state.update(str(path.relative_to(root)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()
