from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from service.execution import housekeeping


@pytest.mark.parametrize("error", [OperationalError, ProgrammingError])
async def test_what_the_database_refuses_never_ends_the_house(monkeypatch, error):
    asked: list[int | None] = []

    async def arrange(database, retention_days):
        asked.append(retention_days)
        if len(asked) == 1:
            raise error("DROP TABLE trace_20260105", {}, Exception("refused"))

    monkeypatch.setattr(housekeeping.partitions, "arrange", arrange)
    monkeypatch.setattr(housekeeping, "INTERVAL_S", 0.0)
    monkeypatch.setattr(housekeeping, "RETRY_S", 0.0)
    keeping = asyncio.create_task(housekeeping.keep_house(None, 30))
    async with asyncio.timeout(10):
        while len(asked) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    keeping.cancel()
    assert set(asked) == {30}
