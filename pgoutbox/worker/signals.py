"""What the parts of a worker report to the kernel: reasons to claim again, and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgoutbox.database.store import DueRow
from pgoutbox.kernel.run import Run
from pgoutbox.kernel.seams import Row

if TYPE_CHECKING:
    from pgoutbox.worker.attempt import Attempt


class Signals:
    """Set by any part of a run, on the event loop. The run sets its kernel before any part begins."""

    kernel: Run[Attempt] | None = None

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """The worker must stop."""
        self.progress = asyncio.Event()
        """An attempt has ended, or its end is written."""
        self.failed = asyncio.Event()
        """A message has failed."""
        self.limited_queues: frozenset[str] = frozenset()
        """The queues that are paused or have limits, by the last answer. There an end may free a permit."""
        self.due_seconds: float | None = None
        """The seconds to the next due time, by the last answer."""

    def read_due(self, rows: Sequence[Row]) -> float | None:
        """Return the seconds to the next due time, by an answer to next_due.sql."""
        due = [DueRow._make(row[:5]) for row in rows]
        self.limited_queues = frozenset(row.queue for row in due if row.is_limited)
        known = [s for row in due for s in (row.first_seconds, row.other_seconds) if s is not None]
        self.due_seconds = min(known, default=None)
        return self.due_seconds

    def note_notification(self, queue: str | None) -> None:
        """Claim from a queue: messages may have become claimable. With None, look for everything again."""
        if queue is None:
            self.poll_all_lanes()
        elif self.kernel is not None:
            self.kernel.want(queue)

    def poll_all_lanes(self) -> None:
        """Look for everything again, also for lapsed attempts."""
        if self.kernel is not None:
            self.kernel.sweep()

    def forget_suspect(self, attempt: Attempt) -> None:
        """Take over the next suspect, if this attempt was one: it has ended or hangs, so it is not likely to crash."""
        if self.kernel is not None:
            self.kernel.forget_suspect(attempt.message_id)

    def note_progress(self) -> None:
        """React to the end of an attempt, before or after it is written."""
        self.progress.set()
        if self.kernel is not None:
            self.kernel.wake()

    def note_ends(self) -> None:
        """React to ends that the next trip writes. It claims too: each end may free a permit."""
        for queue in self.limited_queues:
            self.note_notification(queue)
