"""What the parts of a worker report to its poll loop: reasons to poll or to wake up, and the suspects in flight.

Suspects are messages whose previous attempt was lost: one of them may have crashed its process and ended the other
attempts there. So a worker has only few of them in flight, all of which can afford another loss, or a single one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from pgoutbox.clock import elapsed_clock
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.claim_planner import QueueSchedule

_MAX_SUSPECTS: Final = 8


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
        self.is_notified = False
        """A notification came after the last poll for fresh messages began."""
        self.needs_full_poll = True
        """Messages may have become claimable anywhere since the last full poll began."""
        self.suspects: list[Attempt] = []
        """The attempts in flight whose previous attempt was lost: any of them may crash this process."""
        self.is_suspect_alone = False
        """Whether the last suspect was claimed alone, so that no other may be in flight beside it."""

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
        if self.suspects:
            ended = [attempt for attempt in self.suspects if self._in_flight.get(attempt.message.id) is not attempt]
            if ended:
                self._remove_suspects(ended)

    def note_written(self) -> None:
        """React to a batch of ends that is written."""
        self.note_progress()
        if self._queues.may_wait_for_ends:
            self.wake.set()

    def add_suspects(self, suspects: Sequence[Attempt]) -> None:
        """Count these as suspects in flight until they have ended, but for no longer than a lease."""
        if suspects:
            self.suspects += suspects
            asyncio.get_running_loop().call_later(self._lease_seconds, self._remove_suspects, suspects)

    def _remove_suspects(self, suspects: Sequence[Attempt]) -> None:
        self.suspects[:] = [attempt for attempt in self.suspects if attempt not in suspects]
        if self.suspect_room:
            self.progress.set()
            self.poll_all_lanes()

    @property
    def suspect_count(self) -> int:
        """The number of suspects in flight."""
        return sum(self._in_flight.get(attempt.message.id) is attempt for attempt in self.suspects)

    @property
    def suspect_room(self) -> int:
        """The number of suspects that may be claimed now: when half of them have ended, others take their places."""
        count = self.suspect_count
        if count and (self.is_suspect_alone or 2 * count > _MAX_SUSPECTS):
            return 0
        return _MAX_SUSPECTS - count
