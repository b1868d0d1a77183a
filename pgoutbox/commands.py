"""The commands of the command line: each reads its arguments, calls one function below it and writes the answer.

Data goes to stdout, everything else to stderr. What a command refuses it raises as a `PgOutboxError`, which `cli` turns
into one line and an exit code.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import psycopg
import typer

from pgoutbox import maintenance, operations, session
from pgoutbox import migrate as migrations
from pgoutbox.arguments import (
    MAX_RATE_COUNT,
    App,
    Dsn,
    InQueue,
    InTopic,
    Json,
    MessageId,
    RuleState,
    RuleTopic,
    Yes,
    format_keep,
    load_outbox,
    parse_count,
    parse_duration,
    parse_final_state,
    parse_header,
    parse_id,
    parse_keep,
    parse_queue,
    parse_rate,
    read_payload,
)
from pgoutbox.console import (
    FAILED,
    INTERRUPTED,
    MISUSED,
    configure_logging,
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
from pgoutbox.errors import ConfigurationError, MessageNotFoundError, StateError
from pgoutbox.message import FINAL_STATES, State
from pgoutbox.outbox import Outbox
from pgoutbox.settings import ENVIRONMENT_PREFIX, Settings, load_settings
from pgoutbox.web.command import web_app

if TYPE_CHECKING:
    from psycopg.rows import TupleRow

# Set by the supervisor of worker processes, which has warned already, and by those who run pgoutbox's own tests.
_SUPERVISED: Final = f"{ENVIRONMENT_PREFIX}SUPERVISOR_FD"
_TEST_PREFIX: Final = f"{ENVIRONMENT_PREFIX}TEST_"

app = typer.Typer(
    help="Transactional outbox on PostgreSQL. The database is the one that PGOUTBOX_DSN names.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
migrate_app = typer.Typer(rich_markup_mode=None)
app.add_typer(migrate_app, name="migrate")
retention_app = typer.Typer(rich_markup_mode=None)
app.add_typer(retention_app, name="retention")
app.add_typer(web_app, name="web")


# The schema.


@migrate_app.callback(invoke_without_command=True)
def migrate(
    context: typer.Context,
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL script instead of running it.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create or upgrade the schema pgoutbox.

    One transaction; nothing to do if the schema is up to date.
    """
    context.obj = dsn
    if context.invoked_subcommand is not None:
        return
    if sql:
        sys.stdout.write(migrations.upgrade_sql())
        return
    target = _settings(dsn).require_dsn()
    with _interruptible("nothing was changed; run `pgoutbox migrate` again"):
        before = migrations.current(target)
        migrations.upgrade(target, report=print_note)
        _print_revision(before, migrations.current(target), as_json=as_json)


