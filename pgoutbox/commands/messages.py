"""The commands on messages."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psycopg
import typer

from pgoutbox import operations, session
from pgoutbox.arguments import (
    App,
    Dsn,
    InQueue,
    InTopic,
    Json,
    MessageId,
    Yes,
    parse_duration,
    parse_header,
    parse_id,
    read_payload,
)
from pgoutbox.commands.program import (
    app,
    confirm,
    describe_pause,
    interruptible,
    read_settings,
    redacted_names_of,
    require_known_queue,
    shorten,
)
from pgoutbox.console import (
    FAILED,
    print_error,
    print_fields,
    print_json,
    print_line,
    print_note,
    print_table,
    print_warning,
    progress,
)
from pgoutbox.drafts import Topic, check_name
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.message import State
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings

if TYPE_CHECKING:
    from psycopg.rows import TupleRow


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
    dedupe_key: Annotated[str | None, typer.Option(help="There is at most one message of a key.")] = None,
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
    with session.connect(settings) as connection:
        receipt = session.transact(
            connection,
            lambda: outbox.enqueue(
                connection,
                definition,
                value,
                queue=queue,
                destination=destination,
                coalesce_key=coalesce_key,
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
    states: Annotated[
        list[State] | None, typer.Option("--state", help="Only messages in this state; may be repeated.")
    ] = None,
    topic: InTopic = None,
    queue: InQueue = None,
    destination: Annotated[str | None, typer.Option(help="Only messages to this destination.")] = None,
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
    settings = read_settings(dsn, app=where)
    names_of = redacted_names_of(settings)
    with session.connect(settings, read_only=True) as connection:
        messages = operations.list_messages(
            connection,
            operations.MessageFilter(states=states or (), topic=topic, queue=queue, destination=destination),
            before_id=before,
            limit=limit,
        )
        if not messages:
            require_known_queue(connection, queue)
    messages = [operations.redact_listed(message, names_of(message.topic)) for message in messages]
    if as_json:
        for message in messages:
            print_json(message._asdict())
        return
    print_table(
        ("id", "state", "topic", "queue", "destination", "attempts", "created", "available", "reason"),
        [
            (
                m.id,
                m.state,
                m.topic,
                m.queue,
                m.destination,
                f"{m.attempt_count}/{m.max_attempts}",
                m.created_at,
                m.available_at,
                shorten(m.skip_reason or m.last_error),
            )
            for m in messages
        ],
    )
    if len(messages) == limit:
        print_note(f"there may be more: --before {messages[-1].id}")


@app.command()
def show(
    message_id: MessageId,
    *,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show one message, its payload and its attempts.

    Of the attempts, those that did not end sent. Hidden are encrypted payloads, values under names such as password or
    token, those that PGOUTBOX_REDACT names, and with --app or PGOUTBOX_APP those that the topic names.
    """
    settings = read_settings(dsn, app=where)
    names_of = redacted_names_of(settings)
    with session.connect(settings, read_only=True) as connection:
        message, attempts = operations.show_message(connection, message_id)
    names = names_of(message.topic)
    fields = operations.redact_message(message, names)._asdict()
    attempts = [operations.redact_attempt(attempt, names) for attempt in attempts]
    if as_json:
        print_json(fields | {"attempts": [attempt._asdict() for attempt in attempts]})
        return
    if fields["headers"] is not None:
        fields["headers"] = json.dumps(fields["headers"], ensure_ascii=False)
    fields["payload"] = json.dumps(fields["payload"], ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
    print_fields(fields)
    if attempts:
        print_line("")
        print_table(attempts[0]._fields, attempts)


@app.command()
def stats(*, queue: InQueue = None, dsn: Dsn = None, as_json: Json = False) -> None:
    """Count the messages; name the paused queues."""
    with session.connect(read_settings(dsn), read_only=True) as connection:
        counts = operations.count_messages(connection, queue=queue)
        paused = [q for q in operations.list_queues(connection) if q.paused_at and queue in (None, q.queue)]
        if not counts:
            require_known_queue(connection, queue)
    if as_json:
        print_json(
            {
                "topics": [c._asdict() for c in counts],
                "paused": [{"queue": q.queue, "paused_at": q.paused_at, "resume_at": q.resume_at} for q in paused],
            }
        )
        return
    print_table(operations.TopicCounts._fields, counts)
    for controls in paused:
        print_warning(f"queue {controls.queue} is {describe_pause(controls.paused_at, controls.resume_at)}")


@app.command()
def redrive(
    message_ids: Annotated[
        list[int] | None, typer.Argument(parser=parse_id, metavar="[ID]...", help="Failed or cancelled messages.")
    ] = None,
    *,
    all_failed: Annotated[bool, typer.Option("--all-failed", help="Every failed message that matches.")] = False,
    topic: InTopic = None,
    queue: InQueue = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make failed and cancelled messages pending again.

    Each gets as many attempts as it was enqueued with. Refused for one that a newer message supersedes.
    """
    if all_failed == bool(message_ids):
        raise typer.BadParameter("give message ids, or --all-failed")
    if not all_failed and (topic or queue):
        raise typer.BadParameter("--topic and --queue select among --all-failed")
    settings = read_settings(dsn)
    if all_failed:
        confirm("redrive every failed message", yes=yes or bool(topic or queue))
        _redrive_all_failed(settings, topic=topic, queue=queue, as_json=as_json)
        return
    with session.connect(settings) as connection:
        answers = operations.redrive(connection, message_ids or ())
    for answer in answers:
        if as_json:
            print_json({"id": answer.id, "redriven": answer.refusal is None, "refusal": answer.refusal})
        elif answer.refusal is None:
            print_line(f"message {answer.id}: pending again")
        else:
            print_error(f"message {answer.id}: {answer.refusal}")
    if any(answer.refusal is not None for answer in answers):
        raise typer.Exit(FAILED)


def _redrive_all_failed(settings: Settings, *, topic: str | None, queue: str | None, as_json: bool) -> None:
    which = operations.MessageFilter(topic=topic, queue=queue)
    with (
        session.connect(settings) as connection,
        interruptible("what was redriven so far stays so; run it again for the rest"),
        progress("redriving") as report,
    ):
        totals = operations.redrive_matching(connection, which, progress=report)
        if totals == operations.RedriveTotals(0, 0, 0):
            require_known_queue(connection, queue)
    if as_json:
        print_json({"redriven": totals.redriven, "superseded": totals.superseded, "locked": totals.locked})
    else:
        print_line(f"{totals.redriven} redriven, {totals.superseded} left alone as superseded, {totals.locked} locked")
    if totals.locked:
        raise typer.Exit(FAILED)


@app.command()
def resend(message_id: MessageId, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """Send a copy of a sent message; print its id."""
    with session.connect(read_settings(dsn)) as connection:
        copy_id = operations.resend(connection, message_id)
    if as_json:
        print_json({"id": copy_id, "resend_of": message_id})
    else:
        print_line(str(copy_id))


@app.command()
def cancel(
    message_id: Annotated[int | None, typer.Argument(parser=parse_id, metavar="[ID]", help="The message.")] = None,
    *,
    topic: Annotated[str | None, typer.Option(help="The topic of the key.")] = None,
    coalesce_key: Annotated[str | None, typer.Option(help="Cancel the newest message of this key.")] = None,
    dedupe_key: Annotated[str | None, typer.Option(help="Cancel the message of this key.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Cancel a message.

    One in flight is told to stop, and is not retried.
    """
    keys = [key for key in (coalesce_key, dedupe_key) if key is not None]
    if (message_id is None) != (topic is not None and len(keys) == 1) or (message_id is not None and (topic or keys)):
        raise typer.BadParameter("give an ID, or --topic with --coalesce-key or --dedupe-key")
    with session.connect(read_settings(dsn)) as connection:
        if message_id is not None:
            met = operations.cancel(connection, message_id)
        else:
            met = _cancel_by_key(connection, str(topic), coalesce_key, dedupe_key)
    if met.result == "missing":
        raise MessageNotFoundError(f"no such message: {met.id}")
    if as_json:
        print_json(met._asdict())
    elif met.result == "cancelled":
        print_line(f"message {met.id}: cancelled")
    elif met.result == "requested":
        print_line(f"message {met.id}: in flight; it is told to stop, and is not retried")
    if met.result not in ("cancelled", "requested"):
        state = "locked by another transaction; try again" if met.result == "locked" else f"already {met.result}"
        raise StateError(f"message {met.id}: {state}")


def _cancel_by_key(
    connection: psycopg.Connection[TupleRow], topic: str, coalesce_key: str | None, dedupe_key: str | None
) -> operations.Cancelled:
    found = operations.cancel_by_key(connection, topic, coalesce_key=coalesce_key, dedupe_key=dedupe_key)
    if not found:
        raise MessageNotFoundError(f"no message of topic {topic!r} has this key")
    return found[0]
