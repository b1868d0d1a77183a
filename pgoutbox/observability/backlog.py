"""The gauges of the database, read on request: counts of messages, and the ages and faults that alerts read.

Readings are cached for a few seconds, longer if they are slow, so that monitoring cannot overload the database. Only
one reading runs at a time, in a thread of its own, so that callers can stop waiting even if the network is dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, LiteralString

import psycopg
from psycopg.errors import LockNotAvailable, QueryCanceled

from pgoutbox.database import operator_connection, sql
from pgoutbox.errors import PgOutboxError
from pgoutbox.observability.measures import (
    BACKLOG_AGE,
    BACKLOG_READ,
    BACKLOG_UP,
    BREAKERS,
    DATABASE_METRICS,
    LATELY_FAILED,
    MAINTENANCE_AGE,
    MESSAGES,
    OLDEST_ATTEMPT,
    OLDEST_DUE,
    OLDEST_UNDELIVERED,
    OTHER,
    REDIRECTS,
    Metric,
    Sample,
)
from pgoutbox.settings import Settings

_PATIENCE_SECONDS: Final = 3.0
_SHARE: Final = 20
_ASKED_SECONDS: Final = 300.0
_PAUSE_SECONDS: Final = 1.0
_QUEUES: Final = 100_000
_ROWS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one reading; without samples if the database did not answer."""

    is_up: bool
    samples: Mapping[Metric, Sequence[Sample]] = field(default_factory=dict)
    read_at: float = 0.0
    seconds: float = 0.0

    @property
    def age_seconds(self) -> float:
        """The age of the reading, in seconds."""
        return time.monotonic() - self.read_at

    def samples_of(self, metric: Metric) -> Sequence[Sample]:
        """Return the values of a metric of the database, or of the reading itself."""
        about_reading = {BACKLOG_AGE: self.age_seconds, BACKLOG_READ: self.seconds} if self.is_up else {}
        about_reading[BACKLOG_UP] = int(self.is_up)
        return [Sample((), about_reading[metric])] if metric in about_reading else self.samples.get(metric, ())

    def all_samples(self) -> Mapping[Metric, Sequence[Sample]]:
        """Return the values of all metrics of the database."""
        return {metric: self.samples_of(metric) for metric in DATABASE_METRICS}


NO_READING: Final = Reading(is_up=False)


class Backlog:
    """Reads the gauges, with a new connection for each reading. Any thread may call it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = threading.Lock()
        self._last: Future[Reading] | None = None
        self.last_reading: Reading | None = None
        """The result of the last reading that has ended."""

    def ask(self) -> Future[Reading]:
        """Return a future of the cached reading if it is recent enough, else of the next one. Never raises."""
        with self._turn:
            if self._last is None or (self._last.done() and not self.is_fresh):
                self._last = Future()
                threading.Thread(
                    target=self._read_into, args=[self._last], name="pgoutbox-backlog", daemon=True
                ).start()
            return self._last

    def reading(self) -> Reading:
        """Return the reading of `ask`, or `NO_READING` if it takes more than three seconds."""
        try:
            return self.ask().result(_PATIENCE_SECONDS)
        except TimeoutError:
            return NO_READING

    @property
    def is_fresh(self) -> bool:
        """Whether the last reading is recent enough."""
        reading = self.last_reading
        limit_seconds = self._settings.metrics.cache_seconds
        return reading is not None and reading.age_seconds < max(limit_seconds, _SHARE * reading.seconds)

    def _read_into(self, future: Future[Reading]) -> None:
        began_at = time.monotonic()
        samples = None
        try:
            samples = self._read()
        except (psycopg.Error, PgOutboxError, OSError):
            pass  # The worker's log has the reason: it uses the same database.
        except BaseException as error:
            future.set_exception(error)
            raise
        ended_at = time.monotonic()
        self.last_reading = Reading(samples is not None, samples or {}, read_at=ended_at, seconds=ended_at - began_at)
        future.set_result(self.last_reading)

    def _read(self) -> dict[Metric, list[Sample]]:
        names = {
            "max_label_values": self._settings.metrics.max_label_values,
            "other": OTHER,
            "prefix": "",
            "queues": _QUEUES,
            "rows": _ROWS,
        }
        with operator_connection.connect(self._settings, read_only=True) as connection:

            def look() -> dict[Metric, list[Sample]]:
                def samples(statement: LiteralString) -> list[Sample]:
                    return [
                        Sample(tuple(labels), value)
                        for *labels, value in connection.execute(statement, names).fetchall()
                    ]

                connection.execute(sql.LIMIT_GAUGES)
                messages = []
                # All messages may be too many to count. The other gauges read a few rows each.
                with contextlib.suppress(QueryCanceled, LockNotAvailable), connection.transaction():
                    messages = samples(sql.COUNT_BACKLOG)
                connection.execute(sql.PREPARE_PAGE)
                return {
                    MESSAGES: messages,
                    OLDEST_DUE: samples(sql.OLDEST_DUE),
                    OLDEST_UNDELIVERED: samples(sql.OLDEST_UNDELIVERED),
                    OLDEST_ATTEMPT: samples(sql.OLDEST_ATTEMPTS),
                    LATELY_FAILED: samples(sql.COUNT_LATELY_FAILED),
                    MAINTENANCE_AGE: samples(sql.MAINTENANCE_AGE),
                    BREAKERS: samples(sql.COUNT_BREAKERS),
                    REDIRECTS: samples(sql.COUNT_REDIRECTS),
                }

            return operator_connection.transact(connection, look)


class TurnsOfBacklogs:
    """Reads the gauges of many databases, one after the other, while somebody asks for them.

    Reading takes at most a twentieth of the time. A database that does not answer within three seconds waits for its
    next turn. Any thread may call it.
    """

    def __init__(self, backlogs: Callable[[], Mapping[str, Backlog]]) -> None:
        self._backlogs = backlogs
        self._turn = threading.Lock()
        self._reader: threading.Thread | None = None
        self._asked_at = 0.0
        self._ended = threading.Event()

    def keep_reading(self) -> None:
        """Read for the next five minutes. Never waits."""
        with self._turn:
            self._asked_at = time.monotonic()
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._read, name="pgoutbox-backlogs", daemon=True)
                self._reader.start()

    def stop(self) -> None:
        """Read no more."""
        self._ended.set()

    def _read(self) -> None:
        while time.monotonic() - self._asked_at < _ASKED_SECONDS:
            stale = [backlog for backlog in self._backlogs().values() if not backlog.is_fresh]
            for backlog in stale:
                reading = backlog.reading()
                if self._ended.wait((_SHARE - 1) * reading.seconds if reading.is_up else _PAUSE_SECONDS):
                    return
            if not stale and self._ended.wait(_PAUSE_SECONDS):
                return
