"""The command `doctor`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pgoutbox.cli.arguments import load_outbox
from pgoutbox.cli.console import FAILED, coloured, mask, print_json, print_note, printable, secrets_in
from pgoutbox.cli.databases import load_database, load_databases, look_everywhere
from pgoutbox.cli.explain import about_database
from pgoutbox.cli.options import App, DatabaseOptions, Everywhere, Json, command
from pgoutbox.doctor.findings import join_names
from pgoutbox.settings import Settings, secret_values
from pgoutbox.text import pluralize

if TYPE_CHECKING:
    from pgoutbox.doctor import Finding

_COLOURS: Final = {"ok": "32", "skipped": "90", "warning": "33", "problem": "31"}


@command()
def doctor(
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for a warning too.")] = False,
    only_problems: Annotated[
        bool, typer.Option("--problems", help="Print only problems; with --strict also warnings.")
    ] = False,
    everywhere: Everywhere = False,
    where: App = None,
    place: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """Check the installation for faults, and suggest fixes.

    Changes nothing and sends nothing. Prints problems first and then warnings, with --json as one document per line.
    Exits 1 for a problem, and with --strict also for a warning; otherwise 0. Needs --app to check topics and handlers.
    With --all-databases, a finding in several databases is printed once, with their names; with --json once for each.
    """
    from pgoutbox.doctor import Level, examine

    databases: dict[str, Settings] = {}
    if everywhere:
        databases = load_databases(place.dsn, place.database, app=where)
        settings = next(iter(databases.values()))
    else:
        settings = load_database(place.dsn, place.database, app=where)
        settings.require_dsn()
    outbox = None if settings.app is None else load_outbox(settings.app)

    def read(one: Settings) -> list[Finding]:
        # The transports are the same for all databases.
        return [
            _shown(finding, one)
            for finding in examine(one, outbox, environment=os.environ, checks_transports=one is settings)
        ]

    if sys.stderr.isatty():
        print_note("checking ...")
    with look_everywhere(databases, read) if everywhere else nullcontext([(None, read(settings))]) as by_database:
        found: list[tuple[str | None, Finding]] = [(name, one) for name, found in by_database for one in found]
        found.sort(key=lambda one: one[1].urgency)
        if everywhere and not as_json:
            found = [(None, finding) for finding in _grouped(found)]
        counts = Counter(finding.level for _, finding in found)
        faults = (Level.PROBLEM, Level.WARNING) if strict else (Level.PROBLEM,)
        for name, finding in found:
            if only_problems and finding.level not in faults:
                continue
            if as_json:
                print_json(_document(finding) if name is None else {"database": name, **_document(finding)})
            else:
                _print(_texts_of(finding))
        if not as_json:
            faulty = (Level.PROBLEM, Level.WARNING)
            texts = (
                pluralize(counts[one], one) if one in faulty else f"{counts[one]} {one}" for one in reversed(Level)
            )
            print_note(", ".join(texts))
    if any(counts[level] for level in faults):
        raise typer.Exit(FAILED)


def _shown(finding: Finding, settings: Settings) -> Finding:
    """Return the finding without secrets. Its texts about PGOUTBOX_DSN are about the DSN of a database of a list."""
    secrets = secrets_in([*secret_values(settings), ("PGPASSWORD", os.environ.get("PGPASSWORD", ""))])

    def shown(text: str) -> str:
        return mask(about_database(text, settings), secrets)

    return replace(
        finding,
        what=shown(finding.what),
        why=finding.why and shown(finding.why),
        fix=finding.fix and shown(finding.fix),
        about={name: shown(text) for name, text in finding.about.items()},
    )


def _grouped(found: Sequence[tuple[str | None, Finding]]) -> Iterator[Finding]:
    """Yield each finding once, with the names of its databases. Those of one cause count as the same finding."""
    groups: dict[object, dict[str, Finding]] = {}
    for name, finding in found:
        # The id of a message belongs to one database.
        about = tuple(item for item in finding.about.items() if item[0] != "message")
        groups.setdefault((finding.level, finding.check, finding.code, about), {})[str(name)] = finding
    for group in groups.values():
        (first, finding), *others = group.items()
        if all(other.what == finding.what for _, other in others):
            yield replace(finding, what=f"{join_names(group)}: {finding.what}")
        else:
            yield replace(finding, what=f"{first}: {finding.what}; also in {join_names(dict(others))}")


def _document(finding: Finding) -> dict[str, object]:
    count = finding.messages
    messages = {"count": count.messages, "kind": count.kind}
    return {**_texts_of(finding), "about": dict(finding.about), "messages": messages}


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
