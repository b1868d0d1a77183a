"""What a worker knows of each lane of its queues: whether something may be due, and where the next claim begins.

A claim that was filled goes on behind its last row. Otherwise it searches the lane from the beginning, which steps over
the dead index entries of finished messages; so after two slow searches in a row, the next one may begin only after nine
times the length of the shorter one: searches take a tenth of the time at most. Until then a claim reads the messages
that fell due lately, and the search is owed.

The lane of messages with an ordering key is read by its keys, page after page: a round over all keys is its search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

_ALL_TIME_SECONDS: Final = 1e9  # About 32 years.
# A message becomes visible when its transaction commits. One that commits later than this waits for the search.
_LATE_COMMIT_SECONDS: Final = 2.0
# Beside a backlog, messages before the last place are found by a search now and then.
_SEARCH_SECONDS: Final = 0.25
_CHEAP_SEARCH_SECONDS: Final = 0.005
_PAUSE_AFTER_SEARCH: Final = 9
_MAX_PAUSE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """Where a claim begins to read a lane: after a row, or at the messages that fell due in the last seconds.

    In the lane of ordering keys it is a key, or None for a random one.
    """

    after_at: datetime | None
    after_id: int
    since_seconds: float
    after_key: str | None = None


class Place(NamedTuple):
    """The last place that a claim has read in a lane: a message, or the end of a page of ordering keys."""

    at: datetime | None
    id: int | None
    key: str | None


@dataclass(slots=True, eq=False)
class Lane:
    """A lane of a queue: fresh messages (0), or retries (1). Times are seconds of one monotonic clock."""

    queue: str
    number: int
    is_wanted: bool = True
    """Whether the next claim reads this lane."""
    is_owed: bool = True
    """Whether a search from the beginning is owed."""
    served_at: float = -math.inf
    """The last claim that found something. Lanes of a queue take turns."""
    covered_at: float = -math.inf
    """All messages that were due then have been claimed."""
    searched_at: float = -math.inf
    read_at: float = -math.inf
    """The last claim that read it."""
    _after: Place | None = None
    _may_search_at: float = -math.inf
    _is_search: bool = False
    _search_seconds: float = 0.0
    _has_read_lately: bool = False
    """Whether a claim after the last search has read the latest due times."""
    _began_at: float = -math.inf
    _has_news: bool = False
    """Whether it was wanted again after the claim began."""

    def want(self) -> None:
        """Claim from this lane next: something may have become due, anywhere in it."""
        self.is_wanted = self.is_owed = self._has_news = True

    def due_at(self) -> float:
        """When this lane should be read next."""
        if self.is_wanted:
            return -math.inf
        return self._may_search_at if self.is_owed else math.inf

    def begin(self, now: float) -> Start:
        """Return where the claim that begins now reads from."""
        self._began_at = now
        self._has_news = False
        goes_on = self._after is not None and now - self.searched_at < _SEARCH_SECONDS
        # A notified message does not wait for a slow search: the latest due times are read first.
        waits = self._search_seconds > _CHEAP_SEARCH_SECONDS and not self._has_read_lately
        self._is_search = now >= self._may_search_at and not goes_on and not waits
        if self._is_search:
            return Start(None, 0, _ALL_TIME_SECONDS)
        if self._after is not None:
            return Start(self._after.at, self._after.id or 0, 0.0)
        return Start(None, 0, min(now - self.covered_at + _LATE_COMMIT_SECONDS, _ALL_TIME_SECONDS))

    def record(self, last: Place | None, *, is_filled: bool, now: float) -> None:
        """Remember the end of the claim: its last row, and whether more rows may follow."""
        self.read_at = now
        self._has_read_lately = not self._is_search
        if last is not None:
            self.served_at = now
        if self._is_search:
            # A process that was suspended, or whose event loop was blocked, measures one long search.
            last_seconds, self._search_seconds = self._search_seconds, now - self._began_at
            self.searched_at = self._began_at
            self._may_search_at = now + pause_after(min(last_seconds, self._search_seconds))
            self.is_owed = self._has_news
        self._after = last if is_filled else None
        self.is_wanted = is_filled or self._has_news
        if not is_filled:
            self.covered_at = self._began_at


class OrderedLane(Lane):
    """The lane of the messages with an ordering key (2), read by their keys, page after page."""

    __slots__ = ("_after_key", "_is_round", "_is_stale", "_is_whole", "has_keys")

    def __init__(self, queue: str) -> None:
        super().__init__(queue, 2, is_wanted=False, is_owed=False)
        self.has_keys = False  # Most queues have no such messages, and their claims leave this lane out.
        self._after_key: str | None = None  # The first round of a process begins at a random key.
        self._is_round = False  # A round over all keys has begun.
        self._is_whole = False  # It began at the first key, so that its end covers all of them.
        self._is_stale = False  # It was wanted again since then: another round has to follow.

    def want(self) -> None:
        """Claim from this lane next, if it has messages."""
        if self.has_keys:
            super().want()

    def note_keys(self, *, has_keys: bool) -> bool:
        """Note whether the queue has messages with an ordering key. Return whether they are its first ones."""
        is_news = has_keys and not self.has_keys
        self.has_keys = has_keys
        if is_news:
            self.want()
        return is_news

    def begin(self, now: float) -> Start:
        """Return where the next page begins."""
        self._is_stale |= self._has_news
        self._has_news = False
        if not self._is_round:
            self._is_round, self._is_stale, self._began_at = True, False, now
            self._is_whole = self._after_key == ""
        return Start(None, 0, 0.0, self._after_key)

    def record(self, last: Place | None, *, is_filled: bool, now: float) -> None:
        """Remember the end of a page, or the last claimed key if limits cut the page."""
        self.read_at = now
        if last is not None:
            self.served_at = now
            self._after_key = last.key
            self.has_keys |= last.id is not None or bool(last.key)
        is_cut = last is None or last.id is not None  # The row that ends a page is missing.
        if is_cut or self._after_key:  # An empty key ends the round: no key follows.
            self.is_wanted = self.is_owed = is_filled or self._has_news or not is_cut
            return
        self._is_round = False
        if self._is_whole:
            self.searched_at = self.covered_at = self._began_at
        self.is_wanted = self.is_owed = self._is_stale or self._has_news or not self._is_whole


def pause_after(seconds: float) -> float:
    """Return how long no other search may begin after one of this length."""
    return min(seconds * _PAUSE_AFTER_SEARCH, _MAX_PAUSE_SECONDS) if seconds > _CHEAP_SEARCH_SECONDS else 0.0


def lanes_of(queues: Sequence[str]) -> list[Lane]:
    """Return the lanes of these queues, in their order."""
    return [lane for queue in queues for lane in (Lane(queue, 0), Lane(queue, 1), OrderedLane(queue))]
