"""What a worker knows of each lane of its queues: whether something may be due, and where the next claim begins.

A claim that was filled goes on behind its last row. Otherwise it searches the lane from the beginning, which steps over
the dead index entries of finished messages; so after two slow searches in a row, the next one may begin only after nine
times the length of the shorter one: searches take a tenth of the time at most. Until then a claim reads the messages
that fell due lately, and the search is owed.

Messages with an ordering key are read by their keys. Those that are due and known to a worker have a lane. Another one
reads all keys, page after page: a round over them is its search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final, NamedTuple

_ALL_TIME_SECONDS: Final = 1e9  # About 32 years.
# A message becomes visible when its transaction commits. One that commits later than this waits for the search.
_LATE_COMMIT_SECONDS: Final = 2.0
KEY_LIMIT: Final = 500
"""The ordering keys of one page, and the known ones of one claim: a few milliseconds of the server's time."""
# Nobody notifies a busy worker of messages in other lanes.
_OTHERS_SECONDS: Final = 0.25
# Beside a backlog, messages before the last place are found by a search now and then.
_SEARCH_SECONDS: Final = 0.25
_CHEAP_SEARCH_SECONDS: Final = 0.005
_PAUSE_AFTER_SEARCH: Final = 9
_MAX_PAUSE_SECONDS: Final = 60.0
# A process that was suspended, or whose event loop was blocked, measures one long page.
_LONG_PAGE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Start:
    """Where a claim begins to read a lane: after a row, or at the messages that fell due in the last seconds.

    Where ordering keys are read page after page it is a key, or None for a random one. `keys` are known ordering keys.
    """

    after_at: datetime | None
    after_id: int
    since_seconds: float
    after_key: str | None = None
    keys: Sequence[str] = ()


class Place(NamedTuple):
    """The last place that a claim has read in a lane: a message, or the end of a page of ordering keys.

    A page on which it found no message has no time.
    """

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

    def may_begin(self, now: float) -> bool:
        """Whether a claim may read it although it is not due."""
        return now - self.read_at >= _OTHERS_SECONDS

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


class KeyLane(Lane):
    """A lane of messages with an ordering key."""

    __slots__ = ("has_keys",)

    def __init__(self, queue: str, number: int) -> None:
        super().__init__(queue, number, is_wanted=False, is_owed=False)
        self.has_keys = False
        """Whether claims read it. Most queues have no such messages."""

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


