"""The command that says what is wrong, why, and how to mend it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Final

import typer

from pgoutbox.cli.arguments import App, Dsn, Json, load_outbox
from pgoutbox.cli.console import FAILED, coloured, mask, print_json, print_note, printable, secrets_in, secrets_of
from pgoutbox.cli.program import app
from pgoutbox.settings import load_settings

_COLOURS: Final = {"ok": "32", "skipped": "90", "warning": "33", "problem": "31"}


@app.command()
def doctor(
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for a warning too.")] = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Look for what is wrong, and say how to mend it.

    Changes nothing and sends nothing. Each finding is printed as it is made, with --json as one document per line.
    Exits 0 when all is in order, 1 for a problem, and with --strict for a warning too. --app tells it about topics and
    handlers.
    """
    from pgoutbox.doctor import Level, examine

    settings = load_settings(dsn=dsn, app=where)
    settings.require_dsn()
    outbox = None if settings.app is None else load_outbox(settings.app)
    secrets = secrets_of(settings) | secrets_in((), [os.environ.get("PGPASSWORD", "")])
    counts: Counter[Level] = Counter()
    for finding in examine(settings, outbox, environment=os.environ):
        counts[finding.level] += 1
        shown = {name: None if text is None else mask(text, secrets) for name, text in asdict(finding).items()}
        if as_json:
            print_json(shown)
        else:
            _print(shown)
        sys.stdout.flush()
    if not as_json:
        print_note(", ".join(f"{counts[level]} {level}" for level in reversed(Level)))
    if counts[Level.PROBLEM] or (strict and counts[Level.WARNING]):
        raise typer.Exit(FAILED)


def _print(finding: dict[str, str | None]) -> None:
    """What was found on one line, with why and how to mend it below; without a terminal all on one, between tabs."""
    check, level, *texts = (printable(text or "") for text in finding.values())
    if not sys.stdout.isatty():
        sys.stdout.write("\t".join((level, check, *texts)) + "\n")
        return
    what, why, mend = texts
    sys.stdout.write(f"{coloured(f'{level:<8}', _COLOURS[level], sys.stdout)} {check:<13} {what}\n")
    for label, text in (("why", why), ("mend", mend)):
        if text:
            sys.stdout.write(f"{'':23}{label}: {text}\n")
