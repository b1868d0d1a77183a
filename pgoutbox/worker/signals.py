"""What the parts of a worker report to its poll loop: reasons to poll or to wake up, and the suspect in flight.

A suspect is a message whose attempt was lost after half of its attempts were used up, or beside such a message: it may
have crashed its process. So a worker has only one of them in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pgoutbox.clock import elapsed_clock
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.claim_planner import QueueSchedule


class Signals:
    """Set by any part of the worker, on the event loop; the poll loop reads them between two steps."""

    def __init__(self, queues: QueueSchedule, in_flight: Mapping[int, Attempt], *, lease_seconds: float) -> None:
        self._queues = queues
        self._in_flight = in_flight
        self._lease_seconds = lease_seconds
        self.wake = asyncio.Event()
        """There may be messages to claim, or the worker must stop."""
        self.progress = asyncio.Event()
        """An attempt has ended, or its end is written."""
        self.failed = asyncio.Event()
        """A message has failed."""
        self.is_notified = False
        """A notification came after the last poll for fresh messages began."""
        self.needs_full_poll = True
        """Messages may have become claimable anywhere since the last full poll began."""
        self.suspect: Attempt | None = None
        """The attempt of the suspect."""

    def note_notification(self, queue: str | None, /, *, is_new: bool = False) -> None:
        """Poll a queue, or with None all of them. `is_new` means an enqueued message, and no other change."""
        if queue is None or queue in self._queues:
            self.is_notified = True
            if is_new:
                self.wake.set()
            else:
                self.poll_all_lanes()

    def poll_again(self) -> None:
        """Poll from the beginning, now."""
        self.needs_full_poll = True
        self.wake.set()

    def poll_all_lanes(self) -> None:
        """Poll all lanes: messages may have become claimable in any of them."""
        self._queues.search(now=elapsed_clock())
        self.poll_again()

    def note_progress(self) -> None:
        """React to the end of an attempt, before or after it is written."""
        self.progress.set()
        if self.suspect is not None and self._in_flight.get(self.suspect.message.id) is not self.suspect:
            self.forget_suspect(self.suspect)

    def note_written(self) -> None:
        """React to a batch of ends that is written."""
        self.note_progress()
        if self._queues.may_wait_for_ends:
            self.wake.set()

    def note_suspect(self, suspect: Attempt) -> None:
        """Claim no other suspect until this one has ended or passed its timeout, but for no longer than a lease."""
        self.suspect = suspect
        asyncio.get_running_loop().call_later(self._lease_seconds, self.forget_suspect, suspect)

    def forget_suspect(self, suspect: Attempt) -> None:
        """Claim the next suspect, if this attempt was one: it has ended or hangs, so it is not likely to crash."""
        if self.suspect is suspect:
            self.suspect = None
            self.progress.set()
            self.poll_all_lanes()
