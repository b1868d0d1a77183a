"""Tells a person of failed messages: enqueues alerts at the first failure, and looks for those that others have missed.

The statement looks at the messages, and not at what this worker has seen. So a failure is told even if its worker died
with it, and each cause is told once a day, whichever workers look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from pgoutbox.database import sql
from pgoutbox.database.worker_connection import kind_of
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.run_state import RunState

_LOOK_SECONDS: Final = 300.0
_PAUSE_SECONDS: Final = 60.0
_AT_ONCE: Final = 10
_FAILURES_TOLD: Final = 50_000


class FailureAlerts:
    """Looks for failures. It does nothing if the run has no handler of alerts."""

    def __init__(self, run: RunState) -> None:
        self._store = run.store
        self._telemetry = run.telemetry
        self._failed = run.failed
        self._queue = run.alert_queue
        self._trouble: str | None = None

    async def keep_looking(self) -> None:
        """Look at once, after each failure here, and every five minutes, until cancelled.

        It looks at most once a minute, so that many causes at once do not flood their reader.
        """
        await self.look()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._failed.wait()
            await self.look()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def look(self) -> int:
        """Enqueue the alerts that are missing. Return their number. An error is reported, not raised."""
        if self._queue is None:
            return 0
        self._failed.clear()
        try:
            count = await self._tell(self._queue)
        except Exception as error:  # noqa: BLE001 - nothing that goes wrong here ends the worker
            reason = kind_of(error)
            if reason != self._trouble:
                self._trouble = reason
                text = "alerts about failed messages cannot be enqueued, trying again"
                self._telemetry.report(logging.WARNING, LogEvent.ALERTS_FAILED, text, reason=reason)
            return 0
        self._trouble = None
        return count

    async def _tell(self, queue: str) -> int:
        """Enqueue up to so many new alerts as their reader can read; the next look enqueues others."""
        count = 0
        called_for = await self._store.alerts.fetch(sql.UNTOLD_FAILURES, {"cap": _FAILURES_TOLD})
        for first in range(0, len(called_for), _AT_ONCE):
            alerts = called_for[first : first + _AT_ONCE]
            parameters = {
                "dedupe_keys": [key for key, _, _ in alerts],
                "payloads": [payload for _, payload, _ in alerts],
                "alert_queue": queue,
                "alert_destinations": self._store.alert_destinations,
            }
            ((enqueued,),) = await self._store.alerts.fetch(sql.TELL_FAILURES, parameters)
            count += enqueued
            if count >= _AT_ONCE:
                break
        return count
