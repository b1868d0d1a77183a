"""The Typer application, and helpers that several commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeVar

import typer
import typer.core

from pgoutbox.cli.console import FAILED, INTERRUPTED, MISUSED, print_error, print_note, print_table, print_warning
from pgoutbox.errors import ConfigurationError
from pgoutbox.operations import ListedMessage, Operator, PausedTopic, TopicCounts
from pgoutbox.operations.activity import TopicActivity
from pgoutbox.operations.acts import ACTS

# The commands by task, in the order of first use.
TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "Set up and run": ("demo", "migrate", "worker", "web", "doctor", "version"),
    "Enqueue": ("topics", "enqueue", "send"),
    "Look": ("list", "show", "failures", "stats", "top", "tail", "workers", "queues", "keys", "audit"),
    "Act on messages": tuple(ACTS),
    "Control delivery": (
        "pause",
        "resume",
        "limit",
        "share",
        "schedule",
        "suppression",
        "breaker",
        "redirect",
        "adopt",
    ),
    "Keep, delete and hand out": ("retention", "prune", "export", "erase", "mentions"),
}
_ORDER: Final = [name for names in TASKS.values() for name in names]
_MOST_TOPICS: Final = 50
_LATE_SECONDS: Final = 60

_Counted = TypeVar("_Counted", TopicCounts, TopicActivity)


class _ByTask(typer.core.TyperGroup):
    """Lists the commands by task."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer does not export its type
        return sorted(super().list_commands(ctx), key=_ORDER.index)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        known = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        width = max(map(len, known))
        for task, names in TASKS.items():
            with formatter.section(task):
                shown = [name for name in names if name in known]
                formatter.write_dl([(name.ljust(width), known[name].get_short_help_str(74 - width)) for name in shown])


app = typer.Typer(
    cls=_ByTask,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def confirm(action: str, *, yes: bool) -> None:
    """Ask the operator for confirmation; without a terminal, require `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        print_error(f"this would {action}; pass --yes to do it")
        raise typer.Exit(MISUSED)
    if not typer.confirm(f"{action[0].upper()}{action[1:]}?", err=True):
        print_note("nothing was changed")
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def interruptible(consequence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; {consequence}")
        raise typer.Exit(INTERRUPTED) from None


def require_known_queue(operator: Operator, queue: str | None) -> None:
    if queue is not None and operator.unknown_queues([queue]):
        raise ConfigurationError(f"no queue {queue!r}; {_known_queues(operator)}")


def warn_of_unknown(operator: Operator, kind: Literal["queue", "topic"], names: Sequence[str]) -> bool:
    """Warn of names that may be wrong: of queues without messages and controls, or of topics that nothing has."""
    if kind == "queue":
        unknown = operator.unknown_queues(names)
        reason = f"has no messages yet; {_known_queues(operator)}" if unknown else ""
    else:
        unknown = [topic for topic in names if not operator.is_known_topic(topic)]
        reason = "is unknown to all workers and messages: check its name"
    for name in unknown:
        print_warning(f"{kind} {name!r} {reason}")
    return bool(unknown)


def confirm_unknown(operator: Operator, kind: Literal["queue", "topic"], name: str, action: str, *, yes: bool) -> None:
    """Warn of a queue or a topic whose name may be wrong. On a terminal, ask before the act."""
    if warn_of_unknown(operator, kind, [name]) and sys.stdin.isatty():
        confirm(f"{action} it", yes=yes)


def _known_queues(operator: Operator) -> str:
    return f"known queues: {', '.join(operator.known_queues()) or 'none'}"


def shorten(text: str | None) -> str | None:
    """Return the text as a table has it: at most 80 characters on a terminal, and all elsewhere."""
    return text if text is None or len(text) <= 80 or not sys.stdout.isatty() else f"{text[:79]}…"


def describe_pause(paused_at: datetime | None, resume_at: datetime | None) -> str:
    until = "" if resume_at is None else f" until {resume_at.isoformat(timespec='seconds')}"
    return "not paused" if paused_at is None else f"paused since {paused_at.isoformat(timespec='seconds')}{until}"


def worst_topics(counted: Sequence[_Counted]) -> tuple[Sequence[_Counted], int]:
    """Return the topics for a table, and the number of the others.

    If not all fit, those that are late for longest come first, then those with the most failed and due messages.
    """
    if len(counted) <= _MOST_TOPICS:
        return counted, 0

    def order(topic: TopicCounts | TopicActivity) -> tuple[float, int, int]:
        late_seconds = topic.oldest_due_seconds or 0
        return -late_seconds if late_seconds > _LATE_SECONDS else 0, -topic.failed, -topic.due

    return sorted(counted, key=order)[:_MOST_TOPICS], len(counted) - _MOST_TOPICS


def print_topics(columns: Sequence[str], counted: Sequence[TopicCounts], *, of: Sequence[str] | None = None) -> None:
    """Print a table of the topics in most need of a look, and tell how to see the others."""
    shown, more = worst_topics(counted)
    # Topics of two databases may be equal, but they are two objects.
    names = {} if of is None else {id(topic): name for topic, name in zip(counted, of, strict=True)}
    print_table(
        columns,
        [[getattr(topic, column) for column in columns] for topic in shown],
        of=None if of is None else [names[id(topic)] for topic in shown],
    )
    if more:
        print_note(f"and {more:,} more, which are less late or have fewer failed messages: --json lists them all")


def print_paused_topics(paused: Sequence[PausedTopic], *, prefix: str = "") -> None:
    """Print a warning for each of these topics: its messages wait."""
    for one in paused:
        print_warning(f"{prefix}topic {one.topic} is {describe_pause(one.paused_at, one.resume_at)}")


def _reason_of(message: ListedMessage) -> str | None:
    return "; ".join(filter(None, (_waits_of(message), message.why_not_sent))) or None


def _waits_of(message: ListedMessage) -> str | None:
    if message.waits is None:
        return None
    other = "" if message.waits_for is None else f" (message {message.waits_for})"
    until = message.waits_until
    # Most wait for their due time, which has a column of its own.
    is_later = until is not None and until - message.available_at >= timedelta(minutes=1)
    end = f" until {until.isoformat(timespec='seconds')}" if until and is_later else ""
    return f"waits: {message.wait}{other}{end}"


def print_messages(messages: Sequence[ListedMessage], *, of: Sequence[str] | None = None) -> None:
    """Print a table of messages whose sensitive values are already hidden. `of` is the name of each one's database."""
    names = ("id", "state", "topic", "queue", "destination", "attempts", "created_at", "available_at")
    reasons = [_reason_of(message) for message in messages]
    print_table(
        (*(name.removesuffix("_at") for name in names), "reason"),
        [
            [*(getattr(message, name) for name in names), shorten(reason)]
            for message, reason in zip(messages, reasons, strict=True)
        ],
        of=of,
    )
    cut = next(
        (message.id for message, reason in zip(messages, reasons, strict=True) if shorten(reason) != reason), None
    )
    if cut is not None:
        print_note(f"some reasons are cut: pgoutbox show {cut} shows this one as a whole")
