"""The commands on queues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import typer
from psycopg.errors import InsufficientPrivilege

from pgoutbox.cli.arguments import MAX_RATE_COUNT, Dsn, Json, Yes, parse_count, parse_duration, parse_queue, parse_rate
from pgoutbox.cli.console import pluralize, print_json, print_line, print_table, print_warning
from pgoutbox.cli.program import (
    app,
    confirm_queue,
    describe_pause,
    open_operator,
    read_settings,
    require_known_queue,
)
from pgoutbox.database import operator_connection
from pgoutbox.errors import ConfigurationError
from pgoutbox.operations import Operator, QueueControls, Rate, activity


@app.command()
def pause(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE", help="Name of the queue.")],
    *,
    duration: Annotated[
        timedelta | None,
        typer.Option(
            "--for",
            parser=parse_duration,
            metavar="DURATION",
            help="Resume automatically after this time, such as 30m.",
        ),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Stop the claims of a queue.

    Messages in flight continue, and enqueuing is not affected. On a terminal it asks about a queue without messages.
    """
    with open_operator(read_settings(dsn)) as operator:
        confirm_queue(operator, queue, "pause", yes=yes)
        paused_at, resume_at = operator.pause(queue, duration=duration)
    if as_json:
        print_json({"queue": queue, "paused_at": paused_at, "resume_at": resume_at})
    else:
        print_line(f"queue {queue}: {describe_pause(paused_at, resume_at)}")


@app.command()
def resume(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE", help="Name of the queue.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Resume the claims of a paused queue.

    Prints the number of due messages, and warns if no running worker serves the queue.
    """
    settings = read_settings(dsn)
    with open_operator(settings) as operator:
        resumed = operator.resume(queue)
        if not resumed:
            require_known_queue(operator, queue)
    with operator_connection.connect(settings, read_only=True) as connection:
        due, is_served = activity.queue_supply(connection, queue)
    if as_json:
        print_json({"queue": queue, "resumed": resumed, "due": due, "is_served": is_served})
        return
    count = f"{due:,} or more messages" if due == activity.MAX_DUE else pluralize(due, "message")
    print_line(f"queue {queue}: {'resumed' if resumed else 'was not paused'}; due: {count}")
    if is_served is False:
        print_warning(f"no running worker serves queue {queue}; start one: pgoutbox worker --queue {queue}")


@app.command()
def limit(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE", help="Name of the queue.")],
    *,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Most attempts in any period, such as 20/s or 60/hour; or none.")
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_RATE_COUNT,
            help="Attempts of the rate that may begin at once (default: a tenth, 1 to 5; at least those of a second).",
        ),
    ] = None,
    in_flight: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Maximum number of attempts in flight; or none.")
    ] = None,
    at_most: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Most attempts in any period that operators may allow; or none. Only the schema's owner sets it.",
        ),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Limit a queue, for all workers together.

    Takes effect at once. Limits without an option stay unchanged. A rate above a new ceiling is lowered to it. On
    a terminal it asks about a queue without messages.
    """
    if rate is None and in_flight is None and at_most is None:
        raise typer.BadParameter("give --rate, --in-flight or --at-most")
    ceiling = None if at_most is None else parse_rate(at_most)
    new_rate = None if rate is None else parse_rate(rate)
    if burst is not None and new_rate is None:
        raise typer.BadParameter("--burst: only together with a --rate")
    max_in_flight = None if in_flight is None else parse_count(in_flight)
    with open_operator(read_settings(dsn)) as operator:
        if sys.stdin.isatty():  # A script limits queues before their first messages.
            confirm_queue(operator, queue, "limit", yes=yes)
        if at_most is not None:
            _limit_ceiling(operator, queue, ceiling)
        if rate is not None:
            operator.limit_rate(queue, new_rate, burst=burst)
        if in_flight is not None:
            operator.limit_in_flight(queue, max_in_flight)
        found = [q for q in operator.list_queues() if q.queue == queue]
    _print_queues(found, as_json=as_json)
    if not found and not as_json:
        print_line(f"queue {queue}: no limits")


def _limit_ceiling(operator: Operator, queue: str, at_most: Rate | None) -> None:
    try:
        operator.limit_ceiling(queue, at_most)
    except InsufficientPrivilege:
        raise ConfigurationError(
            "--at-most: only the owner of the schema may set a ceiling; give its login role with --dsn"
        ) from None


@app.command()
def queues(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the queues that are paused or limited."""
    with open_operator(read_settings(dsn), read_only=True) as operator:
        found = operator.list_queues()
    _print_queues(found, as_json=as_json)


def _print_queues(found: Sequence[QueueControls], *, as_json: bool) -> None:
    if as_json:
        print_json([q._asdict() for q in found])
    elif found:
        print_table(QueueControls._fields, found)
