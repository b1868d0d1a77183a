"""The commands for fair keys: their table, and the share of one key or of a queue."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pgoutbox.cli.arguments import MAX_RATE_COUNT, parse_number, parse_queue, parse_rate
from pgoutbox.cli.console import print_json, print_line, print_note, print_table, print_warning
from pgoutbox.cli.options import Options, Yes, command, open_operator
from pgoutbox.cli.program import confirm_unknown
from pgoutbox.doctor.findings import duration
from pgoutbox.operations import FairKey
from pgoutbox.operations.operator import FAIR_COUNTS, SHARE_VALUES
from pgoutbox.text import pluralize

Queue = Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE", help="Name of the queue.")]


@command()
def keys(
    queue: Queue,
    start: Annotated[str, typer.Argument(metavar="[START]", help="Only keys that begin so.")] = "",
    *,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of keys.")] = 50,
    options: Options,
) -> None:
    """List the fair keys of a queue with their shares, those that wait longest first."""
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.list_fair_keys(queue, prefix=start, limit=limit)
    if options.as_json:
        print_json({"keys": [one._asdict() for one in found.keys], "key_count": found.key_count})
        return
    if found.keys:
        _print_keys(found.keys)
    else:
        print_line(f"queue {queue}: no fair keys")
    if more := found.key_count - len(found.keys):
        print_note(f"left out: {pluralize(more, 'more key')} with a shorter wait; raise --limit, or give a START")
    if found.key_count >= FAIR_COUNTS["keys"]:
        print_note(f"read the first {found.key_count:,} keys in order of their names: give a START for the others")


@command()
def share(
    queue: Queue,
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="The fair key (default: all keys without an own share). Write -- before one that begins with -.",
        ),
    ] = None,
    *,
    weight: Annotated[str | None, typer.Option(metavar="NUMBER", help="Messages of each turn; or none.")] = None,
    max_in_flight: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Maximum number of messages in flight; or none.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Messages that get their turn in a period, such as 20/s or 60/hour; or none."
        ),
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Give it no more turns: --max-in-flight 0.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Give it the share of the queue again.")] = False,
    yes: Yes = False,
    options: Options,
) -> None:
    """Set the share of a fair key, for all workers together.

    Values without an option stay unchanged, and none gives a key the value of its queue. Messages that already have
    their turn continue. On a terminal it asks about a queue without messages.
    """
    given = {"weight": weight, "max_in_flight": "0" if pause else max_in_flight, "rate": rate}
    is_change = any(text is not None for text in given.values())
    if reset == is_change or (pause and max_in_flight is not None):
        raise typer.BadParameter("give --weight, --rate, and --max-in-flight or --pause; or only --reset")
    if key == "":
        raise typer.BadParameter("KEY: must not be empty; leave it out for all keys without an own share")
    new_weight = parse_number("--weight", given["weight"], at_least=1, at_most=1_000)
    most = parse_number("--max-in-flight", given["max_in_flight"], at_least=0, at_most=MAX_RATE_COUNT)
    new_rate = None if rate is None else parse_rate(rate)
    with open_operator(options.settings) as operator:
        if sys.stdin.isatty():  # A script sets shares before the first messages.
            confirm_unknown(operator, "queue", queue, "share", yes=yes)
        changed = operator.set_fair_share(
            queue,
            key,
            weight=new_weight,
            max_in_flight=most,
            rate=new_rate,
            remove=[name for name in SHARE_VALUES if given[name] == "none"],
        )
        found = operator.list_fair_keys(queue, prefix=key, limit=1).keys if key is not None else []
    shown = [one for one in found if one.key == key]
    if options.as_json:
        print_json({"queue": queue, "fair_key": key, "changed": changed, "keys": [one._asdict() for one in shown]})
    elif shown:
        _print_keys(shown)
    else:
        of = "keys without an own share" if key is None else f"key {key}"
        print_line(f"queue {queue}, {of}: {'changed' if changed else 'unchanged'}")
    if key is not None and not any(one.due or one.in_flight for one in shown):
        print_warning(f"queue {queue} has no due message with the fair key {key!r}: check the name")


def _print_keys(found: list[FairKey]) -> None:
    rows = [
        (
            one.key,
            _capped(one.due),
            _capped(one.in_flight),
            None if one.oldest_due_seconds is None else duration(one.oldest_due_seconds),
            one.weight,
            one.limit,
            one.rate,
        )
        for one in found
    ]
    print_table(("key", "due", "in_flight", "oldest_due", "weight", "limit", "rate"), rows)


def _capped(count: int) -> str:
    return f"{count:,}+" if count >= FAIR_COUNTS["cap"] else f"{count:,}"
