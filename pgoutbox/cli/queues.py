"""The commands on queues, and on the pauses of topics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal

import typer
from psycopg.errors import InsufficientPrivilege

from pgoutbox.cli.arguments import (
    MAX_RATE_COUNT,
    Dsn,
    Json,
    Yes,
    duration_option,
    parse_count,
    parse_queue,
    parse_rate,
    parse_topic,
)
from pgoutbox.cli.console import print_json, print_line, print_result, print_table, print_warning
from pgoutbox.cli.program import (
    app,
    confirm_unknown,
    describe_pause,
    open_operator,
    print_paused_topics,
    read_settings,
    require_known_queue,
)
from pgoutbox.database import operator_connection
from pgoutbox.errors import ConfigurationError
from pgoutbox.operations import Operator, QueueControls, Rate, activity
from pgoutbox.text import pluralize

PausedQueue = Annotated[
    str | None, typer.Argument(parser=parse_queue, metavar="[QUEUE]", help="Name of the queue; or give --topic.")
]
OfTopic = Annotated[
    str | None,
    typer.Option("--topic", parser=parse_topic, metavar="TOPIC", help="In place of a queue: a topic, in all queues."),
]


@app.command()
def pause(
    queue: PausedQueue = None,
    *,
    topic: OfTopic = None,
    duration: Annotated[
        timedelta | None, duration_option("--for", "Resume automatically after this time, such as 30m.")
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Stop the claims of a queue or a topic.

    Messages in flight continue, and enqueuing is not affected. On a terminal it asks about a queue without messages,
    and about an unknown topic.
    """
    kind, name = _paused_one(queue, topic)
    with open_operator(read_settings(dsn)) as operator:
        confirm_unknown(operator, kind, name, "pause", yes=yes)
        act = operator.pause if kind == "queue" else operator.pause_topic
        paused_at, resume_at = act(name, duration=duration)
    document = {kind: name, "paused_at": paused_at, "resume_at": resume_at}
    print_result(document, f"{kind} {name}: {describe_pause(paused_at, resume_at)}", as_json=as_json)


@app.command()
def resume(
    queue: PausedQueue = None,
    *,
    topic: OfTopic = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Resume the claims of a paused queue or topic.

    Prints the number of due messages, and warns if no running worker serves the queue or the topic.
    """
    kind, name = _paused_one(queue, topic)
    settings = read_settings(dsn)
    with open_operator(settings) as operator:
        resumed = operator.resume(name) if kind == "queue" else operator.resume_topic(name)
        if not resumed and kind == "queue":
            require_known_queue(operator, name)
        elif not resumed and not operator.is_known_topic(name):
            raise ConfigurationError(f"no topic {name!r}: it is unknown to all workers and messages; check its name")
    with operator_connection.connect(settings, read_only=True) as connection:
        due, is_served = activity.supply(connection, queue=queue, topic=topic)
    if as_json:
        print_json({kind: name, "resumed": resumed, "due": due, "is_served": is_served})
        return
    count = f"{due:,} or more messages" if due == activity.MAX_DUE else pluralize(due, "message")
    print_line(f"{kind} {name}: {'resumed' if resumed else 'was not paused'}; due: {count}")
    if is_served is False:
        start = f"pgoutbox worker --queue {name}" if kind == "queue" else "pgoutbox worker, with a handler for it"
        print_warning(f"no running worker serves {kind} {name}; start one: {start}")


def _paused_one(queue: str | None, topic: str | None) -> tuple[Literal["queue", "topic"], str]:
    """Return what a pause is about, and its name."""
    if queue is not None and topic is None:
        return "queue", queue
    if topic is not None and queue is None:
        return "topic", topic
    raise typer.BadParameter("give a queue or --topic, and not both")


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
            confirm_unknown(operator, "queue", queue, "limit", yes=yes)
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
    """List the queues that are paused or limited.

    Warns of paused topics.
    """
    with open_operator(read_settings(dsn), read_only=True) as operator:
        found = operator.list_queues()
        paused_topics = operator.list_paused_topics()
    _print_queues(found, as_json=as_json)
    print_paused_topics(paused_topics)


def _print_queues(found: Sequence[QueueControls], *, as_json: bool) -> None:
    if as_json:
        print_json([q._asdict() for q in found])
    elif found:
        print_table(QueueControls._fields, found)
