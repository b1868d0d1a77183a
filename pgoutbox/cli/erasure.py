"""The commands for the data of a person: `erase`, `export` and `mentions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from pgoutbox.cli.arguments import DryRun, Dsn, IdFile, Ids, Json, Yes, expanded, read_ids
from pgoutbox.cli.console import (
    FAILED,
    print_documents,
    print_error,
    print_json,
    print_line,
    print_note,
    print_result,
    print_table,
    progress,
)
from pgoutbox.cli.program import app, confirm, interruptible, open_operator, read_settings
from pgoutbox.message import State
from pgoutbox.operations import EraseResult, Erasure, Mention
from pgoutbox.text import pluralize

_ERASED_SO_FAR: Final = "the erasures so far are committed; run the command again for the rest"
_REASONS: Final = {
    EraseResult.IN_FLIGHT: "is in flight and was asked to stop; erase it again after its attempt",
    EraseResult.LOCKED: "or its key is locked by another transaction; erase it again",
    EraseResult.CHANGED: "got another owner or destination meanwhile",
    EraseResult.MISSING: "does not exist",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """The arguments and options that select messages in every state."""

    message_ids: Ids = None
    file: IdFile = None
    owner: Annotated[str | None, typer.Option(help="All messages of this owner.")] = None
    destination: Annotated[
        str | None, typer.Option(metavar="URI", help="All messages to this URI or e-mail address.")
    ] = None
    dsn: Dsn = None

    def which(self) -> dict[str, Any]:
        """Return the selection as arguments of the operator's methods."""
        given = (bool(self.message_ids), self.file is not None, self.owner is not None, self.destination is not None)
        if given.count(True) != 1:
            raise typer.BadParameter("give message ids, --file, --owner or --destination, and only one of them")
        ids = (self.message_ids or None) if self.file is None else read_ids(self.file)
        return {"ids": ids, "owner": self.owner, "destination": self.destination}


@app.command()
@expanded
def erase(options: SelectionOptions, *, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False) -> None:
    """Delete all data of messages in every state.

    Deletes payloads, attempts and keys, and removes the owner and the address from the audit. Then lists the rows that
    still mention them. Exits with 1 if a message is left, for example because it is in flight.
    """
    which = options.which()
    with open_operator(read_settings(options.dsn)) as operator:
        counts = operator.count_erasable(**which)
        if dry_run:
            _print_preview(counts, as_json=as_json)
            return
        total = sum(counts.values())
        confirm(f"erase {pluralize(total, 'message')} and all their traces", yes=yes)
        with interruptible(_ERASED_SO_FAR), progress("erase", total) as report:
            done = operator.erase(**which, progress=report)
    if as_json:
        print_json(_erasure_as_json(done))
    else:
        _print_erasure(done)
    if not done.is_complete or EraseResult.MISSING in done.results.values():
        raise typer.Exit(FAILED)


@app.command()
@expanded
def export(options: SelectionOptions) -> None:
    """Print all data of messages as JSON, one document per line.

    Needs a login that may read payloads. Opens encrypted payloads with PGOUTBOX_ENCRYPTION_KEYS. Nothing is redacted.
    """
    which = options.which()
    count = 0
    with open_operator(read_settings(options.dsn)) as operator:
        for message in operator.export(**which):
            print_json(message)
            count += 1
    print_note(f"exported {pluralize(count, 'message')}")


@app.command()
def mentions(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="An address or a name.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Find the rows that contain a text.

    Searches all tables, also payloads, ignoring case. Needs a login that may read payloads. Does not search encrypted
    payloads. With --json one document per line.
    """
    with open_operator(read_settings(dsn)) as operator:
        found = operator.mentions(*texts)
    if as_json:
        print_documents(found)
    else:
        print_table(Mention._fields, found)


def _print_preview(counts: Mapping[State, int], *, as_json: bool) -> None:
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"would erase {pluralize(sum(counts.values()), 'message')}" + (f": {states}" if states else "")
    print_result({"would": "erase", **{state.value: count for state, count in counts.items()}}, text, as_json=as_json)


def _erasure_as_json(done: Erasure) -> dict[str, object]:
    by_result = {
        result.value: [message_id for message_id, reached in done.results.items() if reached is result]
        for result in EraseResult
    }
    mentions = None if done.mentions is None else [mention._asdict() for mention in done.mentions]
    return {**by_result, "mentions": mentions}


def _print_erasure(done: Erasure) -> None:
    for message_id, result in done.results.items():
        if result in _REASONS:
            print_error(f"message {message_id} {_REASONS[result]}")
    print_line(f"erased {pluralize(Counter(done.results.values())[EraseResult.ERASED], 'message')}")
    if done.mentions is None:
        print_note(
            "other rows may mention the owner or the address; as the owner of the schema, run: pgoutbox mentions"
        )
    elif done.mentions:
        print_note("these rows still mention them; decide about each:")
        print_table(Mention._fields, done.mentions)
