"""The commands `demo` and `version`, which do not need a database."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed_version
from typing import Annotated

import psycopg
import typer

from pgoutbox.cli.console import print_json, print_line
from pgoutbox.cli.options import Json, stated_person
from pgoutbox.cli.program import app


@app.command()
def demo(
    *,
    people: Annotated[int, typer.Option(min=1, max=100_000, help="Number of mail receivers.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers, to repeat a run.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server running after the run, until Enter is pressed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a self-contained demo.

    Starts its own PostgreSQL and SMTP server. Needs no setup.
    """
    from pgoutbox.demo import run_demo

    raise typer.Exit(run_demo(people=people, seed=seed, keep=keep, json_output=as_json))


def _print_version(given: bool) -> None:  # noqa: FBT001 - Typer passes the value of the option so
    if given:
        print_line(f"pgoutbox {installed_version('pgoutbox')}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    person: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Who acts, for the audit (default: the account of this machine)."),
    ] = None,
) -> None:
    """Transactional outbox on PostgreSQL. PGOUTBOX_DSN selects the database."""
    if person is not None and not (person.isprintable() and 1 <= len(person.strip()) <= 200):
        raise typer.BadParameter("--as: give a name of 1 to 200 characters, on one line")
    stated_person.set(person and person.strip())


@app.command()
def version(*, as_json: Json = False) -> None:
    """Print the versions for a bug report."""
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
