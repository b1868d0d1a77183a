"""The commands that need no database of the user."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed_version
from typing import Annotated

import psycopg
import typer

from pgoutbox.cli.arguments import Json
from pgoutbox.cli.console import print_json, print_line
from pgoutbox.cli.program import app


@app.command()
def demo(
    *,
    people: Annotated[int, typer.Option(min=1, max=100_000, help="How many people get mail.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Repeats an earlier run.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what the run leaves, to look at it.")] = False,
    as_json: Json = False,
) -> None:
    """Run the main job on a private PostgreSQL.

    With a local SMTP server; nothing has to be set up.
    """
    from pgoutbox.demo import run_demo

    raise typer.Exit(run_demo(people=people, seed=seed, keep=keep, json_output=as_json))


@app.command()
def version(*, as_json: Json = False) -> None:
    """Print the versions that a bug report needs."""
    versions = {
        "pgoutbox": installed_version("pgoutbox"),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "libpq": str(psycopg.pq.version()),
    }
    if as_json:
        print_json(versions)
    else:
        print_line(" ".join(f"{name} {number}" for name, number in versions.items()))
