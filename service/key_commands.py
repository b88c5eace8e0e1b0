"""`gradgate keys`: make, list and end API keys, straight in the database, so that the first one needs no key.

A secret goes to standard output once, alone, and everything else to standard error: `KEY=$(gradgate keys create ...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.domain.keys import KEY_NAME, Scope

if TYPE_CHECKING:
    from service.domain.keys import ApiKey
    from service.storage.session import Connection

Found = TypeVar("Found")

app = typer.Typer(help="API keys: make, list, revoke. Works on the database of GRADGATE_DATABASE_URL or `gradgate up`.")


@app.command()
def create(
    name: Annotated[str, typer.Option(help="What logs and lists call it; never used again.")],
    scope: Annotated[
        list[Scope], typer.Option(help="What it allows; repeat for several. admin includes all.", show_default=False)
    ],
    cluster: Annotated[
        list[str] | None, typer.Option(help="Reach these clusters only; repeat for several.", show_default="all")
    ] = None,
    expires_days: Annotated[int | None, typer.Option(min=1, max=3650, show_default="never")] = None,
) -> int:
    """Make a key and print its secret: the only time that it is shown."""
    from service.domain.keys import hash_secret, new_secret
    from service.options import UsageFault
    from service.storage import keys

    if not KEY_NAME.fullmatch(name):
        raise UsageFault(f"--name {name!r}: must match {KEY_NAME.pattern}; choose for example nightly-ci")
    for unknown in [text for text in cluster or () if not _names_a_cluster(text)]:
        raise UsageFault(f"--cluster {unknown!r}: no cluster can have this name; leave it out to reach all of them")
    secret = new_secret()
    secret_hash = hash_secret(secret)
    assert secret_hash is not None
    expires_at = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)

    async def store(connection: Connection) -> ApiKey:
        return await keys.create(
            connection, name=name, secret_hash=secret_hash, scopes=scope, clusters=cluster, expires_at=expires_at
        )

    key = _in_transaction(store)
    typer.echo(f"{key.id}  {_describe(key)}", err=True)
    typer.echo("The secret, shown only now; send it as `Authorization: Bearer ...` or set GRADGATE_API_KEY:", err=True)
    typer.echo(secret)
    return 0


@app.command("list")
def list_keys() -> int:
    """Every key, without secrets."""
    from service.storage import keys

    for key in _in_transaction(keys.list_all):
        typer.echo(f"{key.id}  {_describe(key)}")
    return 0


@app.command()
def revoke(key: Annotated[str, typer.Argument(help="Its name or id.")]) -> int:
    """End a key for good, at once."""
    from service.options import UsageFault
    from service.storage import keys

    async def end(connection: Connection) -> ApiKey | None:
        return await keys.revoke(connection, key)

    if (revoked := _in_transaction(end)) is None:
        raise UsageFault(f"no key has the name or id {key!r}; `gradgate keys list` shows those there are")
    typer.echo(f"{revoked.id}  {_describe(revoked)}")
    return 0


def _names_a_cluster(text: str) -> bool:
    """Whether a request may name it as its cluster."""
    from pydantic import TypeAdapter, ValidationError

    from service.api.schemas import ClusterName

    try:
        TypeAdapter(ClusterName).validate_python(text)
    except ValidationError:
        return False
    return True


def _describe(key: ApiKey) -> str:
    """One line for people."""
    reach = "all clusters" if key.clusters is None else "clusters " + ", ".join(sorted(key.clusters))
    used = "never used" if key.last_used_at is None else f"last used {key.last_used_at:%Y-%m-%d %H:%M}Z"
    state = key.why_refused(datetime.now(UTC)) or (
        "does not expire" if key.expires_at is None else f"expires {key.expires_at:%Y-%m-%d %H:%M}Z"
    )
    return f"{key.name}  {', '.join(sorted(key.scopes))}  {reach}  {used}  {state}"


def _in_transaction(work: Callable[[Connection], Coroutine[Any, Any, Found]]) -> Found:
    import asyncio

    from service.storage.session import Database

    async def run() -> Found:
        database = Database(_database_url(), pool_size=1)
        try:
            async with database.transaction() as connection:
                return await work(connection)
        finally:
            await database.close()

    return asyncio.run(run())


def _database_url() -> str:
    """Of the settings; else of the stack that runs in this home."""
    from service.cli import load_settings
    from service.home import StackHome
    from service.options import UsageFault
    from service.stack import embedded_url

    settings = load_settings()
    if (url := settings.database_url or embedded_url(StackHome(settings.home))) is None:
        raise UsageFault(
            "no database: set GRADGATE_DATABASE_URL to postgresql://user:password@host:port/database, or start "
            f"`gradgate up` in {settings.home} first"
        )
    return url
