"""The commands on messages and topics."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, assert_never

import typer
from pydantic import JsonValue

from pgoutbox.catalogue import TopicFacts, describe_topics, draft_message, find_topic
from pgoutbox.cli.arguments import duration_option, load_outbox, parse_header, parse_id, read_payload
from pgoutbox.cli.console import (
    FAILED,
    configure_logging,
    print_documents,
    print_error,
    print_fields,
    print_json,
    print_line,
    print_note,
    print_table,
    print_warning,
)
from pgoutbox.cli.databases import flat
from pgoutbox.cli.options import AppOptions, Everywhere, FilterOptions, InQueue, Limit, Options, command, open_operator
from pgoutbox.cli.program import (
    describe_pause,
    print_messages,
    print_paused_topics,
    print_topics,
    require_known_queue,
)
from pgoutbox.errors import ArgumentError
from pgoutbox.message import Outcome, Permanent, Sent, Skip, Snooze, Transient, Unavailable
from pgoutbox.operations import (
    FailureGroup,
    JsonText,
    ListedMessage,
    OpenBreaker,
    PausedTopic,
    QueueControls,
    Redirects,
    TopicCounts,
)
from pgoutbox.options import OnDuplicate, check_name
from pgoutbox.outbox import Outbox
from pgoutbox.redaction import redact_text
from pgoutbox.retry import UNREADABLE_TIMEOUT_SECONDS
from pgoutbox.settings import Settings
from pgoutbox.topics import Topic

_TOPIC_COLUMNS: Final = (
    *("topic", "queue", "payload", "destination", "computed", "attempts", "retry", "delay", "expires after"),
    *("options", "redact", "handler"),
)


@dataclass(frozen=True, kw_only=True)
class MessageOptions(AppOptions):
    """The arguments and options of a message that a person enqueues or sends."""

    topic: Annotated[str, typer.Argument(help="Topic of the message; selects the handler.")]
    payload: Annotated[str | None, typer.Argument(help="Payload as JSON (default: null); - reads it from stdin.")] = (
        None
    )
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", metavar="FILE", help="Read the payload from this file.")
    ] = None
    destination: Annotated[str | None, typer.Option(help="Receiver of the message, as a URI.")] = None
    given_headers: Annotated[
        list[Any] | None,
        typer.Option("--header", parser=parse_header, metavar="NAME=VALUE", help="Header of the message. Repeatable."),
    ] = None

    def value(self) -> JsonValue:
        """Return the payload."""
        if self.payload is not None and self.payload_file is not None:
            raise typer.BadParameter("give the payload as an argument or as --payload-file, not both")
        return read_payload(self.payload, self.payload_file, limit=self.settings.max_payload_bytes)

    def headers(self) -> dict[str, str] | None:
        """Return the headers; None if there are none."""
        headers = dict(self.given_headers or [])
        if len(headers) < len(self.given_headers or []):
            raise typer.BadParameter("--header: two headers have the same name")
        return headers or None


@command()
def enqueue(
    *,
    queue: Annotated[str | None, typer.Option(help="Queue of the message (default: default).")] = None,
    coalesce_key: Annotated[
        str | None, typer.Option(help="Only the newest message with this key is delivered.")
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option(help="At most one message with this key is pending, in flight, sent or failed.")
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None,
        typer.Option(
            help="If a message with another payload has the dedupe key: `error`, or `ignore` (default: error)."
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(help="Person or thing of the application to which the message belongs.")
    ] = None,
    delay: Annotated[timedelta | None, duration_option("--delay", "Earliest delivery, such as 15m from now.")] = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt the payload with PGOUTBOX_ENCRYPTION_KEYS.")
    ] = False,
    options: MessageOptions,
) -> None:
    """Enqueue one message and print its id.

    Uses its own transaction. Everyone on this machine can read the arguments: pass a confidential payload in a file.

    With --app or PGOUTBOX_APP, the topic's definition applies. It checks the payload, and gives queue, destination,
    keys, owner and policy. Options that it sets are refused, and so are unknown topics.

    The role of a producer is enough. With the role of an operator, the audit records the act.
    """
    settings, name = options.settings, options.topic
    value = options.value()
    outbox = Outbox(settings) if settings.app is None else load_outbox(settings.app)
    if settings.app is None:
        topic: Topic[Any] = Topic(check_name("topic", name), encrypted=encrypt)
    elif encrypt and not find_topic(outbox, name).encrypted:
        raise ArgumentError("encrypt", f"belongs to the definition of topic {name!r}; do not pass it")
    else:
        topic = find_topic(outbox, name)
    draft = draft_message(
        outbox,
        topic,
        value,
        queue=queue,
        destination=options.destination,
        coalesce_key=coalesce_key,
        dedupe_key=dedupe_key,
        on_duplicate=on_duplicate,
        owner=owner,
        delay=delay,
        headers=options.headers(),
    )
    with open_operator(settings) as operator:
        is_known = settings.app is not None or operator.is_known_topic(name)
        receipt = operator.enqueue(draft)
    if not is_known:
        print_warning(
            f"topic {name!r} is unknown to all workers and messages: check its name; --app checks it by its definition"
        )
    # Cron mails what a command writes to stderr: two hosts may enqueue the same message each day.
    options.print(receipt._asdict(), str(receipt.id))


@command()
def send(options: MessageOptions) -> None:
    """Run a topic's handler once, send what it returns, and print the outcome. Nothing is stored.

    For a test of handler, settings and mail server. There is no retry: use `pgoutbox enqueue` for a message that must
    arrive. Redirects and blackouts apply. A copy of the database sends nothing.

    Exits with 0 if it was sent, else with 1. Needs --app or PGOUTBOX_APP. The role of a producer is enough.
    """
    settings, topic = options.settings, options.topic
    value = options.value()
    outbox = load_outbox(settings.app)
    names = settings.redacted_names + find_topic(outbox, topic).redact
    configure_logging(settings, is_quiet=True)
    from pgoutbox.worker import send_directly

    outcome = send_directly(
        outbox, topic, value, destination=options.destination, headers=options.headers(), settings=settings
    )
    name, text = _told(outcome)
    if isinstance(outcome, Exception) and outcome.__cause__ is not None and not settings.error_texts:
        text = type(outcome.__cause__).__name__
    text = None if text is None else redact_text(text, names)
    if options.as_json or isinstance(outcome, Sent):
        options.print({"outcome": name, "error": text}, name)
    else:
        print_error(f"{name}: {text}" if text else name)
    if not isinstance(outcome, Sent):
        raise typer.Exit(FAILED)


def _told(outcome: Outcome) -> tuple[str, str | None]:
    """Return the name and the text of an outcome."""
    match outcome:
        case Sent():
            return "sent", None
        case Transient(error=error):
            return "transient", error
        case Unavailable(error=error):
            return "unavailable", error
        case Permanent(error=error):
            return "permanent", error
        case Skip(reason=reason):
            return "skipped", reason
        case Snooze(reason=reason):
            return "snoozed", reason
        case _:
            assert_never(outcome)


@command("list")
def list_messages(
    options: FilterOptions,
    *,
    limit: Limit = 50,
    before: Annotated[
        int | None, typer.Option(parser=parse_id, metavar="ID", help="Only messages older than this one.")
    ] = None,
    everywhere: Everywhere = False,
) -> None:
    """List messages, newest first. With --json one JSON document per line.

    Hides the same values as `pgoutbox show`. With --all-databases, the limit is that of each database.
    """
    names_of = options.redacted_names()
    if everywhere and before is not None:
        raise typer.BadParameter("--before: an id belongs to one database; omit --all-databases")

    def read(settings: Settings) -> list[ListedMessage]:
        with open_operator(settings, read_only=True) as operator:
            messages = operator.list_messages(options.filter(), before_id=before, limit=limit)
            if not messages and not everywhere:
                require_known_queue(operator, options.queue)
        return [message.redacted(names_of(message.topic)) for message in messages]

    with options.looking(read, everywhere=everywhere) as found:
        messages, databases = flat(found)
        if not messages and options.breaker:
            print_note("if no open breaker has this name, no message matches; `pgoutbox breaker list` shows them")
        if options.as_json:
            print_documents(messages, of=databases)
            return
        print_messages(messages, of=databases)
        for name, listed in found:
            if len(listed) == limit:
                more = "" if name is None else f"--database {name} "
                print_note(f"there may be more rows: {more}--before {listed[-1].id}")


@command()
def show(
    message_id: Annotated[int, typer.Argument(parser=parse_id, metavar="ID", help="Message id.")],
    *,
    whole: Annotated[
        bool, typer.Option("--whole", help="Show the full payload, headers, content and last error.")
    ] = False,
    options: AppOptions,
) -> None:
    """Show one message, its payload and its attempts.

    Shows the first 65,536 characters of payload, headers, the content of a fan-out and the last error. --whole and
    --json show all. JSON that Python cannot parse is shown as text.

    Hides encrypted payloads, values with names such as password or token, and names in PGOUTBOX_REDACT. With --app or
    PGOUTBOX_APP, it also hides the names that the topic redacts.
    """
    names_of = options.redacted_names()
    with open_operator(options.settings, read_only=True) as operator:
        message, attempts = operator.show_message(message_id, whole=whole or options.as_json)
    names = names_of(message.topic)
    fields = message.redacted(names)._asdict()
    attempts = [attempt.redacted(names) for attempt in attempts]
    if options.as_json:
        print_json(fields | {"attempts": [attempt._asdict() for attempt in attempts]})
        return
    fields |= {"waits": message.wait, "handled_as": None}
    for name in ("headers", "payload", "content"):
        value, size = fields[name], fields.pop(f"{name}_bytes")
        if isinstance(value, JsonText):
            if len(value) < size:
                print_note(f"{name}: the first {len(value):,} characters of {size:,} bytes; --whole shows all")
        elif name == "payload" or value is not None:
            fields[name] = json.dumps(
                value, ensure_ascii=False, indent=2 if name != "headers" and sys.stdout.isatty() else None
            )
    print_fields({name: value for name, value in fields.items() if value is not False})
    if attempts:
        print_line("")
        # Most attempts have neither a reason code nor a breaker.
        columns = [name for name in attempts[0]._fields if any(getattr(a, name) is not None for a in attempts)]
        if all(attempt.times == 1 for attempt in attempts):
            columns.remove("times")
        print_table(columns, [[getattr(a, name) for name in columns] for a in attempts])


@command()
def failures(
    *,
    topic: Annotated[str | None, typer.Option(help="Only messages of this topic.")] = None,
    since: Annotated[timedelta | None, duration_option("--since", "Only messages that failed this lately: 1d.")] = None,
    everywhere: Everywhere = False,
    options: AppOptions,
) -> None:
    """Show the failed messages by topic and cause, those with the most failures in the last hour first.

    Errors that differ only in addresses, quoted values, ids and numbers have one cause. To act on a group, pass it to
    redrive or dismiss as --group. `failed_again` counts messages that had failed before and were redriven. Reads the
    3,000 messages that failed last.
    """
    names_of = options.redacted_names()

    def read(settings: Settings) -> list[FailureGroup]:
        with open_operator(settings, read_only=True) as operator:
            groups = operator.list_failures(topic=topic, within=since)
        return [group.redacted(names_of(group.topic)) for group in groups]

    columns = (
        *("messages", "last_hour", "hour_before", "failed_again", "topic", "cause", "group", "place", "error"),
        *("first_at", "last_at", "newest_id"),
    )
    with options.looking(read, everywhere=everywhere) as found:
        groups, databases = flat(found)
        options.print_rows(columns, groups, of=databases)


class _Stats(NamedTuple):
    topics: list[TopicCounts]
    paused: list[QueueControls]
    paused_topics: list[PausedTopic]
    breakers: list[OpenBreaker]
    redirects: Redirects

    def as_json(self) -> dict[str, object]:
        return {
            "topics": [c._asdict() for c in self.topics],
            "paused": [{"queue": q.queue, "paused_at": q.paused_at, "resume_at": q.resume_at} for q in self.paused],
            "paused_topics": [topic._asdict() for topic in self.paused_topics],
            "breakers": [breaker._asdict() for breaker in self.breakers],
            "redirects": self.redirects.as_json(),
        }


@command()
def stats(*, queue: InQueue = None, everywhere: Everywhere = False, options: Options) -> None:
    """Count messages by topic; list paused queues, open circuit breakers and redirects.

    Shows the 50 topics that are late for longest or have the most failed messages, and with --json all.
    """

    def read(settings: Settings) -> _Stats:
        with open_operator(settings, read_only=True) as operator:
            breakers = [breaker.redacted(settings.redacted_names) for breaker in operator.list_open_breakers()]
            redirects = operator.redirects()
            counts = operator.count_messages(queue=queue)
            paused = [q for q in operator.list_queues() if q.paused_at and queue in (None, q.queue)]
            paused_topics = operator.list_paused_topics()
            if not counts and not everywhere:
                require_known_queue(operator, queue)
        return _Stats(counts, paused, paused_topics, breakers, redirects)

    with options.looking(read, everywhere=everywhere) as found:
        if options.as_json:
            for name, one in found:
                print_json(one.as_json() if name is None else {"database": name, **one.as_json()})
            return
        counts, databases = flat([(name, one.topics) for name, one in found])
        print_topics(TopicCounts._fields, counts, of=databases)
        for name, one in found:
            _warn_of_controls(one, "" if name is None else f"{name}: ")


def _warn_of_controls(one: _Stats, prefix: str) -> None:
    for redirect in one.redirects.warnings():
        print_warning(f"{prefix}{redirect}")
    for controls in one.paused:
        print_warning(f"{prefix}queue {controls.queue} is {describe_pause(controls.paused_at, controls.resume_at)}")
    print_paused_topics(one.paused_topics, prefix=prefix)
    for breaker in one.breakers:
        open_for = f"{breaker.open_seconds:.0f} s"
        print_warning(f"{prefix}circuit breaker {breaker.key} is open for {open_for}: {breaker.last_error}")


@command()
def topics(options: AppOptions) -> None:
    """List the topics of the application with their settings. With --json one document per topic.

    `computed` names the options that the definition computes from the payload. A former name (alias) is listed with the
    present one. Without --app and PGOUTBOX_APP, the
    topics of the messages in the database are listed and counted, with their pauses; this reads all messages, and shows
    the 50 topics that are late for longest or have the most failed messages, with --json all.
    """
    if options.app is None:
        with open_operator(options.settings, read_only=True) as operator:
            _print_topic_counts(operator.count_messages(), operator.list_paused_topics(), as_json=options.as_json)
        return
    found = describe_topics(load_outbox(options.app))
    if options.as_json:
        print_documents(found)
    else:
        print_table(_TOPIC_COLUMNS, [_topic_row(facts) for facts in found])


def _topic_row(facts: TopicFacts) -> tuple[object, ...]:
    fixed = {
        **facts.options,
        "mailing_list": facts.mailing_list,
        "unreadable_timeout": facts.unreadable_timeout_seconds,
    }
    if fixed["unreadable_timeout"] == UNREADABLE_TIMEOUT_SECONDS:
        del fixed["unreadable_timeout"]
    shown = {name: f"{value:g} s" if isinstance(value, float) else value for name, value in fixed.items()}
    destination, delay, expires_after = (shown.pop(name, None) for name in ("destination", "delay", "expires_after"))
    options = [f"{name}={value}" for name, value in shown.items() if value is not None]
    return (
        facts.topic if facts.present_name is None else f"{facts.topic} (now {facts.present_name})",
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


def _print_topic_counts(counts: list[TopicCounts], paused: list[PausedTopic], *, as_json: bool) -> None:
    print_note("these topics have messages in the database; --app or PGOUTBOX_APP lists those of the application")
    if not as_json:
        print_topics(("topic", "queue", "unfinished", "failed"), counts)
        print_paused_topics(paused)
        return
    pauses = {one.topic for one in paused}
    for c in counts:
        shown = {"topic": c.topic, "queue": c.queue, "unfinished": c.unfinished, "failed": c.failed}
        print_json({**shown, "is_paused": c.topic in pauses})
