"""The commands on messages."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgoutbox.cli.arguments import (
    App,
    Dsn,
    InQueue,
    InStates,
    InTopic,
    Json,
    MessageId,
    Since,
    ToDestination,
    Until,
    WithKey,
    WithText,
    parse_duration,
    parse_header,
    parse_id,
    read_payload,
)
from pgoutbox.cli.console import print_fields, print_json, print_line, print_note, print_table, print_warning
from pgoutbox.cli.program import (
    app,
    describe_pause,
    print_messages,
    read_settings,
    redacted_names_of,
    require_known_queue,
)
from pgoutbox.database import operator_connection
from pgoutbox.operations import breakers, queue_controls
from pgoutbox.operations import messages as operations
from pgoutbox.options import check_name
from pgoutbox.outbox import Outbox
from pgoutbox.topics import CoalesceRule, Topic

if TYPE_CHECKING:
    pass


@app.command()
def enqueue(
    topic: Annotated[str, typer.Argument(help="What the message is; picks the handler.")],
    payload: Annotated[
        str | None, typer.Argument(help="JSON; `-` reads it from stdin. The JSON value null if not given.")
    ] = None,
    *,
    payload_file: Annotated[
        Path | None, typer.Option("--payload-file", metavar="FILE", help="Read the JSON from this file.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Who works on it; `default` if not given.")] = None,
    destination: Annotated[str | None, typer.Option(help="Where it goes, as a URI.")] = None,
    coalesce_key: Annotated[str | None, typer.Option(help="Only the newest message of a key is delivered.")] = None,
    coalesce_rule: Annotated[
        CoalesceRule | None,
        typer.Option(help="`pending` locks nothing and delivers the newest due message; default `newest`."),
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option(help="At most one message of a key is owed, sent or failed.")
    ] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=parse_duration, metavar="DURATION", help="Not before, such as 15m.")
    ] = None,
    headers: Annotated[
        list[Any] | None,
        typer.Option("--header", parser=parse_header, metavar="NAME=VALUE", help="A header; may be repeated."),
    ] = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Store the payload encrypted with PGOUTBOX_ENCRYPTION_KEYS.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Enqueue one message and print its id.

    In a transaction of its own. Everyone on this machine can read the arguments: pass what is confidential in a file.
    """
    settings = read_settings(dsn)
    if payload is not None and payload_file is not None:
        raise typer.BadParameter("give the payload as an argument or as --payload-file, not both")
    value = read_payload(payload, payload_file, limit=settings.max_payload_bytes)
    names = [name for name, _ in headers or []]
    if len(set(names)) < len(names):
        raise typer.BadParameter("a header is given twice")
    outbox = Outbox(settings)
    definition: str | Topic[Any] = Topic(check_name("topic", topic), encrypted=True) if encrypt else topic
    with operator_connection.connect(settings) as connection:
        receipt = operator_connection.transact(
            connection,
            lambda: outbox.enqueue(
                connection,
                definition,
                value,
                queue=queue,
                destination=destination,
                coalesce_key=coalesce_key,
                coalesce_rule=coalesce_rule,
                dedupe_key=dedupe_key,
                delay=delay,
                headers=dict(headers or []) or None,
            ),
        )
    if as_json:
        print_json(receipt._asdict())
        return
    if receipt.duplicate:
        print_note("a message with this dedupe key exists already")
    print_line(str(receipt.id))


