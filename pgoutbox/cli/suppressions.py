"""The commands for suppressed addresses."""

from __future__ import annotations

import sys
from csv import DictReader, writer
from csv import Error as CsvError
from datetime import UTC
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from pgoutbox.cli.arguments import read_text
from pgoutbox.cli.console import FAILED, print_line, progress
from pgoutbox.cli.options import DatabaseOptions, Limit, Options, command, open_operator, read_settings
from pgoutbox.cli.program import app, interruptible
from pgoutbox.operations import Suppression, SuppressionReason
from pgoutbox.text import pluralize

suppression_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="List and change the addresses to which no mail of a list goes."
)
app.add_typer(suppression_app, name="suppression")


Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="An e-mail address, without a name.")]
MailingList = Annotated[
    str | None, typer.Option("--list", metavar="NAME", help="Only this mailing list (default: every list).")
]
Reason = Annotated[SuppressionReason, typer.Option(help="Why. A bounce and a complaint stop every list.")]


@command("list", of=suppression_app)
def list_suppressions(
    *,
    address: Annotated[str | None, typer.Option(help="Only those of this e-mail address.")] = None,
    limit: Limit = 100,
    options: Options,
) -> None:
    """List the suppressions in force, the newest first. They have digests and no addresses."""
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.list_suppressions(address=address, limit=limit)
    if found or options.as_json:
        options.print_rows(Suppression._fields, found)
    else:
        print_line("no suppressed addresses")


@command(of=suppression_app)
def add(address: Address, *, reason: Reason = "manual", mailing_list: MailingList = None, options: Options) -> None:
    """Stop the mail of a mailing list, or of every list, to an address."""
    with open_operator(options.settings) as operator:
        has_changed = operator.suppress(address, reason, mailing_list=mailing_list)
    options.print({"changed": has_changed}, "suppressed" if has_changed else "was suppressed already")


@command(of=suppression_app)
def remove(address: Address, *, mailing_list: MailingList = None, options: Options) -> None:
    """End the suppression of an address for one mailing list, or that for every list."""
    with open_operator(options.settings) as operator:
        has_changed = operator.unsuppress(address, mailing_list=mailing_list)
    told = "no longer suppressed" if has_changed else "was not suppressed; `pgoutbox suppression list` shows all"
    options.print({"changed": has_changed}, told)
    if not has_changed:
        raise typer.Exit(FAILED)


@command("import", of=suppression_app)
def import_suppressions(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV file with a header line; - means stdin.")],
    *,
    reason: Reason = "manual",
    mailing_list: MailingList = None,
    options: Options,
) -> None:
    """Suppress the addresses of a CSV file, which are stored as digests.

    Its columns are `address`, or `digest` from an export of this database, and optionally `reason`, `mailing_list` and
    `created_at`. Options are for files without these columns: an empty `mailing_list` means every list. Suppressions
    that exist stay as they are.
    """
    lines = DictReader(StringIO(read_text(file), newline=""), restkey="")
    try:
        columns, given = lines.fieldnames or (), list(lines)
    except CsvError as error:  # A quote may be missing.
        raise typer.BadParameter(f"{file}: after line {lines.line_num}: {error}") from None
    if unknown := {*columns} - {"address", *Suppression._fields}:
        raise typer.BadParameter(f"{file}: unknown column {min(unknown)!r}; the first line names the columns")
    defaults = {"reason": reason, "mailing_list": mailing_list}
    rows = [{**defaults, **{name: text or None for name, text in line.items()}} for line in given]
    if (wrong := next((number for number, row in enumerate(rows) if "" in row), None)) is not None:
        raise typer.BadParameter(f"{file}: items[{wrong}] has more fields than the first line")
    told = interruptible("the batches so far are committed")
    with open_operator(options.settings) as operator, told, progress("import") as report:
        count = operator.import_suppressions(rows, progress=report)
    options.print({"added": count}, f"{pluralize(count, 'suppression')} added")


@command("export", of=suppression_app)
def export_suppressions(*, place: DatabaseOptions) -> None:
    """Print all suppressions in force as CSV, with digests, which only this database can compare."""
    with open_operator(read_settings(place.dsn, place.database), read_only=True) as operator:
        lines = writer(sys.stdout, lineterminator="\n")
        lines.writerow(Suppression._fields)
        for one in operator.list_suppressions(limit=None):
            lines.writerow(one._replace(created_at=one.created_at.astimezone(UTC)))
