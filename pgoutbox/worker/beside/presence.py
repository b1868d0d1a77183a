"""Presence: a worker reports that it runs, with its queues and topics, and warns about messages that nobody claims.

Each worker writes its row of `pgoutbox.worker` with one statement a minute, and notes its stop there. The row of a
worker that died is ignored after three minutes. The last run of `run_once` or `drain` leaves its row. Only people,
warnings and the circuit breakers of the next run depend on these rows, never a claim.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.server import PACKAGE_VERSION, OldPackageError, refusals
from pgoutbox.database.worker_connection import is_transient_error, kind_of
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.run_state import RunState

_INTERVAL_SECONDS: Final = 60.0
_JITTER: Final = 0.1
# Workers of a fleet start one after the other: before this time, a queue may still get its worker.
_FIRST_LOOK_SECONDS: Final = 10.0
_LATE_SECONDS: Final = 60.0
_REPEAT_SECONDS: Final = 3_600.0
_END_SECONDS: Final = 2.0


class Trouble(NamedTuple):
    """A problem that a report of presence finds, in the order of `sql.REPORT_WORKER`.

    An open breaker with its key, or late messages that no running worker claims, with their queue: because none serves
    that queue (`queue`), or because none that serves it has a handler for these topics (`handler`).
    """

    kind: Literal["breaker", "queue", "handler"]
    name: str
    topics: list[str]
    messages: int
    seconds: float


class Presence:
    """Reports this worker's presence.

    `defined` are the queues of the outbox's topics: their late messages matter too if this worker does not serve them.
    A warning is logged when its cause is found, and again every hour while it lasts. A run of `run_once` or `drain`
    does not warn: cron starts one every minute.
    """

    def __init__(
        self,
        run: RunState,
        *,
        defined: Sequence[str],
        ends_by_itself: bool = False,
        clock: Callable[[], float] = elapsed_clock,
    ) -> None:
        self._stop = run.stop
        self._store = run.store
        self._telemetry = run.telemetry
        self._queues = run.queues.names
        self._topics = run.topics
        self._watched = [] if ends_by_itself else sorted({*run.queues.names, *defined})
        self._settings = run.settings
        self._ends_by_itself = ends_by_itself
        self._clock = clock
        self._warned_at: dict[tuple[str, str, tuple[str, ...]], float] = {}
        self._failure: str | None = None
        self._has_reported = False

    async def end(self, failures: Mapping[str, Mapping[str, Any]]) -> None:
        """Report the end, if the database answers soon. A run leaves its failures to the next one."""
        if not self._has_reported:
            return
        statement, parameters = sql.END_WORKER, {"worker": self._store.worker}
        if self._ends_by_itself:
            memories = {key: memory or None for key, memory in failures.items()}  # None deletes that of an earlier run.
            statement, parameters["failures"] = sql.END_RUN, json.dumps(memories)
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._store.claims.fetch(statement, parameters)
        except (psycopg.Error, OSError) as error:
            self._note_failure(error)

    async def keep_reporting(self) -> None:
        """Report periodically after the first report, until cancelled."""
        await asyncio.sleep(_FIRST_LOOK_SECONDS)
        while True:
            await self.report()
            await asyncio.sleep(_INTERVAL_SECONDS * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def report(self, *, is_first: bool = False) -> bool:
        """Report once, and warn. The first report does not warn about messages: other workers may start now.

        Errors are logged, not raised. Only a schema that has become too new for this package stops the worker. Returns
        whether the report was not locked out.
        """
        self._has_reported = True
        parameters = {
            "worker": self._store.worker,
            "queues": self._queues,
            "topics": self._topics,
            "redirect_to": self._settings.redirect.to,
            "version": PACKAGE_VERSION,
            "slots": self._settings.concurrency,
            "watched": self._watched,
            "late_seconds": _LATE_SECONDS,
        }
        try:
            with refusals():
                rows = await self._store.claims.fetch(sql.REPORT_WORKER, parameters)
        except OldPackageError as error:
            self._stop(error)
            return True
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here ends the worker
            self._note_failure(error)
            return not isinstance(error, psycopg.errors.LockNotAvailable)
        self._failure = None
        if self._ends_by_itself:
            return True
        troubles = map(Trouble._make, rows)
        found = {_identity(trouble): trouble for trouble in troubles if trouble.kind == "breaker" or not is_first}
        self._warned_at = {identity: at for identity, at in self._warned_at.items() if identity in found}
        now = self._clock()
        for identity, trouble in found.items():
            if now - self._warned_at.get(identity, -_REPEAT_SECONDS) >= _REPEAT_SECONDS:
                self._warned_at[identity] = now
                self._warn(trouble)
        return True

    def _warn(self, trouble: Trouble) -> None:
        if trouble.kind == "breaker":
            self._telemetry.report(
                logging.WARNING,
                LogEvent.BREAKER_STILL_OPEN,
                "messages wait for an open breaker; see pgoutbox doctor",
                breaker=trouble.name,
                open_seconds=round(trouble.seconds),
            )
            return
        self._telemetry.report(
            logging.WARNING,
            LogEvent.MESSAGES_UNCLAIMED,
            "no worker serves the queue of due messages"
            if trouble.kind == "queue"
            else "no worker has a handler for due messages",
            queue=trouble.name,
            topics=trouble.topics,
            message_count=trouble.messages,
            oldest_seconds=round(trouble.seconds),
        )

    def _note_failure(self, error: Exception) -> None:
        """Log each kind of error once, until a report succeeds. The worker itself logs that the database is lost."""
        failure = kind_of(error)
        if failure != self._failure and not is_transient_error(error):
            self._failure = failure
            self._telemetry.report(
                logging.WARNING,
                LogEvent.PRESENCE_UNKNOWN,
                "the worker could not report its queues and topics",
                reason=failure,
            )


def _identity(trouble: Trouble) -> tuple[str, str, tuple[str, ...]]:
    return trouble.kind, trouble.name, tuple(trouble.topics)
