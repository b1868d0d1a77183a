"""The commands that change messages, selected by ids, by a file of ids, or by a filter.

With a filter, the command counts the matching messages and asks for confirmation. With ids, `--dry-run` runs the
command in a transaction that is rolled back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, cast

import typer
from pydantic import JsonValue
from typing_extensions import Unpack

from pgoutbox.catalogue import correct_message
from pgoutbox.cli.arguments import duration_option, load_outbox, parse_due_time, parse_id, read_ids
from pgoutbox.cli.console import (
    FAILED,
    print_documents,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from pgoutbox.cli.options import BulkOptions, Limit, Options, command, open_operator
from pgoutbox.cli.program import confirm, interruptible, print_messages, require_known_queue
from pgoutbox.enqueue.payloads import from_json
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.operations import Action, ActResult, Correction, MessageFilter, MessageResult, Operator
from pgoutbox.operations.acts import ACTS, DID, Act, ActArguments, ActName
from pgoutbox.text import pluralize

_MAX_COUNT: Final = 100_000
_PREVIEW_ROWS: Final = 10
_COMMITTED: Final = "the changes so far are committed; run the command again for the rest"
_CORRECTABLE_FIELDS: Final = ("destination", "owner", "queue", "payload", "payload_version", "headers")

# For each argument of an act: its type, and its option.
_OPTIONS: Final[Mapping[str, Any]] = {
    "reason": Annotated[str, typer.Option("--reason", help="For the audit: why.")],
    "duration": Annotated[timedelta, duration_option("--for", "From now on, such as 30m, 12h or 2d.")],
    "available_at": Annotated[
        datetime | None,
        typer.Option(
            "--at",
            parser=parse_due_time,
            metavar="TIME",
            help="Due time, such as 2026-11-21T10:00Z, or 2h from now (default: now).",
        ),
    ],
}


def _command_of(name: ActName) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the command of an act, with its help."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        run.__doc__ = f"{ACTS[name].says}\n\n{ACTS[name].more}"
        return command(name)(run)

    return register


def _add(act: Act) -> None:
    def run(options: BulkOptions, **changes: Unpack[ActArguments]) -> None:
        _run(act.name, options, **changes)

    parameters = [Parameter("options", Parameter.KEYWORD_ONLY, annotation=BulkOptions)]
    for argument in act.arguments:
        default, option = Parameter.empty if argument.required else None, _OPTIONS[argument.name]
        parameters.append(Parameter(argument.name, Parameter.KEYWORD_ONLY, annotation=option, default=default))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    _command_of(act.name)(run)


for _act in ACTS.values():
    if _act.name not in ("correct", "cancel"):  # They have further options.
        _add(_act)


@_command_of("correct")
def _correct(
    options: BulkOptions,
    *,
    changes: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="destination, owner, queue, or with ids: payload (JSON, merged), payload_version, headers (JSON, "
            "merged). Repeatable.",
        ),
    ],
) -> None:
    correction = _correction_of(changes)
    if not correction.keys() & {"payload", "payload_version", "headers"}:
        _run("correct", options, correction=correction)
        return
    if not options.message_ids or options.every or options.filter().given():
        raise typer.BadParameter("--set payload and --set headers: give message ids, and no filter")
    outbox = None if options.settings.app is None else load_outbox(options.settings.app)
    with open_operator(options.settings) as operator, interruptible(_COMMITTED), _trying(operator, options):
        results = [correct_message(operator, outbox, message_id, correction) for message_id in options.message_ids]
    _print_results("correct", results, options)


def _correction_of(changes: list[str]) -> Correction:
    correction: dict[str, JsonValue] = {}
    for change in changes:
        name, separator, value = change.partition("=")
        if name not in _CORRECTABLE_FIELDS or not separator:
            raise typer.BadParameter(f"--set {name}: give FIELD=VALUE, with one of {', '.join(_CORRECTABLE_FIELDS)}")
        if name in correction:
            raise typer.BadParameter(f"--set {name}: given twice")
        if name in ("payload", "payload_version", "headers"):
            correction[name] = from_json(value.encode("utf-8", "surrogateescape"), name)
        else:
            correction[name] = value or None
    return cast("Correction", correction)


@_command_of("cancel")
def _cancel(
    options: BulkOptions,
    *,
    coalesce_key: Annotated[
        str | None, typer.Option(help="With --topic: only the newest message with this key.")
    ] = None,
    dedupe_key: Annotated[str | None, typer.Option(help="With --topic: only the message with this key.")] = None,
) -> None:
    if coalesce_key is None and dedupe_key is None:
        _run("cancel", options)
        return
    which = options.filter()
    is_by_id = options.message_ids or options.file
    if None not in (coalesce_key, dedupe_key) or is_by_id or options.every or list(which.given()) != ["topic"]:
        raise typer.BadParameter("give message ids, or --topic with --coalesce-key or --dedupe-key")
    topic = str(which.topic)
    with open_operator(options.settings) as operator, _trying(operator, options):
        results = operator.cancel_by_key(topic, coalesce_key=coalesce_key, dedupe_key=dedupe_key)
    if not results:
        raise MessageNotFoundError(f"no message of topic {topic!r} has this key")
    _print_results("cancel", results, options)


@command()
def audit(
    *,
    message: Annotated[
        int | None, typer.Option("--message", parser=parse_id, metavar="ID", help="Only acts on this message.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only acts of this operator.")] = None,
    action: Annotated[Action | None, typer.Option(help="Only acts of this kind.")] = None,
    limit: Limit = 50,
    before: Annotated[
        int | None, typer.Option(parser=parse_id, metavar="ID", help="Only acts older than this one.")
    ] = None,
    options: Options,
) -> None:
    """List acts of operators, newest first. With --json one document per line."""
    with open_operator(options.settings, read_only=True) as operator:
        found = operator.list_acts(message_id=message, actor=actor, action=action, before_id=before, limit=limit)
    acts = [act.redacted(options.settings.redacted_names) for act in found]
    if options.as_json:
        print_documents(acts)
        return
    names = ("id", "acted_at", "actor", "stated_by", "origin", "action", "queue", "message_count")
    rows = []
    for act in acts:
        ids = ", ".join(map(str, (act.first_ids or [])[:5])) + ("…" if len(act.first_ids or []) > 5 else "")
        facts = [f"{name}={value}" for part in (act.stated, act.details) for name, value in (part or {}).items()]
        rows.append([*(getattr(act, name) for name in names), ids, ", ".join(facts)])
    print_table(
        ("id", "time", "actor", "stated by", "origin", "action", "queue", "messages", "message ids", "details"), rows
    )
    if len(acts) == limit:
        print_note(f"there may be more rows: --before {acts[-1].id}")


def _run(action: ActName, options: BulkOptions, **changes: Unpack[ActArguments]) -> None:
    which = options.filter()
    by_filter = options.every or bool(which.given())
    if [bool(options.message_ids), options.file is not None, by_filter].count(True) != 1:
        raise typer.BadParameter("give message ids, --file, or a filter such as --topic, and only one of them")
    if by_filter and not (which.given() or ACTS[action].for_all):
        raise typer.BadParameter(f"--all: {action} needs message ids, or a filter such as --topic")
    if by_filter:
        _run_by_filter(action, options, which, changes)
        return
    ids = list(options.message_ids or ()) if options.file is None else read_ids(options.file)
    with open_operator(options.settings) as operator, interruptible(_COMMITTED), _trying(operator, options):
        results = [result for batch in operator.bulk(action, ids, **changes) for result in batch.results]
    _print_results(action, results, options)


def _trying(operator: Operator, options: BulkOptions) -> contextlib.AbstractContextManager[object]:
    return operator.dry_run() if options.dry_run else contextlib.nullcontext()


def _print_results(action: ActName, results: Sequence[MessageResult], options: BulkOptions) -> None:
    """Print the result of each message, and exit with 1 if one was left alone."""
    refused = done = 0
    for result in results:
        is_refused = not result.is_done and result.result != ActResult.ALREADY_CANCELLED
        refused += is_refused
        done += result.is_done
        other_id = None if options.dry_run and result.is_done else result.other_id
        if options.as_json:
            print_json({"id": result.id, "result": result.result, "other_id": other_id})
        elif is_refused:
            print_error(f"message {result.id} {result.explanation}")
        elif result.result is ActResult.RESENT and not options.dry_run:
            print_line(str(other_id))
        elif result.is_done:
            print_line(f"message {result.id}: {'would be ' if options.dry_run else ''}{DID[result.result]}")
        else:
            print_line(f"message {result.id} {result.explanation}")
    if options.dry_run and not options.as_json and len(results) > 1:
        print_line(f"would {action} {done} of {pluralize(len(results), 'message')}; nothing was changed")
    if refused:
        raise typer.Exit(FAILED)


def _run_by_filter(action: ActName, options: BulkOptions, which: MessageFilter, changes: ActArguments) -> None:
    """Count, preview or confirm, act, and print the totals. Exit with 1 if messages were locked."""
    try:
        which = which.limited_to(action)
    except StateError as error:
        raise typer.BadParameter(f"--state: {error}") from None
    done: Counter[str] = Counter()
    left: Counter[str] = Counter()
    with open_operator(options.settings) as operator:
        count = operator.count_matching(which, limit=_MAX_COUNT)
        if count == 0:
            require_known_queue(operator, which.queue)
        if options.dry_run:
            _print_preview(operator, options, action, which, count)
            return
        if count:
            states = " and ".join(which.states)
            several = f"{_MAX_COUNT:,} or more {states} messages"
            what = several if count == _MAX_COUNT else pluralize(count, f"{states} message")
            confirm(f"{action} {what}", yes=options.yes)
        total = count if count < _MAX_COUNT else None
        with interruptible(_COMMITTED), progress(action, total) as report:
            for batch in operator.bulk(action, which, **changes):
                for result in batch.results:
                    (done if result.is_done else left)[result.result] += 1
                report(done.total() + left.total())
    if options.as_json:
        print_json({result: (done + left)[result] for result in ACTS[action].results.split()})
    else:
        left_alone = f"; left alone: {_words(left)}" if left else ""
        print_line((_words(done) or f"0 {ACTS[action].done}") + left_alone)
    if left[ActResult.LOCKED]:
        raise typer.Exit(FAILED)


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {result.replace('_', ' ')}" for result, count in sorted(counts.items()))


def _print_preview(operator: Operator, options: BulkOptions, action: ActName, which: MessageFilter, count: int) -> None:
    names_of = options.redacted_names()
    first = [
        message.redacted(names_of(message.topic)) for message in operator.list_messages(which, limit=_PREVIEW_ROWS)
    ]
    if options.as_json:
        print_json({"would": action, "count": count, "is_all": count < _MAX_COUNT, "newest": [m.id for m in first]})
        return
    matches = f"{_MAX_COUNT:,} or more messages" if count == _MAX_COUNT else pluralize(count, "message")
    would = f"would {action} {matches}"
    if not count and which.error_group is not None:
        print_line(f"{would}: no failed message has the cause {which.error_group}; pgoutbox failures shows the groups")
        return
    print_line(f"{would}; the newest:")
    print_messages(first)
    if count:
        print_line(f"{would}; nothing was changed")  # The rows may fill the terminal.
