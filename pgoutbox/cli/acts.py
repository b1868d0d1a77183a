"""The commands that change messages, selected by ids, by a file of ids, or by a filter.

With a filter, the command counts the matching messages and asks for confirmation. With ids, `--dry-run` runs the
command in a transaction that is rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, TypeVar

import psycopg
import typer
from psycopg.rows import TupleRow

from pgoutbox.cli.arguments import (
    App,
    DryRun,
    Dsn,
    IdFile,
    Ids,
    InQueue,
    InTopic,
    Json,
    Since,
    ToDestination,
    Until,
    WithKey,
    WithText,
    Yes,
    parse_id,
    read_ids,
)
from pgoutbox.cli.console import (
    FAILED,
    pluralize,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from pgoutbox.cli.program import (
    app,
    confirm,
    interruptible,
    print_messages,
    read_settings,
    redacted_names_of,
    require_known_queue,
)
from pgoutbox.database import operator_connection
from pgoutbox.enqueue.generators import CancelResult
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.message import State
from pgoutbox.operations import messages
from pgoutbox.operations.audit import Action
from pgoutbox.operations.messages import MessageFilter
from pgoutbox.settings import Settings

_T = TypeVar("_T")
_Totals = messages.RedriveTotals | messages.ResendTotals | messages.CancelTotals
_Connection = psycopg.Connection[TupleRow]

_MAX_COUNT: Final = 100_000
_PREVIEW_ROWS: Final = 10
_BATCH: Final = 500
_SELECTION_HINT: Final = "give message ids, --file, or a filter such as --topic"


@app.command()
def redrive(
    message_ids: Ids = None,
    *,
    file: IdFile = None,
    all_failed: Annotated[
        bool, typer.Option("--all-failed", help="Select all failed messages that match the filter.")
    ] = False,
    states: Annotated[
        list[State] | None, typer.Option("--state", help="failed or cancelled (default: failed). Repeatable.")
    ] = None,
    topic: InTopic = None,
    queue: InQueue = None,
    destination: ToDestination = None,
    key: WithKey = None,
    text: WithText = None,
    since: Since = None,
    until: Until = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Make failed and cancelled messages pending again.

    Each message gets its initial number of attempts. Superseded messages are left alone.
    """
    which = _filter(states or (), topic, queue, destination, key, text, since, until)
    chosen = _choose(message_ids, file, which, everything=all_failed)
    settings = read_settings(dsn, app=where)
    if isinstance(chosen, MessageFilter):
        chosen = _with_states(chosen, [State.FAILED], {State.FAILED, State.CANCELLED}, "redriven")
        act = _Bulk("redrive", settings, chosen, dry_run=dry_run, yes=yes, as_json=as_json)
        totals = act.run(messages.redrive_matching)
        if totals is not None:
            text_of = (
                f"{totals.redriven} redriven, {totals.superseded} left alone (superseded), "
                f"{totals.changed} in another state by now"
            )
            act.print_result(totals, text_of, totals.locked)
        return
    refused = 0
    for answer in _each(settings, chosen, messages.redrive, dry_run=dry_run):
        is_redriven = answer.result is messages.RedriveResult.REDRIVEN
        refused += not is_redriven
        if as_json:
            print_json({"id": answer.id, "result": answer.result, "other_id": answer.other_id})
        elif is_redriven:
            print_line(f"message {answer.id}: {'would be ' if dry_run else ''}pending again")
        else:
            print_error(f"message {answer.id}: {answer.explanation}")
    if refused:
        raise typer.Exit(FAILED)


