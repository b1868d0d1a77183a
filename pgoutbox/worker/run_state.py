"""The state of one run of a worker that its parts share: settings, database, queues, kernel and attempts in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence, Set

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import DueRow, Store
from pgoutbox.errors import PgOutboxError
from pgoutbox.kernel.run import Run
from pgoutbox.kernel.seams import Row
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.worker.attempt import Attempt, InFlight
from pgoutbox.worker.outage import Outage
from pgoutbox.worker.queues import Turns


class RunState:
    """Each part of a run gets it. Attempts are in `in_flight` from the claim's answer to the finish's answer.

    `kernel` is set before any part begins. A direct send has none.
    """

    kernel: Run[Attempt]

    def __init__(
        self,
        settings: Settings,
        store: Store,
        telemetry: Telemetry,
        *,
        queues: Turns,
        topics: list[str],
        stopping: asyncio.Event,
        own_topics: Set[str] = frozenset(),
    ) -> None:
        self.settings = settings
        self.store = store
        self.telemetry = telemetry
        self.queues = queues
        self.topics = topics
        """The topics whose messages this worker claims, in alphabetical order. They change: see `AttemptPool`."""
        self.own_topics = own_topics
        """The topics whose own queue this worker serves, without those of hooks and alerts."""
        self.alert_queue = queues.names[0] if ALERT_TOPIC in topics else None
        self.stopping = stopping
        self.error: PgOutboxError | None = None
        """Why the run has stopped by itself. It raises this error at its end."""
        self.in_flight = InFlight()
        store.on_lost = self.in_flight.note_lost
        self.outage = Outage(telemetry, stopping=stopping)
        self.progress = asyncio.Event()
        """An attempt has ended, or its end is written."""
        self.failed = asyncio.Event()
        """A message has failed."""
        self.limited_queues: frozenset[str] = frozenset()
        """The queues that are paused or have limits, by the last answer. There an end may free a permit."""
        self.due_seconds: float | None = None
        """The seconds to the next due time, by the last answer."""
        self.polled_at = elapsed_clock()
        """The time of the last answered trip."""

    def stop(self, error: PgOutboxError | None = None) -> None:
        """Begin to stop the run, which then raises `error`. Idempotent. Call it on the event loop."""
        self.error = self.error or error
        if not self.stopping.is_set():
            self.stopping.set()
            count, report, text = len(self.in_flight), self.telemetry.report, "worker stopping"
            if error is None:
                report(logging.INFO, LogEvent.WORKER_STOPPING, text, in_flight_count=count)
            else:
                report(logging.ERROR, LogEvent.WORKER_STOPPING, text, in_flight_count=count, reason=str(error))
        self.progress.set()

    def note_progress(self) -> None:
        """React to the end of an attempt, before or after it is written."""
        self.progress.set()
        self.kernel.wake()

    def note_ends(self) -> None:
        """React to ends that the next trip writes. It claims too: each end may free a permit."""
        for queue in self.limited_queues:
            self.kernel.want(queue)

    def read_due(self, rows: Sequence[Row]) -> float | None:
        """Return the seconds to the next due time, by an answer to next_due.sql."""
        due = [DueRow._make(row[:5]) for row in rows]
        self.limited_queues = frozenset(row.queue for row in due if row.is_limited)
        known = [s for row in due for s in (row.first_seconds, row.other_seconds) if s is not None]
        self.due_seconds = min(known, default=None)
        return self.due_seconds
