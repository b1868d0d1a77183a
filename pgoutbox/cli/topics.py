"""The command `topics`."""

from __future__ import annotations

from typing import Final

from pgoutbox.catalogue import TopicFacts, describe_topics
from pgoutbox.cli.arguments import App, Dsn, Json, load_outbox
from pgoutbox.cli.console import print_json, print_note, print_table
from pgoutbox.cli.program import app, open_operator, print_paused_topics, print_topics, read_settings
from pgoutbox.operations import PausedTopic, TopicCounts
from pgoutbox.retry import UNREADABLE_TIMEOUT_SECONDS

_COLUMNS: Final = (
    *("topic", "queue", "payload", "destination", "computed", "attempts", "retry", "delay", "expires after"),
    *("options", "redact", "handler"),
)


@app.command()
def topics(*, where: App = None, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the topics of the application with their settings. With --json one document per topic.

    `computed` names the options that the definition computes from the payload. Without --app and PGOUTBOX_APP, the
    topics of the messages in the database are listed and counted, with their pauses; this reads all messages, and shows
    the 50 topics that are late for longest or have the most failed messages, with --json all.
    """
    settings = read_settings(dsn, app=where)
    if settings.app is None:
        with open_operator(settings, read_only=True) as operator:
            _print_counts(operator.count_messages(), operator.list_paused_topics(), as_json=as_json)
        return
    found = describe_topics(load_outbox(settings.app))
    if as_json:
        for facts in found:
            print_json(facts._asdict())
        return
    print_table(_COLUMNS, [_row(facts) for facts in found])


def _row(facts: TopicFacts) -> tuple[object, ...]:
    fixed = {**facts.options, "unreadable_timeout": facts.unreadable_timeout_seconds}
    if fixed["unreadable_timeout"] == UNREADABLE_TIMEOUT_SECONDS:
        del fixed["unreadable_timeout"]
    shown = {name: f"{value:g} s" if isinstance(value, float) else value for name, value in fixed.items()}
    destination, delay, expires_after = (shown.pop(name, None) for name in ("destination", "delay", "expires_after"))
    options = [f"{name}={value}" for name, value in shown.items() if value is not None]
    return (
        facts.topic,
        facts.queue,
        facts.payload,
        destination,
        ", ".join(facts.computed),
        facts.max_attempts,
        facts.retry,
        delay,
        expires_after,
        ", ".join([*options, *(["encrypted"] if facts.encrypted else ())]),
        ", ".join(facts.redact),
        facts.handler_text,
    )


def _print_counts(counts: list[TopicCounts], paused: list[PausedTopic], *, as_json: bool) -> None:
    print_note("these topics have messages in the database; --app or PGOUTBOX_APP lists those of the application")
    if not as_json:
        print_topics(("topic", "queue", "unfinished", "failed"), counts)
        print_paused_topics(paused)
        return
    pauses = {one.topic for one in paused}
    for c in counts:
        shown = {"topic": c.topic, "queue": c.queue, "unfinished": c.unfinished, "failed": c.failed}
        print_json({**shown, "is_paused": c.topic in pauses})