@app.command("list")
def list_messages(
    *,
    states: InStates = None,
    topic: InTopic = None,
    queue: InQueue = None,
    destination: ToDestination = None,
    key: WithKey = None,
    text: WithText = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, at most.")] = 50,
    before: Annotated[
        int | None, typer.Option(parser=parse_id, metavar="ID", help="Only messages older than this one.")
    ] = None,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List messages, newest first. With --json one JSON document per line.

    What `pgoutbox show` hides is hidden here too.
    """
    which = operations.MessageFilter(
        states=states or (),
        topic=topic,
        queue=queue,
        destination=destination,
        key=key,
        text=text,
        created_from=since,
        created_before=until,
    )
    settings = read_settings(dsn, app=where)
    names_of = redacted_names_of(settings)
    with operator_connection.connect(settings, read_only=True) as connection:
        messages = operations.list_messages(connection, which, before_id=before, limit=limit)
        if not messages:
            require_known_queue(connection, queue)
    messages = [operations.redact_listed(message, names_of(message.topic)) for message in messages]
    if as_json:
        for message in messages:
            print_json(message._asdict())
        return
    print_messages(messages)
    if len(messages) == limit:
        print_note(f"there may be more: --before {messages[-1].id}")


@app.command()
def show(
    message_id: MessageId,
    *,
    whole: Annotated[
        bool, typer.Option("--whole", help="Show all attempts, and payload, headers and errors in full.")
    ] = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show one message, its payload and its attempts.

    Of the attempts, the newest 100 that did not end sent; of payload, headers and each error the first 65,536
    characters. --whole and --json show all. JSON that Python cannot read is shown as text.

    Hidden are encrypted payloads, values under names such as password or token, those that PGOUTBOX_REDACT names, and
    with --app or PGOUTBOX_APP those that the topic names.
    """
    settings = read_settings(dsn, app=where)
    names_of = redacted_names_of(settings)
    with operator_connection.connect(settings, read_only=True) as connection:
        message, attempts = operations.show_message(connection, message_id, whole=whole or as_json)
    names = names_of(message.topic)
    fields = operations.redact_message(message, names)._asdict()
    attempts = [operations.redact_attempt(attempt, names) for attempt in attempts]
    if as_json:
        print_json(fields | {"attempts": [attempt._asdict() for attempt in attempts]})
        return
    for name in ("headers", "payload"):
        value, size = fields[name], fields.pop(f"{name}_bytes")
        if isinstance(value, operations.JsonText):
            if len(value) < size:
                print_note(f"{name}: the first {len(value):,} characters of {size:,} bytes; --whole shows all")
        elif name == "payload" or value is not None:
            fields[name] = json.dumps(
                value, ensure_ascii=False, indent=2 if name == "payload" and sys.stdout.isatty() else None
            )
    if (older := fields.pop("attempt_rows") - len(attempts)) > 0:
        print_note(f"{older:,} older attempts are left out; --whole shows all")
    print_fields(fields)
    if attempts:
        print_line("")
        # Most attempts have neither a reason code nor a breaker.
        columns = [name for name in attempts[0]._fields if any(getattr(a, name) is not None for a in attempts)]
        print_table(columns, [[getattr(a, name) for name in columns] for a in attempts])


@app.command()
def stats(*, queue: InQueue = None, dsn: Dsn = None, as_json: Json = False) -> None:
    """Count the messages; name the paused queues and the open circuit breakers."""
    settings = read_settings(dsn)
    with operator_connection.connect(settings, read_only=True) as connection:
        open_breakers = breakers.list_open_breakers(connection, names=settings.redacted_names)
        counts = operations.count_messages(connection, queue=queue)
        paused = [q for q in queue_controls.list_queues(connection) if q.paused_at and queue in (None, q.queue)]
        if not counts:
            require_known_queue(connection, queue)
    if as_json:
        print_json(
            {
                "topics": [c._asdict() for c in counts],
                "paused": [{"queue": q.queue, "paused_at": q.paused_at, "resume_at": q.resume_at} for q in paused],
                "breakers": [breaker._asdict() for breaker in open_breakers],
            }
        )
        return
    print_table(operations.TopicCounts._fields, counts)
    for controls in paused:
        print_warning(f"queue {controls.queue} is {describe_pause(controls.paused_at, controls.resume_at)}")
    for breaker in open_breakers:
        print_warning(f"circuit breaker {breaker.key} is open for {breaker.open_seconds:.0f} s: {breaker.last_error}")