@app.command()
def resend(
    message_ids: Ids = None,
    *,
    file: IdFile = None,
    topic: InTopic = None,
    queue: InQueue = None,
    destination: ToDestination = None,
    key: WithKey = None,
    text: WithText = None,
    since: Since = None,
    until: Until = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Enqueue copies of sent messages and print their ids.

    Superseded messages are left alone.
    """
    which = _filter((), topic, queue, destination, key, text, since, until)
    chosen = _choose(message_ids, file, which, everything=False)
    settings = read_settings(dsn, app=where)
    if isinstance(chosen, MessageFilter):
        chosen = _with_states(chosen, [State.SENT], {State.SENT}, "resent")
        act = _Bulk("resend", settings, chosen, dry_run=dry_run, yes=yes, as_json=as_json)
        totals = act.run(messages.resend_matching)
        if totals is not None:
            text_of = (
                f"{totals.resent} resent, {totals.superseded} left alone (superseded), "
                f"{totals.changed} in another state by now"
            )
            act.print_result(totals, text_of, 0)
        return
    refused = 0
    for answer in _each(settings, chosen, _resend_each, dry_run=dry_run):
        if isinstance(answer, str):
            refused += 1
            print_error(answer)
        elif as_json:
            print_json({"id": None if dry_run else answer[1], "resend_of": answer[0]})
        else:
            print_line(f"message {answer[0]}: would be resent" if dry_run else str(answer[1]))
    if refused:
        raise typer.Exit(FAILED)


def _resend_each(connection: _Connection, message_ids: Sequence[int]) -> list[tuple[int, int] | str]:
    answers: list[tuple[int, int] | str] = []
    for message_id in message_ids:
        try:
            answers.append((message_id, messages.resend(connection, message_id)))
        except (StateError, MessageNotFoundError) as error:
            answers.append(str(error))
    return answers


@app.command()
def cancel(
    message_ids: Ids = None,
    *,
    file: IdFile = None,
    every: Annotated[
        bool, typer.Option("--all", help="Select all pending and in-flight messages that match the filter.")
    ] = False,
    states: Annotated[
        list[State] | None, typer.Option("--state", help="pending or sending (default: both). Repeatable.")
    ] = None,
    topic: InTopic = None,
    queue: InQueue = None,
    destination: ToDestination = None,
    key: WithKey = None,
    coalesce_key: Annotated[
        str | None, typer.Option(help="With --topic: only the newest message with this key.")
    ] = None,
    dedupe_key: Annotated[str | None, typer.Option(help="With --topic: only the message with this key.")] = None,
    text: WithText = None,
    since: Since = None,
    until: Until = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    where: App = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Cancel messages.

    Asks the handler of an in-flight message to stop. The message is not retried.
    """
    which = _filter(states or (), topic, queue, destination, key, text, since, until)
    settings = None
    if coalesce_key is not None or dedupe_key is not None:
        if None not in (coalesce_key, dedupe_key) or message_ids or file or every or list(which.given()) != ["topic"]:
            raise typer.BadParameter("give message ids, or --topic with --coalesce-key or --dedupe-key")
        settings = read_settings(dsn, app=where)
        with operator_connection.connect(settings) as connection, _rolled_back(connection, when=dry_run):
            met = messages.cancel_by_key(connection, str(topic), coalesce_key=coalesce_key, dedupe_key=dedupe_key)
        if not met:
            raise MessageNotFoundError(f"no message of topic {topic!r} has this key")
        _print_cancelled(met, dry_run=dry_run, as_json=as_json)
        return
    chosen = _choose(message_ids, file, which, everything=every)
    settings = read_settings(dsn, app=where)
    if isinstance(chosen, MessageFilter):
        owed = [State.PENDING, State.SENDING]
        chosen = _with_states(chosen, owed, frozenset(owed), "cancelled")
        act = _Bulk("cancel", settings, chosen, dry_run=dry_run, yes=yes, as_json=as_json)
        totals = act.run(messages.cancel_matching)
        if totals is not None:
            text_of = (
                f"{totals.cancelled} cancelled, {totals.requested} in flight asked to stop, "
                f"{totals.changed} in another state by now"
            )
            act.print_result(totals, text_of, totals.locked)
        return
    _print_cancelled(_each(settings, chosen, messages.cancel_each, dry_run=dry_run), dry_run=dry_run, as_json=as_json)


def _print_cancelled(answers: Sequence[messages.Cancelled], *, dry_run: bool, as_json: bool) -> None:
    refused = 0
    for met in answers:
        if as_json:
            print_json(met._asdict())
        match met.result:
            case CancelResult.CANCELLED:
                text = f"message {met.id}: {'would be ' if dry_run else ''}cancelled"
            case CancelResult.REQUESTED:
                text = f"message {met.id}: in flight; its handler is notified, and it is not retried"
            case CancelResult.ALREADY_CANCELLED:
                text = f"message {met.id}: already cancelled"
            case _:
                refused += 1
                print_error(f"message {met.id} {messages.explain_cancel(met.result)}")
                continue
        if not as_json:
            print_line(text)
    if refused:
        raise typer.Exit(FAILED)


@app.command()
def audit(
    *,
    message: Annotated[
        int | None, typer.Option("--message", parser=parse_id, metavar="ID", help="Only acts on this message.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only acts of this operator.")] = None,
    action: Annotated[Action | None, typer.Option(help="Only acts of this kind.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 50,
    before: Annotated[
        int | None, typer.Option(parser=parse_id, metavar="ID", help="Only acts older than this one.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List acts of operators, newest first. With --json one document per line."""
    settings = read_settings(dsn)
    with operator_connection.connect(settings, read_only=True) as connection:
        found = messages.list_acts(
            connection, message_id=message, actor=actor, action=action, before_id=before, limit=limit
        )
    acts = [messages.redact_act(act, settings.redacted_names) for act in found]
    if as_json:
        for act in acts:
            print_json(act._asdict() | {"act_id": str(act.act_id)})
        return
    print_table(
        ("id", "time", "actor", "origin", "action", "queue", "messages", "message ids", "details"),
        [
            (
                act.id,
                act.acted_at,
                act.actor,
                act.origin,
                act.action,
                act.queue,
                act.message_count,
                ", ".join(map(str, (act.first_ids or [])[:5])) + ("…" if len(act.first_ids or []) > 5 else ""),
                None if act.details is None else ", ".join(f"{name}={value}" for name, value in act.details.items()),
            )
            for act in acts
        ],
    )
    if len(acts) == limit:
        print_note(f"there may be more rows: --before {acts[-1].id}")


# --- selection of messages --------------------------------------------------------------------------------------------


def _filter(
    states: Sequence[State],
    topic: str | None,
    queue: str | None,
    destination: str | None,
    key: str | None,
    text: str | None,
    since: datetime | None,
    until: datetime | None,
) -> MessageFilter:
    return MessageFilter(
        states=states,
        topic=topic,
        queue=queue,
        destination=destination,
        key=key,
        text=text,
        created_from=since,
        created_before=until,
    )


def _choose(
    message_ids: Sequence[int] | None, file: Path | None, which: MessageFilter, *, everything: bool
) -> list[int] | MessageFilter:
    by_filter = everything or bool(which.given())
    if [bool(message_ids), file is not None, by_filter].count(True) != 1:
        raise typer.BadParameter(f"{_SELECTION_HINT}, and only one of them")
    if file is not None:
        return read_ids(file)
    return which if by_filter else list(message_ids or ())


def _with_states(
    which: MessageFilter, usual: Sequence[State], allowed: frozenset[State] | set[State], done: str
) -> MessageFilter:
    states = list(which.states) or list(usual)
    if wrong := sorted(set(states) - allowed):
        raise typer.BadParameter(f"--state {wrong[0]}: only {' and '.join(sorted(allowed))} messages can be {done}")
    return replace(which, states=states)


# --- many messages ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rolled_back(connection: _Connection, *, when: bool) -> Iterator[None]:
    if not when:
        yield
        return
    with connection.transaction(force_rollback=True):
        yield


def _each(
    settings: Settings,
    message_ids: Sequence[int],
    act: Callable[[_Connection, Sequence[int]], Sequence[_T]],
    *,
    dry_run: bool,
) -> list[_T]:
    answers: list[_T] = []
    with (
        operator_connection.connect(settings) as connection,
        interruptible("the changes so far are committed; run the command again for the rest"),
        _rolled_back(connection, when=dry_run),
    ):
        for start in range(0, len(message_ids), _BATCH):
            answers += act(connection, message_ids[start : start + _BATCH])
    return answers


class _Bulk:
    """One command on all messages that match a filter: count, preview or confirm, run, and print the result."""

    def __init__(
        self, verb: str, settings: Settings, which: MessageFilter, *, dry_run: bool, yes: bool, as_json: bool
    ) -> None:
        self._verb = verb
        self._settings = settings
        self._which = which
        self._dry_run = dry_run
        self._yes = yes
        self._as_json = as_json

    def run(self, act: Callable[..., _T]) -> _T | None:
        """Run the command and return its totals; with --dry-run, print a preview and return None."""
        with operator_connection.connect(self._settings) as connection:
            count = messages.count_matching(connection, self._which, limit=_MAX_COUNT)
            if count == 0:
                require_known_queue(connection, self._which.queue)
            if self._dry_run:
                self._print_preview(connection, count)
                return None
            if count:
                states = " and ".join(sorted(state.value for state in self._which.states))
                several = f"{_MAX_COUNT:,} or more {states} messages"
                what = several if count == _MAX_COUNT else pluralize(count, f"{states} message")
                confirm(f"{self._verb} {what}", yes=self._yes)
            total = count if count < _MAX_COUNT else None
            with (
                interruptible("the changes so far are committed; run the command again for the rest"),
                progress(self._verb, total) as report,
            ):
                return act(connection, self._which, progress=report)

    def print_result(
        self,
        totals: _Totals,
        text: str,
        locked: int,
    ) -> None:
        """Print the totals, and exit with 1 if messages were locked."""
        if self._as_json:
            print_json(asdict(totals))
        else:
            print_line(f"{text}, {locked} locked" if self._verb != "resend" else text)
        if locked:
            raise typer.Exit(FAILED)

    def _print_preview(self, connection: _Connection, count: int) -> None:
        names_of = redacted_names_of(self._settings)
        first = [
            messages.redact_listed(message, names_of(message.topic))
            for message in messages.list_messages(connection, self._which, limit=_PREVIEW_ROWS)
        ]
        if self._as_json:
            print_json(
                {"would": self._verb, "count": count, "is_all": count < _MAX_COUNT, "newest": [m.id for m in first]}
            )
            return
        print_line(f"would {self._verb} {count}{' or more' if count == _MAX_COUNT else ''} messages; the newest:")
        print_messages(first)
