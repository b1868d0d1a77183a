"""Findings of the checks, and the helpers that write their texts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, ParamSpec

import psycopg
from psycopg.errors import InsufficientPrivilege, QueryCanceled

from pgoutbox.text import Count, one_line, pluralize

MAX_QUOTE_LENGTH: Final = 200
HOW_TO: Final = "https://pgoutbox.github.io/pgoutbox/latest/how-to"
"""The pages for operators."""


P = ParamSpec("P")


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
    failures, the breaker or the message that the finding is about. `messages` is how many the fault holds back or has
    ended, 0 if that is not known.
    """

    check: str
    level: Level
    code: str
    what: str
    why: str | None = None
    fix: str | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    messages: Count = Count(0)  # noqa: RUF009 - it is immutable

    @property
    def urgency(self) -> tuple[int, int]:
        """The order in which a person should read findings: problems first, then warnings; each by their messages."""
        return {Level.PROBLEM: 0, Level.WARNING: 1}.get(self.level, 2), -self.messages.messages


Findings = Iterable[Finding]
_UNKNOWN: Final = Count(0)
# Why messages are not delivered, in a few words.
_CAUSES: Final[Mapping[str, str]] = {
    "due-without-worker": "no worker is running",
    "due-behind-breaker": "{breaker} does not take them",
    "due-in-unserved-queue": "no worker serves queue {queue}",
    "due-without-handler": "topic {topic} has no handler",
    "due-behind-failed": "message {message} halts its key in queue {queue}",
    "due-unclaimed": "workers have not begun those of queue {queue}",
}
_CAUSES_IN_VERDICT: Final = 2


def verdict(findings: Sequence[Finding]) -> str:
    """Return the state of delivery in a sentence, from the findings of `examine_delivery`."""
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if not problems:
        rest = f", with {pluralize(len(findings), 'warning')}" if findings else ""
        return f"Messages are delivered{rest}."
    total = sum((finding.messages for finding in problems), start=Count(0))
    causes = list(
        dict.fromkeys(_CAUSES[found.code].format_map(found.about) for found in problems if found.code in _CAUSES)
    )
    if not causes or not total.messages:
        return f"There {'is' if len(problems) == 1 else 'are'} {pluralize(len(problems), 'problem')}."
    told = causes[:_CAUSES_IN_VERDICT]
    if len(causes) > len(told):
        told.append(f"and {pluralize(len(causes) - len(told), 'more cause')}")
    what = f"{total} {'is' if total.messages == 1 else 'are'} not delivered: {'; '.join(told)}."
    return what[0].upper() + what[1:]


# --- in a check -------------------------------------------------------------------------------------------------------


def ok(code: str, what: str) -> Finding:
    """Report that the check found no fault. Left out after another finding of the check."""
    return Finding("", Level.OK, code, what)


def skipped(code: str, what: str, fix: str | None = None) -> Finding:
    """Report that the check does not apply or cannot run; `fix` says how to make it run."""
    return Finding("", Level.SKIPPED, code, what, None, fix)


def warning(code: str, what: str, why: str, fix: str, *, messages: Count = _UNKNOWN, **about: str) -> Finding:
    """Report a fault that can lead to a problem, or a deliberate setting that may have been forgotten."""
    return Finding("", Level.WARNING, code, what, why, fix, about, messages)


def problem(code: str, what: str, why: str, fix: str, *, messages: Count = _UNKNOWN, **about: str) -> Finding:
    """Report a fault that stops delivery, loses messages, or lets others in."""
    return Finding("", Level.PROBLEM, code, what, why, fix, about, messages)


def run_check(name: str, check: Callable[P, Findings], *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
    """Run one check and yield its findings. A check that fails yields a finding, and the other checks still run."""
    has_found = False
    try:
        for finding in check(*args, **kwargs):
            if finding.level is not Level.OK or not has_found:
                yield replace(finding, check=name)
            has_found = True
    except InsufficientPrivilege as error:
        hint = "run the doctor with a role that can read the schema: GRANT pgoutbox_viewer or pgoutbox_worker to it"
        yield replace(skipped("forbidden", error_text(error), hint), check=name)
    except Exception as error:  # noqa: BLE001 - one failed check must not stop the others
        hint = "the server is busy: try again" if isinstance(error, QueryCanceled) else "fix this error, then try again"
        what = f"the check failed: {error_text(error)}"
        yield replace(problem("check-failed", what, "a fault here stays undetected", hint), check=name)


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
