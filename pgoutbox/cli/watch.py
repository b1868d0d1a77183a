"""The commands `top`, `workers` and `tail`: the backlog, the workers and the outcomes of attempts."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from pgoutbox.cli.arguments import duration_option
from pgoutbox.cli.console import cell, live_tables, print_json, print_line
from pgoutbox.cli.databases import flat
from pgoutbox.cli.options import AppOptions, Everywhere, InQueue, InTopic, Options, command
from pgoutbox.cli.program import shorten, worst_topics
from pgoutbox.database import operator_connection
from pgoutbox.doctor import Finding, examine_delivery
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.operations import activity
from pgoutbox.redaction import redact_text
from pgoutbox.settings import Settings

Every = Annotated[float, typer.Option("--every", min=0.2, max=3_600, help="Refresh interval in seconds.")]
Count = Annotated[int | None, typer.Option("--count", min=1, help="Number of refreshes (default: unlimited).")]

_PROBLEMS = 5
_OUTCOMES = sorted({outcome.value for outcome in AttemptOutcome} | {State.SENT.value})


@command()
def top(*, queue: InQueue = None, every: Every = 2.0, count: Count = None, options: Options) -> None:
    """Watch the problems of delivery, the backlog by topic, and the workers.

    Runs until Ctrl-C. Without a terminal and with --json, each refresh is appended; with --json as one document. Shows
    the 50 topics that are late for longest or have the most failed messages, and with --json all.
    """
    with (
        operator_connection.connect(options.settings, read_only=True) as connection,
        contextlib.suppress(KeyboardInterrupt),
        live_tables() as show,
    ):
        for _ in _refreshes(every, count):
            problems = examine_delivery(connection, options.settings)
            topics = activity.topic_activity(connection, queue=queue)
            found = activity.list_workers(connection)
            if options.as_json:
                print_json(
                    {
                        "problems": [asdict(problem) for problem in problems],
                        "topics": [t._asdict() for t in topics],
                        "workers": [w._asdict() for w in found],
                    }
                )
            else:
                show(
                    [
                        (("level", "what"), _most_urgent(problems)),
                        (activity.TopicActivity._fields, _worst(topics)),
                        (activity.WorkerActivity._fields, [[shorten(cell(value)) for value in w] for w in found]),
                    ]
                )


@command()
def workers(*, everywhere: Everywhere = False, options: Options) -> None:
    """List the workers with their queues and topics. With --json one document per line.

    A worker reports them once a minute. The last runs with --once or --drain are listed too, with ended_at. The columns
    connected_at and address are empty behind a pooler, and for other roles if the role does not have pg_read_all_stats.
    """

    def read(settings: Settings) -> list[activity.WorkerActivity]:
        with operator_connection.connect(settings, read_only=True) as connection:
            return activity.list_workers(connection)

    with options.looking(read, everywhere=everywhere) as found:
        rows, databases = flat(found)
        if rows or options.as_json:
            options.print_rows(activity.WorkerActivity._fields, rows, of=databases)
        else:
            print_line("no worker runs or holds a message")


@command()
def tail(
    *,
    topic: InTopic = None,
    queue: InQueue = None,
    outcomes: Annotated[
        list[str] | None, typer.Option("--outcome", metavar="OUTCOME", help="Only this outcome. Repeatable.")
    ] = None,
    since: Annotated[
        timedelta | None, duration_option("--since", "Start with the attempts that ended in the last DURATION.")
    ] = None,
    every: Every = 1.0,
    count: Count = None,
    options: AppOptions,
) -> None:
    """Print the outcomes of attempts as they end.

    Runs until Ctrl-C. With --json one document per line. Outcomes are sent, retry, failed, skipped, cancelled, snoozed,
    released and lost.
    """
    for outcome in outcomes or ():
        if outcome not in _OUTCOMES:
            raise typer.BadParameter(f"--outcome {outcome}: must be one of {', '.join(_OUTCOMES)}")
    names_of = options.redacted_names()
    with (
        operator_connection.connect(options.settings, read_only=True) as connection,
        contextlib.suppress(KeyboardInterrupt),
    ):
        follower = activity.Follower(
            connection, since=since or timedelta(), topic=topic, queue=queue, outcomes=outcomes or ()
        )
        for _ in _refreshes(every, count):
            for row in follower.poll():
                names = names_of(row.topic)
                seen = row._replace(
                    destination=None if row.destination is None else redact_text(row.destination, names),
                    reason=None if row.reason is None else redact_text(row.reason, names),
                )
                if options.as_json:
                    print_json(seen._asdict())
                else:
                    print_line(_line(seen))
            sys.stdout.flush()


def _line(row: activity.OutcomeRow) -> str:
    words = [
        row.ended_at.isoformat(sep=" ", timespec="milliseconds"),
        f"{row.outcome:<9}",
        f"message {row.message_id}",
        f"attempt {row.attempt_count}",
        f"{row.queue}/{row.topic}",
        row.destination or "",
        shorten(row.reason) or "",
    ]
    return " ".join(word for word in words if word)


def _most_urgent(problems: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return the first problems, so that the other tables stay in view."""
    shown = [(str(problem.level), problem.what) for problem in problems[:_PROBLEMS]]
    more = len(problems) - len(shown)
    return [*shown, ("", f"and {more} more: pgoutbox doctor names them all, with remedies")] if more else shown


def _worst(topics: Sequence[activity.TopicActivity]) -> list[Sequence[object]]:
    """Return the rows of the topics in most need of a look, and the number of the others."""
    shown, more = worst_topics(topics)
    return [*shown, [f"and {more:,} more", *[""] * (len(activity.TopicActivity._fields) - 1)]] if more else [*shown]


def _refreshes(every: float, count: int | None) -> Iterator[int]:
    """Yield the number of each refresh, and sleep between two."""
    for number in itertools.islice(itertools.count(), count):
        if number:
            time.sleep(every)
        yield number
