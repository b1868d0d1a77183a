"""Findings of the checks, and the helpers that write their texts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import psycopg
from psycopg.errors import InsufficientPrivilege, QueryCanceled

from pgoutbox.text import one_line

MAX_QUOTE_LENGTH: Final = 200
HOW_TO: Final = "https://pgoutbox.github.io/pgoutbox/latest/how-to"
"""The pages for operators."""


class Level(enum.StrEnum):
    """The severity of a finding. A problem stops delivery, loses messages, or lets others in; a warning may."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a check found, its effect and its fix. A finding without a fault has only `what`.

    `code` names the cause. It stays the same when the texts change. `about` names the queue, the topic, the group of
    failures or the breaker that the finding is about.
    """

    check: str
    level: Level
    code: str
    what: str
    why: str | None = None
    fix: str | None = None
    about: Mapping[str, str] = field(default_factory=dict)


class Note(NamedTuple):
    """A finding without the name of its check. With `if_alone` it is left out if the check has another one before."""

    level: Level
    code: str
    what: str
    why: str | None = None
    fix: str | None = None
    about: Mapping[str, str] = {}
    if_alone: bool = False


Notes = Iterable[Note]


def ok(code: str, what: str) -> Note:
    """Report that the check found no fault."""
    return Note(Level.OK, code, what)


def all_ok(code: str, what: str) -> Note:
    """Report, at the end of a check, that it found no fault; left out if it did."""
    return Note(Level.OK, code, what, if_alone=True)


def skipped(code: str, what: str, fix: str | None = None) -> Note:
    """Report that the check does not apply or cannot run; `fix` says how to make it run."""
    return Note(Level.SKIPPED, code, what, None, fix)


def warning(code: str, what: str, why: str, fix: str, **about: str) -> Note:
    """Report a fault that can lead to a problem, or a deliberate setting that may have been forgotten."""
    return Note(Level.WARNING, code, what, why, fix, about)


def problem(code: str, what: str, why: str, fix: str, **about: str) -> Note:
    """Report a fault that stops delivery, loses messages, or lets others in."""
    return Note(Level.PROBLEM, code, what, why, fix, about)


def run_check(check: str, ask: Callable[[], Notes]) -> Iterator[Finding]:
    """Run one check and yield its findings. A check that fails yields a finding, and the other checks still run."""
    has_found = False
    try:
        for note in ask():
            if not (note.if_alone and has_found):
                yield Finding(check, *note[:-1])
            has_found = True
    except InsufficientPrivilege as error:
        yield Finding(
            check,
            Level.SKIPPED,
            "forbidden",
            error_text(error),
            None,
            "run the doctor with a role that can read the schema: GRANT pgoutbox_viewer or pgoutbox_worker to it",
        )
    except Exception as error:  # noqa: BLE001 - one failed check must not stop the others
        hint = "the server is busy: try again" if isinstance(error, QueryCanceled) else "fix this error, then try again"
        yield Finding(
            check,
            Level.PROBLEM,
            "check-failed",
            f"the check failed: {error_text(error)}",
            "a fault here stays undetected",
            hint,
        )


def error_text(error: BaseException) -> str:
    """Return the text of an error on one line. Leaves out the DETAIL of PostgreSQL, which can quote rows."""
    if isinstance(error, psycopg.Error):
        if error.sqlstate is None and isinstance(error, psycopg.ProgrammingError):
            return "is not a connection string"  # The driver would quote parts of it.
        if error.diag.message_primary is not None:
            return f"PostgreSQL: {one_line(error.diag.message_primary)} [{error.sqlstate}]"
    if isinstance(error, TimeoutError):
        return one_line(str(error)) or "no answer in time"
    return one_line(str(error)) or type(error).__name__


def duration(seconds: float) -> str:
    """Format a number of seconds with one unit: `40 s`, `12 min`, `5 h`, `3 days`.

    >>> duration(7_300)
    '2 h'
    """
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def join_names(names: Iterable[object], *, most: int = 5) -> str:
    """Join names with commas; after `most` names, give only the number of the rest."""
    all_names = [str(name) for name in names]
    joined = ", ".join(all_names[:most])
    return joined if len(all_names) <= most else f"{joined} and {len(all_names) - most} more"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> pluralize(1, "message"), pluralize(2, "message")
    ('1 message', '2 messages')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
