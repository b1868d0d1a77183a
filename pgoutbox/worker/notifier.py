"""Notifications that a worker sends to others, for messages that only it knows to be due."""

from __future__ import annotations

import math
from collections.abc import Collection

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.worker.claim_planner import QueueSchedule
from pgoutbox.worker.outage import Outage
from pgoutbox.worker.signals import Signals


class Notifier:
    """Wakes idle workers. `notified_at` is the time of the last notification, on `elapsed_clock`."""

    def __init__(self, store: Store, queues: QueueSchedule, signals: Signals, outage: Outage) -> None:
        self._store = store
        self._queues = queues
        self._signals = signals
        self._outage = outage
        self.notified_at = -math.inf

    async def notify(self, queues: Collection[str]) -> None:
        """Wake the idle workers of these queues."""
        self.notified_at = elapsed_clock()
        try:
            await self._store.notify_workers(sorted(queues))
        except psycopg.errors.ProgramLimitExceeded:
            pass  # The notification queue is full. A notification is only a hint, and idle workers poll then.
        except (psycopg.Error, OSError) as error:
            await self._outage.pause_or_raise(error)

    async def wake(self, queues: Collection[str]) -> None:
        """Wake a worker of each of these queues, in which messages have become claimable: itself, or others."""
        if any(queue in self._queues for queue in queues):
            self._signals.poll_all_lanes()
        foreign = [queue for queue in queues if queue not in self._queues]
        if foreign:
            await self.notify(foreign)
