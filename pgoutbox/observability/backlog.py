"""The gauges of the database: due, scheduled, in-flight and failed messages, read on request.

Readings are cached for a few seconds, longer if they are slow, so that monitoring cannot overload the database. Only
one reading runs at a time, in a thread of its own, so that callers can stop waiting even if the network is dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import psycopg

from pgoutbox.database import operator_connection, sql
from pgoutbox.errors import PgOutboxError
from pgoutbox.observability.measures import (
    BACKLOG_AGE,
    BACKLOG_READ,
    BACKLOG_UP,
    BREAKERS,
    MESSAGES,
    OLDEST_DUE,
    OTHER,
    QUEUE_PAUSED,
    REDIRECTS,
    Metric,
    Sample,
)
from pgoutbox.settings import Settings

PATIENCE_SECONDS: Final = 3.0
_SHARE: Final = 20
_STATES: Final = ("due", "scheduled", "sending", "failed")


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


NO_READING: Final = Reading(is_up=False)


class Backlog:
    """Reads the gauges, with a new connection for each reading. Any thread may call it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = threading.Lock()
        self._last: Future[Reading] | None = None

    def ask(self) -> Future[Reading]:
        """Return a future of the cached reading if it is recent enough, else of the next one. Never raises."""
        with self._turn:
            if self._last is None or (self._last.done() and not self._is_good(self._last.result())):
                self._last = Future()
                threading.Thread(
                    target=self._read_into, args=[self._last], name="pgoutbox-backlog", daemon=True
                ).start()
            return self._last

    def _is_good(self, reading: Reading) -> bool:
        return reading.age_seconds < max(self._settings.metrics.cache_seconds, _SHARE * reading.seconds)

    def _read_into(self, future: Future[Reading]) -> None:
        began_at = time.monotonic()
        try:
            samples = self._read()
        except (psycopg.Error, PgOutboxError, OSError):
            # The worker's log has the reason: it uses the same database.
            future.set_result(Reading(is_up=False, read_at=time.monotonic(), seconds=time.monotonic() - began_at))
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            ended_at = time.monotonic()
            future.set_result(Reading(is_up=True, samples=samples, read_at=ended_at, seconds=ended_at - began_at))

    def _read(self) -> dict[Metric, list[Sample]]:
        names = {"max_label_values": self._settings.metrics.max_label_values, "other": OTHER}
        with operator_connection.connect(self._settings, read_only=True) as connection:

            def look() -> dict[Metric, list[Sample]]:
                connection.execute(sql.LIMIT_GAUGES)
                counts = connection.execute(sql.COUNT_BACKLOG, names).fetchall()
                paused = connection.execute(sql.PAUSED_QUEUES, names).fetchall()
                breakers = connection.execute(sql.COUNT_BREAKERS).fetchall()
                redirects = connection.execute(sql.COUNT_REDIRECTS).fetchall()
                return {
                    MESSAGES: [
                        Sample((topic, queue, state), number)
                        for topic, queue, *numbers, _ in counts
                        for state, number in zip(_STATES, numbers, strict=True)
                    ],
                    OLDEST_DUE: [Sample((row[0], row[1]), row[-1] or 0.0) for row in counts],
                    QUEUE_PAUSED: [Sample((queue,), 1) for (queue,) in paused],
                    BREAKERS: [Sample((scheme, state), count) for scheme, state, count in breakers],
                    REDIRECTS: [Sample((source,), count) for source, count in redirects],
                }

            return operator_connection.transact(connection, look)
