"""The state of one run of a worker that its parts share: settings, database, queues, kernel and attempts in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

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

LAST_WRITES_SECONDS: Final = 10.0
"""After the grace time, a run that ends waits so long for the database."""


@dataclass(eq=False, repr=False)
class RunState:
    """Each part of a run gets it. Attempts are in `in_flight` from the claim's answer to the finish's answer.

    `kernel` is set before any part begins. A direct send has none.
    """

    settings: Settings
    store: Store
    telemetry: Telemetry
    _: KW_ONLY
    queues: Turns
    topics: list[str]
    """The topics whose messages this worker claims, in alphabetical order. They change: see `AttemptPool`."""
    stopping: asyncio.Event
    own_topics: Set[str] = frozenset()
    """The topics whose own queue this worker serves, without those of hooks and alerts."""
    is_one_of_many: bool = False
    """Whether this process also serves other databases. Then listener and claims share a connection."""
    kernel: Run[Attempt] = field(init=False)
    error: PgOutboxError | None = None
    """Why the run has stopped by itself. It raises this error at its end."""
    in_flight: InFlight = field(default_factory=InFlight)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """An attempt has ended, or its end is written."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """A message has failed."""
    limited_queues: frozenset[str] = frozenset()
    """The queues that are paused or have limits, by the last answer. There an end may free a permit."""
    fair_queues: frozenset[str] = frozenset()
    """The queues that have had messages with a fair key."""
    waiting_queues: frozenset[str] = frozenset()
    """Those in which such messages wait for their turn. There an end may free one."""
    due_seconds: float | None = None
    """The seconds to the next due time, by the last answer."""
    polled_at: float = field(default_factory=elapsed_clock)
    """The time of the last answered trip."""
    grace_ends_at: float | None = None
    """When a stopping run gives up its handlers, by the monotonic clock."""

    def __post_init__(self) -> None:
        self.alert_queue = self.queues.names[0] if ALERT_TOPIC in self.topics else None
        self.outage = Outage(self.telemetry, stopping=self.stopping)
        self.store.on_lost = self.in_flight.note_lost_connection

    def stop(self, error: PgOutboxError | None = None) -> None:
        """Begin to stop the run, which then raises `error`. Idempotent. Call it on the event loop."""
        self.error = self.error or error
        self.begin_grace()
        if not self.stopping.is_set():
            self.stopping.set()
            count, report, text = len(self.in_flight), self.telemetry.report, "worker stopping"
            if error is None:
                report(logging.INFO, LogEvent.WORKER_STOPPING, text, in_flight_count=count)
            else:
                report(logging.ERROR, LogEvent.WORKER_STOPPING, text, in_flight_count=count, reason=str(error))
        self.progress.set()

    def begin_grace(self) -> float:
        """Give the handlers the grace time, and after it the database some seconds. Return when it ends. Idempotent."""
        if self.grace_ends_at is None:
            self.grace_ends_at = time.monotonic() + self.settings.shutdown_grace_seconds
            self.store.give_up_at(self.grace_ends_at + LAST_WRITES_SECONDS)
        return self.grace_ends_at

    def note_progress(self) -> None:
        """React to the end of an attempt, before or after it is written."""
        self.progress.set()
        self.kernel.wake()

    def note_ends(self) -> None:
        """React to ends that the next trip writes. It claims too: each end may free a permit or a turn."""
        for queue in self.limited_queues | self.waiting_queues:
            self.kernel.want(queue)

    def read_due(self, rows: Sequence[Row]) -> float | None:
        """Return the seconds to the next due time, by an answer to next_due.sql."""
        due = [DueRow._make(row[:5]) for row in rows]
        self.limited_queues = frozenset(row.queue for row in due if row.permit_seconds is not None)
        if news := {row[0] for row in rows if row[6]} - self.fair_queues:
            self.fair_queues |= news
            for queue in news:
                self.kernel.want(queue)
        self.due_seconds = min((row.due_seconds for row in due if row.due_seconds is not None), default=None)
        return self.due_seconds