@migrate_app.command()
def downgrade(
    context: typer.Context,
    revision: Annotated[str, typer.Argument(help="Where to go back to; `base` removes the schema and every message.")],
    *,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Take revisions back, in one transaction."""
    target = _settings(dsn or context.obj).require_dsn()
    _confirm(f"take the schema back to {revision}, with the data of the later revisions", yes=yes)
    with _interruptible("nothing was changed; run it again"):
        before = migrations.current(target)
        migrations.downgrade(target, revision, report=print_note)
        _print_revision(before, migrations.current(target), as_json=as_json)


@migrate_app.command()
def current(context: typer.Context, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """Print the revision of the database, and the newest one that this version brings."""
    revision, newest = migrations.current(_settings(dsn or context.obj).require_dsn()), migrations.head()
    if as_json:
        print_json({"revision": revision, "head": newest})
    else:
        print_line(f"{revision or 'not migrated'} ({'up to date' if revision == newest else f'newest: {newest}'})")


def _print_revision(before: str | None, after: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"before": before, "revision": after})
    elif before == after:
        print_line(f"schema pgoutbox: nothing to do, at {after or 'base'}")
    else:
        print_line(f"schema pgoutbox: {before or 'base'} -> {after or 'base'}")


# The worker.


@app.command()
def worker(
    *,
    where: App = None,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME[:WEIGHT]", help="A queue to work on, in this order or by these weights."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Worker processes to supervise.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Attempts under way at once in one process.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Work off what is due, then exit.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="Work off what is due and its retries, then exit.")] = False,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Poll instead of waiting for NOTIFY (behind a transaction pooler).")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name in the column worker; host and process if not given.")] = None,
    dsn: Dsn = None,
) -> None:
    """Claim messages and run their handlers.

    Until SIGTERM or SIGINT, which wait for the handlers under way; a second one does not.
    """
    if once and drain:
        raise typer.BadParameter("--once and --drain exclude each other")
    if processes > 1 and (once or drain):
        raise typer.BadParameter("--processes supervises workers that run on; it excludes --once and --drain")
    from pgoutbox.processes import run_worker
    from pgoutbox.worker import parse_queues

    settings = _settings(dsn, app=where, concurrency=concurrency, listen=False if no_listen else None, worker_name=name)
    settings.require_dsn()
    shares = parse_queues(queues or ())
    if settings.app is None:
        raise ConfigurationError("no outbox given: set PGOUTBOX_APP, or pass --app module:attribute")
    outbox = load_outbox(settings.app)
    configure_logging(settings)
    _warn_of_unknown_queues(settings, [share.name for share in shares] if queues else [])
    if processes > 1:
        raise typer.Exit(_supervise(settings, queues or [], processes, dsn=dsn))
    mode: Literal["run", "once", "drain"] = "once" if once else "drain" if drain else "run"
    raise typer.Exit(run_worker(outbox, settings, queues=shares, mode=mode))


def _supervise(settings: Settings, queues: Sequence[str], processes: int, *, dsn: str | None) -> int:
    from pgoutbox.processes import supervise

    if dsn is not None:
        # The children inherit it here, out of everyone's sight.
        os.environ["PGOUTBOX_DSN"] = dsn
    arguments = ["--app", str(settings.app), "--concurrency", str(settings.concurrency)]
    for queue in queues:
        arguments += ["--queue", queue]
    if not settings.listen:
        arguments.append("--no-listen")
    if settings.worker_name is not None:
        arguments += ["--name", settings.worker_name]
    return supervise(arguments, processes)


def _warn_of_unknown_queues(settings: Settings, queues: list[str]) -> None:
    # A queue that is new has no messages yet, so this is no error. A server that is away is the worker's to wait for.
    if not queues:
        return
    with contextlib.suppress(psycopg.Error), session.connect(settings, read_only=True) as connection:
        for queue in operations.unknown_queues(connection, queues):
            print_warning(f"queue {queue!r} has no messages so far; {_known_queues(connection)}")


# Messages.


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
    settings = _settings(dsn)
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
    settings = _settings(dsn, app=where)
    names_of = _redacted_names(settings)
    with session.connect(settings, read_only=True) as connection:
        messages = operations.list_messages(
            connection,
            operations.MessageFilter(states=states or (), topic=topic, queue=queue, destination=destination),
            before_id=before,
            limit=limit,
        )
        if not messages:
            _require_known_queue(connection, queue)
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
                _shorten(m.skip_reason or m.last_error),
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
    settings = _settings(dsn, app=where)
    names_of = _redacted_names(settings)
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
    with session.connect(_settings(dsn), read_only=True) as connection:
        counts = operations.count_messages(connection, queue=queue)
        paused = [q for q in operations.list_queues(connection) if q.paused_at and queue in (None, q.queue)]
        if not counts:
            _require_known_queue(connection, queue)
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
        print_warning(f"queue {controls.queue} is {_pause_text(controls.paused_at, controls.resume_at)}")


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
    settings = _settings(dsn)
    if all_failed:
        _confirm("redrive every failed message", yes=yes or bool(topic or queue))
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
        _interruptible("what was redriven so far stays so; run it again for the rest"),
        progress("redriving") as report,
    ):
        totals = operations.redrive_matching(connection, which, progress=report)
        if totals == operations.RedriveTotals(0, 0, 0):
            _require_known_queue(connection, queue)
    if as_json:
        print_json({"redriven": totals.redriven, "superseded": totals.superseded, "locked": totals.locked})
    else:
        print_line(f"{totals.redriven} redriven, {totals.superseded} left alone as superseded, {totals.locked} locked")
    if totals.locked:
        raise typer.Exit(FAILED)


@app.command()
def resend(message_id: MessageId, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """Send a copy of a sent message; print its id."""
    with session.connect(_settings(dsn)) as connection:
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
    with session.connect(_settings(dsn)) as connection:
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


@app.command()
def prune(
    *,
    older_than: Annotated[
        timedelta | None,
        typer.Option(parser=parse_duration, metavar="DURATION", help="How long they have been final, such as 30d."),
    ] = None,
    states: Annotated[
        list[State] | None,
        typer.Option(
            "--state",
            parser=parse_final_state,
            metavar="STATE",
            help="sent, skipped, cancelled or failed; may be repeated. The first three if not given.",
        ),
    ] = None,
    topic: InTopic = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete old messages.

    With their attempts and dedupe keys, in batches that are committed one by one. Without --older-than by the rules of
    `pgoutbox retention`.
    """
    if older_than is None:
        if states or topic:
            raise typer.BadParameter("--state and --topic select among --older-than")
        _prune_by_retention(_settings(dsn), as_json=as_json)
        return
    chosen = frozenset(states) if states else maintenance.PRUNED_BY_DEFAULT
    settings = _settings(dsn)
    days = older_than / timedelta(days=1)
    action = f"delete every message that has been {' or '.join(sorted(chosen))} for {days:g} days"
    _confirm(action, yes=yes or bool(states or topic))
    with session.connect(settings) as connection, _interruptible("what was deleted so far stays deleted"):
        total = None
        if sys.stderr.isatty():
            total = sum(maintenance.count_prunable(connection, older_than, states=chosen, topic=topic).values())
        with progress("deleting", total) as report:
            totals = maintenance.prune(connection, older_than, states=chosen, topic=topic, progress=report)
    if as_json:
        _print_pruned(totals, chosen)
    else:
        print_line(f"{totals.total} messages deleted")


def _prune_by_retention(settings: Settings, *, as_json: bool) -> None:
    with session.connect(settings) as connection, _interruptible("what was deleted so far stays deleted"):
        if not maintenance.retention_rules(connection):
            print_note("there are no rules, so nothing is deleted; set one with: pgoutbox retention set")
        with progress("deleting") as report:
            totals = maintenance.prune_by_retention(connection, progress=report)
    if as_json:
        _print_pruned(totals, FINAL_STATES)
    else:
        print_line(f"{totals.total} messages deleted")


def _print_pruned(totals: maintenance.PruneTotals, states: Collection[State]) -> None:
    deleted = {state.value: totals.messages.get(state, 0) for state in sorted(states)}
    print_json({"deleted": deleted, "coalesce_keys": totals.coalesce_keys, "dedupe_keys": totals.dedupe_keys})


@retention_app.callback(invoke_without_command=True)
def retention(context: typer.Context, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """How long final messages are kept, by topic and state.

    Without a rule they are kept for ever. `pgoutbox prune` deletes by these rules. With --json one document per line.
    """
    context.obj = dsn
    if context.invoked_subcommand is not None:
        return
    with session.connect(_settings(dsn), read_only=True) as connection:
        rules = maintenance.retention_rules(connection)
    if as_json:
        for rule in rules:
            print_json(_rule_as_json(rule))
        return
    print_table(maintenance.RetentionRule._fields, [(rule.topic, rule.state, format_keep(rule.keep)) for rule in rules])


@retention_app.command("set")
def set_retention(
    context: typer.Context,
    topic: RuleTopic,
    state: RuleState,
    keep: Annotated[str, typer.Argument(metavar="KEEP", help="How long, such as 30d; 0; or forever.")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Keep messages of a topic so long in a state.

    With 0 for sent, workers delete each message as it is sent; this takes effect within a minute. Everything else is
    deleted by `pgoutbox prune`.
    """
    rule = maintenance.RetentionRule(topic, state, parse_keep(keep))
    with session.connect(_settings(dsn or context.obj)) as connection:
        maintenance.set_retention(connection, *rule)
    if as_json:
        print_json(_rule_as_json(rule))
    else:
        print_line(f"topic {topic}, {state}: kept {format_keep(rule.keep)}")


@retention_app.command("unset")
def unset_retention(
    context: typer.Context, topic: RuleTopic, state: RuleState, *, dsn: Dsn = None, as_json: Json = False
) -> None:
    """Take a rule back."""
    with session.connect(_settings(dsn or context.obj)) as connection:
        unset = maintenance.unset_retention(connection, topic, state)
    if as_json:
        print_json({"topic": topic, "state": state, "unset": unset})
    else:
        print_line(f"topic {topic}, {state}: {'the rule is taken back' if unset else 'there was no rule'}")


def _rule_as_json(rule: maintenance.RetentionRule) -> dict[str, object]:
    seconds = None if rule.keep is None else rule.keep.total_seconds()
    return {"topic": rule.topic, "state": rule.state, "keep_seconds": seconds}


# Queues.


@app.command()
def pause(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE")],
    *,
    duration: Annotated[
        timedelta | None,
        typer.Option("--for", parser=parse_duration, metavar="DURATION", help="Resume by itself, after 30m say."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Stop the claims of a queue.

    What is in flight goes on, and enqueue is not affected.
    """
    with session.connect(_settings(dsn)) as connection:
        if operations.unknown_queues(connection, [queue]):
            print_warning(f"queue {queue!r} has no messages so far; {_known_queues(connection)}")
        paused_at, resume_at = operations.pause_queue(connection, queue, duration=duration)
    if as_json:
        print_json({"queue": queue, "paused_at": paused_at, "resume_at": resume_at})
    else:
        print_line(f"queue {queue}: {_pause_text(paused_at, resume_at)}")


@app.command()
def resume(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE")],
    *,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Allow the claims of a paused queue again."""
    with session.connect(_settings(dsn)) as connection:
        resumed = operations.resume_queue(connection, queue)
        if not resumed:
            _require_known_queue(connection, queue)
    if as_json:
        print_json({"queue": queue, "resumed": resumed})
    else:
        print_line(f"queue {queue}: {'resumed' if resumed else 'was not paused'}")


@app.command()
def limit(
    queue: Annotated[str, typer.Argument(parser=parse_queue, metavar="QUEUE")],
    *,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Attempts that may begin, such as 20/s, 60/hour or none.")
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_RATE_COUNT, help="How many of them at once; the smaller of the rate and 5."),
    ] = None,
    in_flight: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Attempts that may be in flight at once, or none.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Limit a queue, for all workers together.

    Effective at once. What is not named stays as it is.
    """
    if rate is None and in_flight is None:
        raise typer.BadParameter("give --rate, --in-flight or both")
    new_rate = None if rate is None else parse_rate(rate)
    if burst is not None and new_rate is None:
        raise typer.BadParameter("--burst: only together with a --rate")
    max_in_flight = None if in_flight is None else parse_count(in_flight)
    with session.connect(_settings(dsn)) as connection:
        if rate is not None:
            operations.limit_rate(connection, queue, new_rate, burst=burst)
        if in_flight is not None:
            operations.limit_in_flight(connection, queue, max_in_flight)
        found = [q for q in operations.list_queues(connection) if q.queue == queue]
    _print_queues(found, as_json=as_json)
    if not found and not as_json:
        print_line(f"queue {queue}: no limits")


@app.command()
def queues(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the queues that are paused or limited."""
    with session.connect(_settings(dsn), read_only=True) as connection:
        found = operations.list_queues(connection)
    _print_queues(found, as_json=as_json)


def _print_queues(found: Sequence[operations.QueueControls], *, as_json: bool) -> None:
    if as_json:
        print_json([q._asdict() for q in found])
    elif found:
        print_table(operations.QueueControls._fields, found)


def _pause_text(paused_at: datetime | None, resume_at: datetime | None) -> str:
    until = "" if resume_at is None else f" until {resume_at.isoformat(timespec='seconds')}"
    return "not paused" if paused_at is None else f"paused since {paused_at.isoformat(timespec='seconds')}{until}"


# The rest.


@app.command()
def demo(
    *,
    people: Annotated[int, typer.Option(min=1, max=100_000, help="How many people get mail.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Repeats an earlier run.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what the run leaves, to look at it.")] = False,
    as_json: Json = False,
) -> None:
    """Run the main job on a private PostgreSQL.

    With a local SMTP server; nothing has to be set up.
    """
    from pgoutbox.demo import run_demo

    raise typer.Exit(run_demo(people=people, seed=seed, keep=keep, json_output=as_json))


@app.command()
def version(*, as_json: Json = False) -> None:
    """Print the versions that a bug report needs."""
    versions = {
        "pgoutbox": installed_version("pgoutbox"),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "libpq": str(psycopg.pq.version()),
    }
    if as_json:
        print_json(versions)
    else:
        print_line(" ".join(f"{name} {number}" for name, number in versions.items()))


# What several commands need.


def _settings(dsn: str | None, **overrides: object) -> Settings:
    warn_of_unknown_variables(os.environ)
    return load_settings(dsn=dsn, **overrides)


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Name every variable that looks like a setting and is none, with the setting that was likely meant."""
    if _SUPERVISED in environment:
        return
    known = [f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.model_fields]
    for variable in sorted(environment):
        if not variable.upper().startswith(ENVIRONMENT_PREFIX) or variable.startswith(_TEST_PREFIX):
            continue
        if variable.upper() not in known:
            nearest = difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0.0)[0]
            print_warning(f"{variable} is no setting of pgoutbox; did you mean {nearest}?")


def _redacted_names(settings: Settings) -> Callable[[str], tuple[str, ...]]:
    """What to hide in messages of a topic: without the application nothing is known of its topics."""
    if settings.app is None:
        return lambda _: settings.redacted_names
    outbox = load_outbox(settings.app)
    return lambda topic: settings.redacted_names + (outbox.topics[topic].redact if topic in outbox.topics else ())


def _confirm(action: str, *, yes: bool) -> None:
    """Let the operator say yes; where nobody can be asked, `--yes` has to be given."""
    if yes:
        return
    if not sys.stdin.isatty():
        print_error(f"this would {action}; pass --yes to do it")
        raise typer.Exit(MISUSED)
    if not typer.confirm(f"{action[0].upper()}{action[1:]}?", err=True):
        print_note("nothing was done")
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _interruptible(consequence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; {consequence}")
        raise typer.Exit(INTERRUPTED) from None


def _require_known_queue(connection: psycopg.Connection[TupleRow], queue: str | None) -> None:
    if queue is not None and operations.unknown_queues(connection, [queue]):
        raise ConfigurationError(f"no queue {queue!r}; {_known_queues(connection)}")


def _known_queues(connection: psycopg.Connection[TupleRow]) -> str:
    known = operations.known_queues(connection)
    return f"known queues: {', '.join(known)}" if known else "there are no messages at all yet"


def _shorten(text: str | None) -> str | None:
    return text if text is None or len(text) <= 80 else f"{text[:79]}…"
