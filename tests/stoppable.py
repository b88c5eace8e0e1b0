"""A migrated Postgres of a test's own, which it may stop and start again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.storage import embedded, migration
from service.storage.embedded import EmbeddedPostgres


class Server:
    """Its URL stays the same."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: EmbeddedPostgres | None = None
        self.url = self.start()

    def start(self) -> str:
        """Start it, and wait until it answers."""
        self._running = embedded.start(self._home, options={"fsync": "off"})
        return self._running.url

    def stop(self) -> None:
        """Stop it; every connection to it breaks."""
        if self._running is not None:
            self._running.stop()
        self._running = None


@contextmanager
def stoppable() -> Iterator[Server]:
    """Running, for the time of a block."""
    home = Path(tempfile.mkdtemp(prefix="gradgate-test-"))
    home.chmod(0o711)
    server = Server(home)
    try:
        migration.upgrade(server.url)
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
