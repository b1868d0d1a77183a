"""The commands that control delivery: queues, the pauses of topics, circuit breakers, and the redirect of e-mail."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Annotated, Literal

import typer
from psycopg.errors import InsufficientPrivilege

from pgoutbox.catalogue import names_of
from pgoutbox.cli.arguments import (
    MAX_RATE_COUNT,
    duration_option,
    load_outbox,
    parse_count,
    parse_queue,
    parse_rate,
    parse_topic,
)
from pgoutbox.cli.console import (
    FAILED,
    print_documents,
    print_error,
    print_json,
    print_line,
    print_table,
    print_warning,
)
from pgoutbox.cli.options import AppOptions, Options, Yes, command, open_operator
from pgoutbox.cli.program import (
    app,
    confirm_unknown,
    describe_pause,
    interruptible,
    print_paused_topics,
    require_known_queue,
    warn_of_unknown,
)
from pgoutbox.database import operator_connection
from pgoutbox.errors import ConfigurationError, PgOutboxError
from pgoutbox.operations import Operator, QueueControls, Rate, activity
from pgoutbox.text import pluralize

PausedQueue = Annotated[
    str | None, typer.Argument(parser=parse_queue, metavar="[QUEUE]", help="Name of the queue; or give --topic.")
]
OfTopic = Annotated[
    str | None,
    typer.Option("--topic", parser=parse_topic, metavar="TOPIC", help="In place of a queue: a topic, in all queues."),
]


@command()
def pause(
    queue: PausedQueue = None,
    *,
    topic: OfTopic = None,
    duration: Annotated[
        timedelta | None, duration_option("--for", "Resume automatically after this time, such as 30m.")
    ] = None,
    yes: Yes = False,
    options: AppOptions,
) -> None:
    """Stop the claims of a queue or a topic.

    Messages in flight continue, and enqueuing is not affected. On a terminal it asks about a queue without messages,
    and about an unknown topic. With --app or PGOUTBOX_APP, a warning lists the topic's other names (aliases) that are
    not paused.
    """
    kind, name = _paused_one(queue, topic)
    with open_operator(options.settings) as operator:
        confirm_unknown(operator, kind, name, "pause", yes=yes)
        act = operator.pause if kind == "queue" else operator.pause_topic
        paused_at, resume_at = act(name, duration=duration)
        paused = {one.topic for one in operator.list_paused_topics()} if kind == "topic" and options.app else set()
    document = {kind: name, "paused_at": paused_at, "resume_at": resume_at}
    options.print(document, f"{kind} {name}: {describe_pause(paused_at, resume_at)}")
    if name in paused:
        _warn_of_other_names(options.app, name, paused)


def _warn_of_other_names(where: str | None, topic: str, paused: Collection[str]) -> None:
    """Name the other names of a topic that are not paused. An application that fails must not prevent a pause."""
    try:
        names = names_of(load_outbox(where), topic)
    except PgOutboxError as error:
        print_warning(f"other names of topic {topic} are unknown: {error}")
        return
    if others := [name for name in names if name not in paused]:
        print_warning(
            f"messages with other names of topic {topic} are not paused: {', '.join(others)}; pause each name"
        )


@command()
def resume(
    queue: PausedQueue = None,
    *,
    topic: OfTopic = None,
    options: Options,
) -> None:
    """Resume the claims of a paused queue or topic.

    Prints the number of due messages, and warns if no running worker serves the queue or the topic.
    """
    kind, name = _paused_one(queue, topic)
    with open_operator(options.settings) as operator:
        resumed = operator.resume(name) if kind == "queue" else operator.resume_topic(name)
        if not resumed and kind == "queue":
            require_known_queue(operator, name)
        elif not resumed and not operator.is_known_topic(name):
            raise ConfigurationError(f"no topic {name!r}: it is unknown to all workers and messages; check its name")
    with operator_connection.connect(options.settings, read_only=True) as connection:
        due, is_served = activity.supply(connection, queue=queue, topic=topic)
    count = f"{due:,} or more messages" if due == activity.MAX_DUE else pluralize(due, "message")
    options.print(
        {kind: name, "resumed": resumed, "due": due, "is_served": is_served},
        f"{kind} {name}: {'resumed' if resumed else 'was not paused'}; due: {count}",
    )
    if is_served is False and not options.as_json:
        start = f"pgoutbox worker --queue {name}" if kind == "queue" else "pgoutbox worker, with a handler for it"
        print_warning(f"no running worker serves {kind} {name}; start one: {start}")


def _paused_one(queue: str | None, topic: str | None) -> tuple[Literal["queue", "topic"], str]:
    """Return what a pause is about, and its name."""
    if queue is not None and topic is None:
        return "queue", queue
    if topic is not None and queue is None:
        return "topic", topic
    raise typer.BadParameter("give a queue or --topic, and not both")


@command()
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
    options: Options,
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
    with open_operator(options.settings) as operator:
        if sys.stdin.isatty():  # A script limits queues before their first messages.
            confirm_unknown(operator, "queue", queue, "limit", yes=yes)
        if at_most is not None:
            _limit_ceiling(operator, queue, ceiling)
        if rate is not None:
            operator.limit_rate(queue, new_rate, burst=burst)
        if in_flight is not None:
            operator.limit_in_flight(queue, max_in_flight)
        found = [q for q in operator.list_queues() if q.queue == queue]
    _print_queues(found, options)
    if not found and not options.as_json:
        print_line(f"queue {queue}: no limits")


def _limit_ceiling(operator: Operator, queue: str, at_most: Rate | None) -> None:
    try:
        operator.limit_ceiling(queue, at_most)
    except InsufficientPrivilege:
        raise ConfigurationError(
            "--at-most: only the owner of the schema may set a ceiling; give its login role with --dsn"
        ) from None


@command()
def queues(options: Options) -> None:
    """List the queues that are paused or limited.

    Warns of paused topics.
    """
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.list_queues()
        paused_topics = operator.list_paused_topics()
    _print_queues(found, options)
    print_paused_topics(paused_topics)


def _print_queues(found: Sequence[QueueControls], options: Options) -> None:
    if options.as_json:
        print_json([q._asdict() for q in found])
    elif found:
        print_table(QueueControls._fields, found)


breaker_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List and close circuit breakers.")
app.add_typer(breaker_app, name="breaker")


@command("list", of=breaker_app)
def list_breakers(options: Options) -> None:
    """List the open circuit breakers, oldest first, at most 20."""
    with open_operator(options.settings, read_only=True) as operator:
        found = [breaker.redacted(options.settings.redacted_names) for breaker in operator.list_open_breakers()]
    if options.as_json:
        print_documents(found)
    elif found:
        rows = [(breaker.key, f"{breaker.open_seconds:.0f} s", breaker.last_error) for breaker in found]
        print_table(("breaker", "open for", "last error"), rows)
    else:
        print_line("all circuit breakers are closed")


@command(of=breaker_app)
def close(
    key: Annotated[str, typer.Argument(metavar="BREAKER", help="The breaker, as `pgoutbox breaker list` shows it.")],
    *,
    options: Options,
) -> None:
    """Close a circuit breaker, and send the messages that it postponed.

    The breaker opens again if the next sends fail.
    """
    with (
        open_operator(options.settings) as operator,
        interruptible("the breaker may be closed; run it again to send the rest"),
    ):
        closed = operator.close_breaker(key)
    if options.as_json:
        print_json({"breaker": key, **closed._asdict()})
    elif closed.was_open or closed.message_count:
        print_line(f"breaker {key}: closed; {closed.message_count} postponed messages are due")
    else:
        print_error(f"no open breaker has the name {key}; `pgoutbox breaker list` shows the open ones")
    if not (closed.was_open or closed.message_count):
        raise typer.Exit(FAILED)


redirect_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Redirect e-mail to testers, and show the redirects."
)
app.add_typer(redirect_app, name="redirect")


@command(of=redirect_app)
def show(options: Options) -> None:
    """Show the redirect of the operators, and the redirects and blackouts of workers."""
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.redirects()
    if options.as_json:
        print_json(found.as_json())
        return
    for line in found.warnings() or ["no redirect is on: e-mail goes to its real recipients"]:
        print_line(line)
    if found.blackout is not None and not found.warnings():
        print_line(f"the blackout {found.blackout} forbids to redirect it today")


@command("set", of=redirect_app)
def set_redirect(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An address, or @ and a domain.")],
    *,
    duration: Annotated[
        timedelta | None, duration_option("--for", "Switch it off automatically, such as after 2h.")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Only this topic; 'mail.user.*' stands for several (default: all). Repeatable.",
        ),
    ] = None,
    exempt_topics: Annotated[
        list[str] | None,
        typer.Option("--exempt-topic", metavar="TOPIC", help="Not this topic, in the same form. Repeatable."),
    ] = None,
    options: Options,
) -> None:
    """Redirect e-mail of all workers: all, that of some topics, or that of all but some.

    Waits for two seconds. Then no worker begins to hand this e-mail over to its real recipients.
    """
    with (
        open_operator(options.settings) as operator,
        interruptible("the redirect may be on; see `pgoutbox redirect show`"),
    ):
        warn_of_unknown(operator, "topic", topics or ())
        switched = operator.set_redirect(
            target, duration=duration, topics=topics or (), exempt_topics=exempt_topics or ()
        )
    until = "" if switched.until_at is None else f" until {switched.until_at.isoformat(timespec='seconds')}"
    options.print(switched._asdict(), f"{switched.mail} goes to {switched.target}{until}")


@command(of=redirect_app)
def off(options: Options) -> None:
    """Switch the redirect off, and send the messages that it held back.

    A redirect in the environment of a worker stays on.
    """
    with (
        open_operator(options.settings) as operator,
        interruptible("the redirect may be off; run it again to send the rest"),
    ):
        cleared = operator.clear_redirect()
        rest = operator.redirects()
    if options.as_json:
        print_json(cleared._asdict())
        return
    state = "off" if cleared.was_on else "was not on"
    print_line(f"redirect: {state}; {cleared.message_count} held-back messages are due")
    for line in rest.warnings():
        print_line(line)
    others = " of other workers" if rest.workers else ""
    print_line(f"e-mail{others} goes to its real recipients")
