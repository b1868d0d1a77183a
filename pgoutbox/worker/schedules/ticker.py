"""The ticker: writes the schedules of the code, and enqueues the messages whose times have come.

Each worker looks, and none leads. A tick names the time that it has read: the first worker that writes the next time
has enqueued the message in the same transaction, and the others find another time.
"""

from __future__ import annotations

import asyncio
import logging
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
from pgoutbox.schedules import LATE_SECONDS, Rule, RuleError, Schedule
from pgoutbox.topics import Topic, name_of

_LOOK_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 5.0


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
        self._troubles = set[str]()
        self._has_cron = _has_cron()

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
            if not is_transient_error(error):  # The worker itself reports passing errors of its connection.
                self._report_trouble(error)
            return _RETRY_SECONDS
        return seconds

    def _report_trouble(self, error: Exception, schedule: str | None = None) -> None:
        """Report each kind of error once, until a tick succeeds."""
        trouble = f"{schedule} {kind_of(error)}"
        if trouble in self._troubles:
            return
        self._troubles.add(trouble)
        text = "schedules cannot be read or enqueued, trying again"
        hint = error.diag.message_primary if isinstance(error, psycopg.Error) else str(error)
        names = {} if schedule is None else {"schedule": schedule}
        report = self._telemetry.report
        report(logging.ERROR, LogEvent.SCHEDULES_FAILED, text, reason=kind_of(error), detail=hint, **names)

    async def _tick(self) -> float:
        while self._undeclared:
            one = self._undeclared[0]
            values = {**one._asdict(), "rule": one.rule.text, "timezone": one.rule.timezone, "until_at": one.until}
            await self._store.claims.fetch(sql.DECLARE_SCHEDULE, values)
            del self._undeclared[0]
        names = [one.name for one in self._declared]
        rows = await self._store.claims.fetch(sql.NEXT_SCHEDULES, {"declared": names})
        is_refused = False
        for found in map(_Found._make, rows):
            if found.next_at is not None and found.next_at > found.now:
                seconds = min(_LOOK_SECONDS, (found.next_at - found.now).total_seconds())
                break
            try:
                await self._tick_one(found)
            except psycopg.Error as error:
                if not is_refusal(error):
                    raise
                is_refused = True  # A trigger, for example. The others do not wait for it.
                self._report_trouble(error, found.name)
        else:
            seconds = 0.0 if rows else _LOOK_SECONDS
        if is_refused:
            return _RETRY_SECONDS
        self._troubles.clear()
        return seconds

    async def _tick_one(self, found: _Found) -> None:
        try:
            rule = Rule(found.rule, found.timezone)
            times = [] if found.next_at is None else _due_of(rule, found, found.next_at)
            next_at = next(rule.after(found.now), None)
        except RuleError as error:
            text = "a schedule is not served, change it"
            report = self._telemetry.report
            report(logging.ERROR, LogEvent.SCHEDULE_REFUSED, text, schedule=found.name, reason=str(error))
            refusal = {"name": found.name, "revision": found.revision, "problem": str(error)}
            await self._store.claims.fetch(sql.REFUSE_SCHEDULE, refusal)
            return
        if next_at is not None and found.until_at is not None and next_at > found.until_at:
            next_at = None
        tick = {
            "name": found.name,
            "revision": found.revision,
            "known_next_at": found.next_at,
            "times": times,
            "next_at": next_at,
        }
        ((ids,),) = await self._store.claims.fetch(sql.TICK_SCHEDULE, tick)
        if ids:
            self._wake()  # A session that listens itself hears nothing of its own enqueues.


def _has_cron() -> bool:
    return find_spec("cronsim") is not None


def _due_of(rule: Rule, found: _Found, since: datetime) -> list[datetime]:
    """Return the times for which messages are to be enqueued now."""
    times = rule.passed(since, found.now)
    if found.until_at is not None:
        times = [time for time in times if time <= found.until_at]
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
