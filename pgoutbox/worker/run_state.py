"""The state of one run of a worker that its parts share: settings, database, queues, signals and attempts in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.errors import PgOutboxError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.worker.attempt import InFlight
from pgoutbox.worker.outage import Outage
from pgoutbox.worker.queues import Turns
from pgoutbox.worker.signals import Signals


class RunState:
    """Each part of a run gets it. Attempts are in `in_flight` from the claim's answer to the finish's answer."""

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
        self.signals = Signals()
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
        self.signals.wake.set()
        self.signals.progress.set()
