"""What a worker knows of each lane of its queues: whether something may be due, and where the next claim begins.

A claim that was filled goes on behind its last row. Otherwise it searches the lane from the beginning, which steps over
the dead index entries of finished messages; so a search that was slow may be repeated only after nine times its length.
Until then a claim reads what fell due lately, and the search is owed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

_ALL_TIME_SECONDS: Final = 1e9  # About 32 years.
# Messages become visible when their transaction commits.
_LATE_COMMIT_SECONDS: Final = 2.0
# Beside a backlog, messages before the last place are found by a search now and then.
_SEARCH_SECONDS: Final = 0.25
_CHEAP_SEARCH_SECONDS: Final = 0.005
_PAUSE_AFTER_SEARCH: Final = 9
_MAX_PAUSE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """Where a claim begins to read a lane: after a row, or at the messages that fell due in the last seconds."""

    after_at: datetime | None
    after_id: int
    since_seconds: float


@dataclass(slots=True, eq=False)
class Lane:
    """A lane of a queue. Times are seconds of one monotonic clock."""

    queue: str
    number: int
    is_wanted: bool = True
    """Whether the next claim reads this lane."""
    is_owed: bool = True
    """Whether a search from the beginning is owed."""
    _after: tuple[datetime, int] | None = None
    covered_at: float = -math.inf
    """All messages that were due then have been claimed."""
    searched_at: float = -math.inf
    _may_search_at: float = -math.inf
    _is_search: bool = False
    _began_at: float = -math.inf

    def want(self) -> None:
        """Claim from this lane next: something may have become due, anywhere in it."""
        self.is_wanted = self.is_owed = True

    def due_at(self) -> float:
        """When this lane should be read next."""
        if self.is_wanted:
            return -math.inf
        return self._may_search_at if self.is_owed else math.inf

    def begin(self, now: float) -> Start:
        """Return where the claim that begins now reads from."""
        self._began_at = now
        goes_on = self._after is not None and now - self.searched_at < _SEARCH_SECONDS
        self._is_search = now >= self._may_search_at and not goes_on
        if self._is_search:
            return Start(None, 0, _ALL_TIME_SECONDS)
        if self._after is not None:
            return Start(*self._after, 0.0)
        return Start(None, 0, min(now - self.covered_at + _LATE_COMMIT_SECONDS, _ALL_TIME_SECONDS))

    def record(self, last: tuple[datetime, int] | None, *, is_filled: bool, now: float) -> None:
        """Remember the end of the claim: its last row, and whether more rows may follow."""
        if self._is_search:
            self.searched_at = self._began_at
            seconds = now - self._began_at
            pause = seconds * _PAUSE_AFTER_SEARCH if seconds > _CHEAP_SEARCH_SECONDS else 0.0
            self._may_search_at = now + min(pause, _MAX_PAUSE_SECONDS)
            self.is_owed = False
        self._after = last if is_filled else None
        self.is_wanted = is_filled
        if not is_filled:
            self.covered_at = self._began_at


def fresh_and_retries(queues: Sequence[str]) -> list[Lane]:
    """Return the lanes of these queues, in their order."""
    return [Lane(queue, number) for queue in queues for number in (0, 1)]
