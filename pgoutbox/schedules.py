"""Schedules: messages that are enqueued again and again, by a rule of times.

A rule is five fields of cron, as Debian's cron reads them, in a time zone, or `Every` so many seconds. A time that a
clock change skips comes right after the gap; one that comes twice counts once. cronsim computes the times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import count, islice, takewhile
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pgoutbox.clock import Duration, seconds_of
from pgoutbox.errors import ArgumentError, MissingExtraError
from pgoutbox.options import MessageOptions, check_delay, check_name
from pgoutbox.text import preview
from pgoutbox.topics import Topic

Missed = Literal["latest", "all", "none"]

MOST_MISSED: Final = 100
"""So many of the times that have passed are enqueued with `missed="all"`: the latest ones."""
LATE_SECONDS: Final = 60.0
"""A time that is later than this was missed."""
_EVERY = re.compile(r"every ([1-9][0-9]{0,7})")
_RECENT: Final = timedelta(days=2)
_DAY_SECONDS: Final = 86_400
_OF_EACH_MESSAGE: Final = {"dedupe_key", "available_at", "expires_at"}
MOMENT: Final = timedelta(microseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class RuleError(ValueError):
    """A rule or a time zone that cannot be read."""


@dataclass(frozen=True, slots=True)
class Every:
    """A rule: each full period since 1970, in UTC.

    >>> Every(minutes=5).rule
    'every 300'
    """

    _: KW_ONLY
    days: int = 0
    hours: int = 0
    minutes: int = 0
    seconds: int = 0

    def __post_init__(self) -> None:
        parts = (self.days, self.hours, self.minutes, self.seconds)
        if any(type(part) is not int or part < 0 for part in parts) or not 0 < self._total < 10**8:
            raise ArgumentError("Every", "must be whole numbers of a period from 1 second to 1157 days")

    @property
    def _total(self) -> int:
        return ((self.days * 24 + self.hours) * 60 + self.minutes) * 60 + self.seconds

    @property
    def rule(self) -> str:
        """The rule as a text."""
        return f"every {self._total}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The times of a schedule. Raises `RuleError` for a rule or a time zone that is unknown here."""

    text: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        try:
            if self.timezone != "UTC":
                ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise RuleError(f"the time zone {self.timezone!r} is unknown") from None
        try:
            next(self.after(_EPOCH), None)
        except ValueError as error:
            raise RuleError(f"the rule {self.text!r}: {error}") from None

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield the times after this one, in UTC. There may be none."""
        zone = UTC if self.timezone == "UTC" else ZoneInfo(self.timezone)
        if every := _EVERY.fullmatch(self.text):
            period = timedelta(seconds=int(every[1]))
            first = (at - _EPOCH) // period + 1
            return (_EPOCH + number * period for number in count(first))
        return self._by_cron(at, zone)

    def _by_cron(self, at: datetime, zone: tzinfo) -> Iterator[datetime]:
        try:
            from cronsim import CronSim, CronSimError
        except ImportError:
            raise MissingExtraError("schedules", "schedules") from None
        if len(self.text.split()) != 5:
            raise ValueError("needs five fields")
        try:
            times = CronSim(self.text, at.astimezone(zone))
        except CronSimError as error:
            raise ValueError(str(error)) from None
        last = at
        for time in times:
            found = time.astimezone(UTC)
            if found > last:  # An hour that comes twice has times that come twice.
                last = found
                yield found

    def passed(self, since: datetime, now: datetime) -> list[datetime]:
        """Return the times from `since` to `now`, both included: the latest `MOST_MISSED` of them."""
        recent = self._between(max(since, now - _RECENT), now)
        return (recent if len(recent) >= MOST_MISSED else self._between(since, now))[-MOST_MISSED:]

    def _between(self, since: datetime, now: datetime) -> list[datetime]:
        return list(takewhile(lambda time: time <= now, self.after(since - MOMENT)))


def rule_of(rule: object, timezone: object) -> Rule:
    """Return the rule of a schedule in code. Raises `ArgumentError` with the name of the wrong argument."""
    text = rule.rule if isinstance(rule, Every) else rule
    if not isinstance(text, str) or len(text) > 200:
        raise ArgumentError("rule", f"must be five fields of cron or Every(...), not {preview(rule)}")
    if not isinstance(timezone, str):
        raise ArgumentError("timezone", f"must be the name of a time zone, not {preview(timezone)}")
    try:
        return Rule(" ".join(text.split()), timezone)
    except RuleError as error:
        raise ArgumentError("timezone" if "time zone" in str(error) else "rule", str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule in the code of an application: see `Outbox.schedule`. Raises `ArgumentError` for a mistake."""

    name: str
    rule: Rule
    topic: str | Topic[Any]
    payload: object
    missed: Missed = "latest"
    jitter: Duration = 0
    until: datetime | None = None
    options: MessageOptions

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.missed not in ("latest", "all", "none"):
            raise ArgumentError("missed", f"must be latest, all or none, not {preview(self.missed)}")
        if not 0 <= seconds_of(check_delay("jitter", self.jitter)) <= _DAY_SECONDS:
            raise ArgumentError("jitter", "must be from 0 to a day")
        until: object = self.until
        if until is not None and not (
            isinstance(until, datetime) and until.tzinfo is not None and 2000 <= until.year < 3000
        ):
            text = f"must be a datetime with a time zone, from the years 2000 to 2999, not {preview(until)}"
            raise ArgumentError("until", text)
        if own := _OF_EACH_MESSAGE & self.options.keys():
            raise ArgumentError(min(own), "belongs to each message of the schedule; do not pass it")


def next_times(rule: str, timezone: str, since: datetime, most: int = 5) -> list[datetime]:
    """Return the next times of a stored schedule. Raises `RuleError`."""
    return list(islice(Rule(rule, timezone).after(since), most))
