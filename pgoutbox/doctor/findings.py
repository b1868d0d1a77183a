"""What a check says: findings, and how the failure of a check becomes one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import psycopg
from psycopg.errors import InsufficientPrivilege, QueryCanceled

MAX_QUOTE_LENGTH: Final = 200


class Level(enum.StrEnum):
    """How bad a finding is. A problem keeps messages from going out or loses them; a warning may."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, why it matters, and how to mend it. What is in order has neither a why nor a mend."""

    check: str
    level: Level
    what: str
    why: str | None = None
    mend: str | None = None


class Note(NamedTuple):
    """A finding of which only its check is not known yet."""

    level: Level
    what: str
    why: str | None = None
    mend: str | None = None


Notes = Iterable[Note]


def ok(what: str) -> Note:
    """Nothing is to be done."""
    return Note(Level.OK, what)


def skipped(what: str, mend: str | None = None) -> Note:
    """The question does not arise here, or cannot be answered; `mend` says what would answer it."""
    return Note(Level.SKIPPED, what, None, mend)


def warning(what: str, why: str, mend: str) -> Note:
    """Something that may lead to trouble, or that somebody has set up on purpose and may have forgotten."""
    return Note(Level.WARNING, what, why, mend)


def problem(what: str, why: str, mend: str) -> Note:
    """Something that keeps messages from going out, loses them, or lets others in."""
    return Note(Level.PROBLEM, what, why, mend)


def examined(check: str, ask: Callable[[], Notes]) -> Iterator[Finding]:
    """The findings of one check. That it fails is one of them, and keeps no other check from being made."""
    try:
        for note in ask():
            yield Finding(check, *note)
    except InsufficientPrivilege as error:
        yield Finding(
            check,
            Level.SKIPPED,
            said(error),
            None,
            "run the doctor with a role that may look: GRANT pgoutbox_viewer, or pgoutbox_worker, to it",
        )
    except Exception as error:  # noqa: BLE001 - whatever keeps one check from its answer, the others are to be made
        hint = "the server is busy: try again" if isinstance(error, QueryCanceled) else "mend that first, and try again"
        yield Finding(check, Level.PROBLEM, f"cannot be checked: {said(error)}", "what cannot be asked may be so", hint)


def said(error: BaseException) -> str:
    """What an error says, on one line. Of PostgreSQL's only the primary message: its DETAIL can quote rows."""
    if isinstance(error, psycopg.Error):
        if error.sqlstate is None and isinstance(error, psycopg.ProgrammingError):
            return "is not a connection string"  # The driver would quote parts of it.
        if error.diag.message_primary is not None:
            return f"PostgreSQL: {one_line(error.diag.message_primary)} [{error.sqlstate}]"
    if isinstance(error, TimeoutError):
        return one_line(str(error)) or "no answer in time"
    return one_line(str(error)) or type(error).__name__


def one_line(text: str, *, length: int = 500) -> str:
    """The text without line ends, cut."""
    shown = " ".join(text.split())
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def duration(seconds: float) -> str:
    """A number of seconds as people say it: `40 s`, `12 min`, `5 h`, `3 days`.

    >>> duration(7_300)
    '2 h'
    """
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def listed(names: Iterable[object], *, most: int = 5) -> str:
    """Names with commas between them; of many only the first."""
    every = [str(name) for name in names]
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def counted(number: int, noun: str) -> str:
    """A number and what it counts.

    >>> counted(1, "message"), counted(2, "message")
    ('1 message', '2 messages')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
