"""One embedded Postgres for the whole test run, and a fresh, migrated database for every test module that asks.

Imports of the product stand inside the fixtures: tests of workers must run where only torch is installed.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from service.storage.session import Database

# Nothing here has to survive a power cut.
_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "200"}


@pytest.fixture(scope="session")
def postgres_home() -> Iterator[Path]:
    """A folder that the database's account may pass through; pytest's own temporary folders are closed to it."""
    home = Path(tempfile.mkdtemp(prefix="gradgate-test-"))
    home.chmod(0o711)
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_template(postgres_home: Path) -> Iterator[str]:
    """The URL of a migrated database that nobody writes to."""
    from service.storage import embedded, migration

    with embedded.start(postgres_home, options=_FAST) as server:
        migration.upgrade(server.url)
        yield server.url


@pytest.fixture(scope="module")
def postgres_url(postgres_template: str) -> Iterator[str]:
    """The URL of this module's own database, migrated and empty."""
    import psycopg

    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_template.replace("/gradgate?", "/postgres?"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE gradgate")
        yield postgres_template.replace("/gradgate?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
async def database(postgres_url: str) -> AsyncIterator[Database]:
    """A pool of connections to this module's database."""
    from service.storage.session import Database

    database = Database(postgres_url, pool_size=20)
    yield database
    await database.close()
