"""Outages of the database: the worker logs an outage once, and tries again with growing pauses.

It only retries after transient errors. A permanent error ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Final

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.server import CopyError, missing_object
from pgoutbox.database.worker_connection import is_transient_error, kind_of
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker.backoff import Backoff

_LOST_RACES: Final = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
_MISSING: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.InvalidSchemaName,
)

_COPY_REPEAT_SECONDS: Final = 60.0
_STOPPING_PAUSE_SECONDS: Final = 0.2


class Outage:
    """An outage of the database, as the statements of one worker see it: ongoing, or not.

    A copy of the database is like an outage: the worker tries again until an operator adopts it.
    """

    def __init__(self, telemetry: Telemetry, *, stopping: asyncio.Event) -> None:
        self._telemetry = telemetry
        self._stopping = stopping
        self._backoff = Backoff(0.05, 5.0)
        self.is_ongoing = False
        self.is_copy = False
        """The database is a copy, so the worker claims nothing."""
        self._copy_reported_at = -math.inf

    async def pause_or_raise(self, error: BaseException) -> None:
        """Pause after a transient database error, shortly if `stopping`. Raise a permanent one."""
        if isinstance(error, _LOST_RACES):
            return  # Two claims conflicted at one row; the next claim sees the result.
        if not is_transient_error(error):
            lacking = missing_object(str(error).partition("\n")[0]) if isinstance(error, _MISSING) else None
            raise lacking or error from (error if lacking else None)
        if isinstance(error, CopyError):
            self._report_copy(error)
        elif not self.is_ongoing:
            self.is_ongoing = True
            self._backoff.reset()
            self._telemetry.report(
                logging.WARNING,
                LogEvent.DATABASE_LOST,
                "the database does not answer",
                reason=_name_of(error),
            )
        # Notifications are frequent while the database restarts. They do not shorten the pause.
        seconds = self._backoff.next()
        if self._stopping.is_set():
            await asyncio.sleep(min(seconds, _STOPPING_PAUSE_SECONDS))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _report_copy(self, error: CopyError) -> None:
        if not self.is_copy:
            self.is_copy = True
            self._backoff.reset()
        if elapsed_clock() - self._copy_reported_at >= _COPY_REPEAT_SECONDS:
            self._copy_reported_at = elapsed_clock()
            self._telemetry.report(
                logging.ERROR, LogEvent.HELD_IN_COPY, "the database is a copy: nothing is claimed", reason=str(error)
            )

    def end(self) -> None:
        """Report an answer of the database."""
        if self.is_copy:
            self.is_copy = False
            self._telemetry.report(logging.INFO, LogEvent.COPY_ADOPTED, "the database is not a copy, claiming again")
        if self.is_ongoing:
            self.is_ongoing = False
            self._telemetry.report(logging.INFO, LogEvent.DATABASE_BACK, "database answers again")


def _name_of(error: BaseException) -> str:
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        # A connection error: only its text gives the reason.
        return f"{kind_of(error)}: {' '.join(str(error).split())[:300]}"
    return kind_of(error)
