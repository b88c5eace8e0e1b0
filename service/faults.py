"""Which errors are a person's to read: those whose message alone says it all. Anything else keeps its traceback."""

from __future__ import annotations

import sys

from service.client import ClientError, ProblemError
from service.domain.errors import ServiceError
from service.home import StackError
from service.options import UsageFault
from workers.errors import WorkerError


def describe_expected(error: Exception) -> str | None:
    """What to print for an error that is no bug of ours; None for a bug."""
    if isinstance(error, ProblemError) and error.errors:
        faults = [f"{item['field']} = {item['value']!r}: {item['rule']}; {item['remedy']}" for item in error.errors]
        return "\n  ".join([error.title, *faults])
    if isinstance(error, _database_error()):
        return f"the database of GRADGATE_DATABASE_URL does not answer: {getattr(error, 'orig', error)}"
    expected = isinstance(error, ClientError | ServiceError | StackError | UsageFault | WorkerError)
    return str(error) if expected else None


def _database_error() -> type[Exception]:
    """What an unreachable database raises; a type that nothing raises where SQLAlchemy was never loaded."""
    loaded = sys.modules.get("sqlalchemy.exc")
    return loaded.OperationalError if loaded else NotImplementedError
