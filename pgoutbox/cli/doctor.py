"""The command `doctor`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pgoutbox.cli.arguments import load_outbox
from pgoutbox.cli.console import FAILED, coloured, mask, print_json, print_note, printable, secrets_in
from pgoutbox.cli.options import App, Dsn, Json
from pgoutbox.cli.program import app
from pgoutbox.settings import load_settings, secret_values

if TYPE_CHECKING:
    from pgoutbox.doctor import Finding

_COLOURS: Final = {"ok": "32", "skipped": "90", "warning": "33", "problem": "31"}


@app.command()
def doctor(
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for a warning too.")] = False,
    only_problems: Annotated[
        bool, typer.Option("--problems", help="Print only problems; with --strict also warnings.")
    ] = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Check the installation for faults, and suggest fixes.

    Changes nothing and sends nothing. Prints problems first and then warnings, with --json as one document per line.
    Exits 1 for a problem, and with --strict also for a warning; otherwise 0. Needs --app to check topics and handlers.
    """
    from pgoutbox.doctor import Level, examine

    settings = load_settings(dsn=dsn, app=where)
    settings.require_dsn()
    outbox = None if settings.app is None else load_outbox(settings.app)
    secrets = secrets_in([*secret_values(settings), ("PGPASSWORD", os.environ.get("PGPASSWORD", ""))])
    if sys.stderr.isatty():
        print_note("checking ...")
    found = sorted(examine(settings, outbox, environment=os.environ), key=lambda finding: finding.urgency)
    counts = Counter(finding.level for finding in found)
    faults = (Level.PROBLEM, Level.WARNING) if strict else (Level.PROBLEM,)
    for finding in found:
        if only_problems and finding.level not in faults:
            continue
        texts = {name: None if text is None else mask(text, secrets) for name, text in _texts_of(finding).items()}
        if as_json:
            about = {name: mask(text, secrets) for name, text in finding.about.items()}
            count = finding.messages
            print_json({**texts, "about": about, "messages": {"count": count.messages, "kind": count.kind}})
        else:
            _print(texts)
    if not as_json:
        print_note(", ".join(f"{counts[level]} {level}" for level in reversed(Level)))
    if any(counts[level] for level in faults):
        raise typer.Exit(FAILED)


def _texts_of(finding: Finding) -> dict[str, str | None]:
    return {name: text for name, text in asdict(finding).items() if name not in ("about", "messages")}


def _print(finding: dict[str, str | None]) -> None:
    """Print a finding with its effect and fix on lines below; without a terminal, all on one line, between tabs."""
    check, level, what, why, fix = (printable(finding[name] or "") for name in ("check", "level", "what", "why", "fix"))
    if not sys.stdout.isatty():
        sys.stdout.write("\t".join((level, check, what, why, fix)) + "\n")
        return
    sys.stdout.write(f"{coloured(f'{level:<8}', _COLOURS[level], sys.stdout)} {check:<13} {what}\n")
    for label, text in (("why", why), ("fix", fix)):
        if text:
            sys.stdout.write(f"{'':23}{label}: {text}\n")
