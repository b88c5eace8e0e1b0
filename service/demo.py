"""`gradgate demo`: a whole stack, one validation with defaults over HTTP, all that it found, nothing left running."""

from __future__ import annotations

import os
from typing import Any

from service import progress
from service.client import GradgateClient
from service.settings import Settings
from service.stack import run_stack
from service.terminal import open_console


def run_demo(settings: Settings) -> dict[str, Any]:
    """Run it and return the validation. Listens on a free port unless GRADGATE_PORT is set."""
    console = open_console()
    if "port" not in settings.model_fields_set:
        settings = settings.model_copy(update={"port": 0})
    with run_stack(settings, lambda text: console.print(text, style="dim")) as (_, addresses):
        console.print(f"POST {addresses.api_url}/validate {{}}")
        with GradgateClient(addresses.api_url, api_key=os.environ.get("GRADGATE_API_KEY")) as client:
            validation = progress.follow(client, {}, console)
            if validation["state"] == "completed":
                progress.print_details(client, validation, console)
            progress.print_outcome(validation, console)
        console.print("stopping ...", style="dim")
    database = "the database of GRADGATE_DATABASE_URL" if settings.database_url else settings.home / "postgres"
    console.print(f"Nothing is left running. {validation['id']} is stored in {database}", soft_wrap=True)
    console.print(f"(`bash deploy/run up` serves it again); logs are in {addresses.logs_dir}.", soft_wrap=True)
    return validation