class KnownKeys(KeyLane):
    """The messages whose key is known (2): they fell due lately, or the message before them has just ended here.

    It is in use where a round over all keys is long: see `PagedKeys`.
    """

    __slots__ = ("_keys", "_visited", "reads_lately")

    def __init__(self, queue: str) -> None:
        super().__init__(queue, 2)
        self._keys: dict[str, None] = {}  # The oldest wish first.
        self._visited: tuple[str, ...] = ()
        self.reads_lately = False
        """Whether the claim also reads the messages that fell due lately."""

    def want(self) -> None:
        """Claim the messages that fell due lately."""
        if self.has_keys:
            self.is_wanted = self.reads_lately = self._has_news = True

    def want_key(self, key: str) -> None:
        """Claim the next message of this key."""
        self._keys[key] = None
        self.is_wanted = True

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Forget these keys: their messages are claimed."""
        for key in keys:
            self._keys.pop(key, None)
        self.is_wanted = self.reads_lately or bool(self._keys)

    def note_keys(self, *, has_keys: bool) -> bool:
        """Note whether it is in use. Return whether that is new."""
        if not has_keys:
            self._keys.clear()
            self.is_wanted = False
        return super().note_keys(has_keys=has_keys)

    def begin(self, now: float) -> Start:
        """Return the time from which on messages fell due, and the keys."""
        self._began_at = now
        self._has_news = False
        self._visited = tuple(islice(self._keys, KEY_LIMIT))
        self.reads_lately |= now - self.covered_at >= _OTHERS_SECONDS
        since_seconds = min(now - self.covered_at + _LATE_COMMIT_SECONDS, _ALL_TIME_SECONDS)
        return Start(None, 0, since_seconds if self.reads_lately else 0.0, keys=self._visited)

    def record(self, last: Place | None, *, is_filled: bool, now: float) -> None:
        """Note the end of the claim. After a filled one, the other known keys come next."""
        self.read_at = now
        if last is not None:
            self.served_at = now
        if is_filled:
            self.is_wanted = True
            return
        for key in self._visited:
            self._keys.pop(key, None)
        if self.reads_lately:
            self.covered_at = self._began_at
        self.reads_lately = self._has_news
        self.is_wanted = self._has_news or bool(self._keys)


class PagedKeys(KeyLane):
    """All messages with an ordering key (3), read by their keys, page after page: a round over all keys is a search.

    It finds messages that `KnownKeys` does not know, such as the next one of a key that another worker has ended. Long
    rounds without a message take a tenth of the time at most.
    """

    __slots__ = (
        "_after_key",
        "_is_round",
        "_is_stale",
        "_is_whole",
        "_page_began_at",
        "_vain_seconds",
        "_was_page_last",
        "has_pages",
        "is_limited",
    )

    def __init__(self, queue: str) -> None:
        super().__init__(queue, 3)
        self._after_key: str | None = None  # The first round of a process begins at a random key.
        self._is_round = False  # A round over all keys has begun.
        self._is_whole = False  # It began at the first key, so that its end covers all of them.
        self._is_stale = False  # It was wanted again since then: another round has to follow.
        self.has_pages = False
        """Whether there are more keys than on a page."""
        self.is_limited = False
        """Whether the queue has limits. Then its keys take turns: the one that was just served is not the next one."""
        self._was_page_last = True  # All pages of this round were its last one.
        self._page_began_at = -math.inf
        self._vain_seconds = 0.0  # The time of its pages without a message.

    def note_limits(self, *, is_limited: bool) -> None:
        """Note whether the queue has limits. With them no round waits."""
        self.is_limited = is_limited
        if is_limited:
            self._may_search_at = -math.inf

    @property
    def uses_known_keys(self) -> bool:
        """Whether a round is long, so that messages whose key is known are claimed before."""
        return self.has_keys and self.has_pages and not self.is_limited

    def want(self) -> None:
        """Read all keys, if there are any, as soon as a round may begin."""
        if self.has_keys:
            self.is_owed = self._has_news = True

    def may_begin(self, now: float) -> bool:
        """Whether a claim may read it although it is not due."""
        return super().may_begin(now) and (self._is_round or now >= self._may_search_at)

    def begin(self, now: float) -> Start:
        """Return where the next page begins."""
        self._page_began_at = now
        self._is_stale |= self._has_news
        self._has_news = False
        if not self._is_round:
            self._is_round, self._is_stale, self._was_page_last, self._began_at = True, False, True, now
            self._is_whole = self._after_key == ""
        return Start(None, 0, 0.0, self._after_key)

    def record(self, last: Place | None, *, is_filled: bool, now: float) -> None:
        """Remember the end of a page, or the last claimed key if limits cut the page."""
        self.read_at = now
        if last is not None:
            self.served_at = now
            self._after_key = last.key
            self.has_keys |= last.at is not None or bool(last.key)
        is_cut = last is None or last.id is not None  # The row that ends a page is missing.
        if last is not None and last.at is None:
            self._vain_seconds += min(now - self._page_began_at, _LONG_PAGE_SECONDS)
        if is_cut or self._after_key:  # An empty key ends the round: no key follows.
            if not is_cut:
                self.has_pages, self._was_page_last = True, False
            self.is_wanted = self.is_owed = is_filled or self._has_news or not is_cut
            return
        self._is_round = False
        self.is_wanted = not self._is_whole  # The keys before the first one are left.
        self.is_owed = self.is_wanted or self._is_stale or self._has_news
        if self._is_whole:
            self.has_pages = not self._was_page_last
            self.searched_at = self.covered_at = self._began_at
            self._may_search_at = now + pause_after(self._vain_seconds) if self.uses_known_keys else now
            self._vain_seconds = 0.0


def pause_after(seconds: float) -> float:
    """Return how long no other search may begin after one of this length."""
    return min(seconds * _PAUSE_AFTER_SEARCH, _MAX_PAUSE_SECONDS) if seconds > _CHEAP_SEARCH_SECONDS else 0.0


def lanes_of(queues: Sequence[str]) -> list[Lane]:
    """Return the lanes of these queues, in their order."""
    return [lane for queue in queues for lane in (Lane(queue, 0), Lane(queue, 1), KnownKeys(queue), PagedKeys(queue))]
