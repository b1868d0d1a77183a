"""The ticker: writes the schedules of the code, and enqueues the messages whose times have come.

Each worker looks, and none leads. A tick names the time that it has read: the first worker that writes the next time
has enqueued the message in the same transaction, and the others find another time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Final, NamedTuple

import psycopg

from pgoutbox.clock import seconds_of
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import is_refusal, is_transient_error, kind_of
from pgoutbox.enqueue.validation import message_json
from pgoutbox.errors import ArgumentError, ConfigurationError, MissingExtraError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.outbox import Outbox
from pgoutbox.schedules import LATE_SECONDS, MOMENT, Rule, RuleError, Schedule
from pgoutbox.topics import Topic, name_of

_LOOK_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 5.0
_REFUSED_SECONDS: Final = 60.0
_LOCKED_SECONDS: Final = 1.0


class Declared(NamedTuple):
    """A schedule of the code, with its message as an item of `enqueue_many`."""

    name: str
    rule: Rule
    message: str
    missed: str
    jitter_seconds: float
    until: datetime | None


class _Found(NamedTuple):
    name: str
    rule: str
    timezone: str
    missed: str
    revision: int
    next_at: datetime | None
    until_at: datetime | None
    changed_at: datetime
    look_at: datetime | None
    problem: str | None
    now: datetime


class Ticker:
    """Takes the turns of schedules for one worker. It has none without cronsim."""

    def __init__(
        self, store: Store, telemetry: Telemetry, declared: Sequence[Declared], *, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._declared = declared
        self._wake = wake
        self._undeclared = list(declared)
        self._declares_at = -math.inf
        self._refused = dict[str, str]()  # Schedules that are not declared yet, and why.
        self._has_cron = _has_cron()
        self._trouble: str | None = None

    async def keep_ticking(self) -> None:
        """Tick when a time has come, and look for new schedules twice a minute, until cancelled."""
        while True:
            seconds = await self.tick()
            await asyncio.sleep(seconds)  # Nothing tells a worker of the time that another session has written.

    async def tick(self) -> float:
        """Enqueue the messages that are due, and return the seconds until the next tick: 0 if more may be due.

        An error is reported, not raised.
        """
        if not self._has_cron:
            return _LOOK_SECONDS
        try:
            seconds = await self._tick()
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here ends the worker
            reason = kind_of(error)
            if reason != self._trouble and not is_transient_error(error):  # The worker reports passing ones itself.
                self._trouble = reason
                text = "schedules cannot be read, trying again"
                self._telemetry.report(
                    logging.ERROR, LogEvent.SCHEDULES_FAILED, text, reason=reason, detail=_text_of(error)
                )
            return _RETRY_SECONDS
        self._trouble = None
        return seconds

    async def _tick(self) -> float:
        if self._undeclared and time.monotonic() >= self._declares_at:
            self._undeclared = [one for one in self._undeclared if not await self._declare(one)]
            self._declares_at = time.monotonic() + _REFUSED_SECONDS
        names = [one.name for one in self._declared]
        rows = await self._store.claims.fetch(sql.NEXT_SCHEDULES, {"declared": names})
        seconds = _LOOK_SECONDS
        for found in map(_Found._make, rows):
            if found.look_at is not None and found.look_at > found.now:
                return min(seconds, (found.look_at - found.now).total_seconds())
            # Each look writes a later time, unless another session has the schedule.
            seconds = 0.0 if await self._look_at(found) else min(seconds, _LOCKED_SECONDS)
        return seconds

    async def _declare(self, one: Declared) -> bool:
        values = {**one._asdict(), "rule": one.rule.text, "timezone": one.rule.timezone, "until_at": one.until}
        try:
            await self._store.claims.fetch(sql.DECLARE_SCHEDULE, values)
        except psycopg.Error as error:
            if not _is_of_one(error):
                raise
            self._report(one.name, _text_of(error), known=self._refused.get(one.name))
            self._refused[one.name] = _text_of(error)
            return False
        return True

    async def _look_at(self, found: _Found) -> bool:
        """Enqueue the messages of a schedule that are due, and write its next time. Return False if it is in use."""
        try:
            rule = Rule(found.rule, found.timezone)
            times = _due_of(rule, found)
            next_at = next(rule.after(found.now), None)
        except RuleError as error:
            return await self._refuse(found, str(error))
        if next_at is not None and found.until_at is not None and next_at > found.until_at:
            next_at = None
        tick = {
            "name": found.name,
            "revision": found.revision,
            "known_next_at": found.next_at,
            "times": times,
            "next_at": next_at,
        }
        try:
            ((ids,),) = await self._store.claims.fetch(sql.TICK_SCHEDULE, tick)
        except psycopg.Error as error:
            if not _is_of_one(error):
                raise
            return await self._refuse(found, _text_of(error))
        if ids:
            self._wake()  # A session that listens itself hears nothing of its own enqueues.
        return ids is not None

    async def _refuse(self, found: _Found, problem: str) -> bool:
        """Note the problem of a schedule: the others do not wait for it, and it is looked at again in a minute."""
        self._report(found.name, problem, known=found.problem)
        refusal = {"name": found.name, "revision": found.revision, "next_at": found.next_at, "problem": problem}
        try:
            await self._store.claims.fetch(sql.REFUSE_SCHEDULE, refusal)
        except psycopg.Error as error:
            if not _is_of_one(error):
                raise
            return False
        return True

    def _report(self, schedule: str, problem: str, *, known: str | None) -> None:
        if problem != known:
            text = "a schedule is not served, trying again"
            self._telemetry.report(logging.ERROR, LogEvent.SCHEDULE_REFUSED, text, schedule=schedule, reason=problem)


def _has_cron() -> bool:
    return find_spec("cronsim") is not None


def _is_of_one(error: psycopg.Error) -> bool:
    """Whether the error belongs to one schedule, such as a trigger that refuses its message, or a lock."""
    return is_refusal(error) or isinstance(error, (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled))


def _text_of(error: Exception) -> str:
    return (error.diag.message_primary if isinstance(error, psycopg.Error) else None) or str(error)


def _due_of(rule: Rule, found: _Found) -> list[datetime]:
    """Return the times for which messages are to be enqueued now. The first one comes after the last change."""
    until = found.now if found.until_at is None else min(found.now, found.until_at)
    times = rule.passed(found.next_at or found.changed_at + MOMENT, until)
    if found.missed == "none":
        times = [time for time in times if (found.now - time).total_seconds() <= LATE_SECONDS]
    return times if found.missed == "all" else times[-1:]


def declared_by(outbox: Outbox) -> Sequence[Declared]:
    """Return the schedules of the code.

    Raises `ConfigurationError` for a message that cannot be enqueued, and `MissingExtraError` without cronsim.
    """
    if outbox.schedules and not _has_cron():
        raise MissingExtraError("schedules", "schedules")
    return [_declared(outbox, schedule) for schedule in outbox.schedules.values()]


def _declared(outbox: Outbox, schedule: Schedule) -> Declared:
    where = f"schedule {schedule.name!r}"
    topic = outbox.topics.get(name_of(schedule.topic)) or schedule.topic
    if isinstance(topic, Topic) and topic.encrypted:
        raise ConfigurationError(
            f"{where}: its topic is encrypted; enqueue the message from a handler of another topic"
        )
    try:
        draft = outbox.draft(schedule.topic, schedule.payload, **schedule.options)
    except (ArgumentError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from None
    if "dedupe_key" in draft.options:
        raise ConfigurationError(f"{where}: its topic has a dedupe_key, but each message needs that of its time")
    message = message_json(draft)
    return Declared(schedule.name, schedule.rule, message, schedule.missed, seconds_of(schedule.jitter), schedule.until)
