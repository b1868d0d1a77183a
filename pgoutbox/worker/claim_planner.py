"""The queue, the lane and the starting place of the next claim. Pure arithmetic on the results of claims.

A queue has three lanes: messages never attempted, retries, and messages with an ordering key. Every poll reads fresh
messages. It reads another lane when a message there is due, by the database's last answer before the
worker slept, and a few times a second under load. Lanes with a backlog take turns at being first.

Dead index entries at the head of a lane make every claim slower than the one before, especially while an old
transaction blocks vacuum; so do messages that wait for another worker. So a claim starts where the last one ended.
Messages may exist before that place (a transaction that committed late, a released message), so it starts from the
beginning again when a claim was not filled, when the worker was notified, and a few times a second under load. One rule
bounds the cost: searches from the beginning that are slow take up at most a tenth of the time. A search that this rule
puts off is owed: the worker does not sleep longer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from typing import Final

from pgoutbox.database.store import (
    ALL_TIME_SECONDS,
    BEGINNING,
    LAPSED_DISTANCE_SECONDS,
    ClaimedRow,
    DueRow,
    LapsedRow,
    Place,
)
from pgoutbox.message import State
from pgoutbox.worker.queues import QueueShare

SEARCH_SECONDS: Final = 0.25
"""The pause between two searches from the beginning of a lane whose claims are filled."""
# A search that takes no longer is as cheap as one from the last place.
_CHEAP_SEARCH_SECONDS: Final = 0.005
# The pause after a slow search, as a multiple of its time.
_PAUSE_AFTER_SEARCH: Final = 9
_MAX_PAUSE_SECONDS: Final = 60.0
# A search from the last place goes back so far, because messages become visible only when their transaction commits.
_LATE_COMMIT_SECONDS: Final = 2.0
# Ordering keys that one claim reads until a page has a due message; a few milliseconds of the server's time.
_SEARCHED_KEYS: Final = 100


class Lane(enum.Enum):
    """The parts of a queue. Each has its own claim statement."""

    FRESH = "fresh"
    RETRIES = "retries"
    ORDERED = "ordered"


class QueueSchedule:
    """The queues of one worker, and their state in its memory. `now` is any monotonic clock."""

    def __init__(self, shares: Sequence[QueueShare], *, now: float) -> None:
        self._shares = tuple(shares)
        self.names = [share.name for share in shares]
        self._credits = {share.name: 0 for share in shares}
        self._idle: set[str] = set()
        self._planners = {share.name: ClaimPlanner(share.name) for share in shares}
        self.polled_at = now  # The start of their last poll.
        self._lapsed = Cursor()
        """The searches for the lapsed attempts of all queues, each from the beginning."""
        self._lapsed_wanted_at = -math.inf
        self._rest_due_at = -math.inf  # When the last message of the lapsed attempts falls due.

    def __contains__(self, queue: str) -> bool:
        return queue in self._planners

    def __getitem__(self, queue: str) -> ClaimPlanner:
        return self._planners[queue]

    def in_turn(self) -> list[ClaimPlanner]:
        """Return all queues, in the order in which the next poll claims from them."""
        if self._shares[0].weight is None:
            return list(self._planners.values())
        # Smooth weighted round robin: the queue with the most credit goes first.
        for share in self._shares:
            self._credits[share.name] += share.weight or 0
        return [self._planners[name] for name in sorted(self.names, key=lambda name: -self._credits[name])]

    def record_turn(self, queue: str, found: int, *, is_first: bool) -> None:
        """Remember what a queue had. The first one of a poll that had messages pays, for all that have some.

        An empty queue saves no credit: it would displace the others later, and its share would be nobody's now.
        """
        if self._shares[0].weight is None:
            return
        if not found:
            self._idle.add(queue)
            self._credits[queue] = 0
            return
        self._idle.discard(queue)
        if is_first:
            self._credits[queue] -= sum(share.weight or 0 for share in self._shares if share.name not in self._idle)

    @property
    def searched_at(self) -> float:
        """The start of the last search for fresh messages: of all queues, the oldest."""
        return min(planner.fresh.searched_at for planner in self._planners.values())

    @property
    def others_searched_at(self) -> float:
        """The older start of the last searches for retries and for lapsed attempts."""
        return min(self._lapsed.searched_at, *(planner.retries.searched_at for planner in self._planners.values()))

    def is_lapsed_due(self, now: float) -> bool:
        """Whether the next poll looks for lapsed attempts."""
        return self._lapsed.is_due(now, wanted_at=self._lapsed_wanted_at)

    def record_lapsed(self, rows: Sequence[LapsedRow], limit: int, *, began_at: float, ended_at: float) -> None:
        """Remember a search for up to `limit` lapsed attempts, which has set the due times of their messages."""
        self._lapsed.record_whole_search(is_filled=len(rows) == limit, began_at=began_at, ended_at=ended_at)
        due = [row.due_seconds for row in rows if row.state == State.PENDING]
        self._rest_due_at = max(self._rest_due_at, ended_at + max(due, default=-math.inf))

    def record_due(self, rows: Collection[DueRow], *, asked_at: float | None, now: float) -> bool:
        """Remember the database's answer for each queue. Return whether a poll would now find messages.

        `asked_at` is the time of the query, None if its answer does not reach back to the last search.
        """
        changes = [self._planners[row.queue].record_due(row, asked_at=asked_at, now=now) for row in rows]
        due_at = min((self._planners[row.queue].retries.search_due_at for row in rows), default=math.inf)
        self._lapsed.note_due(due_at, asked_at=asked_at, now=now)
        if any(changes):
            self._lapsed_wanted_at = now
        return any(changes)

    def search(self, *, now: float) -> None:
        """Make the next poll from the beginning claim from all lanes, because messages have become claimable."""
        self._lapsed_wanted_at = now
        for planner in self._planners.values():
            planner.search(now=now)

    @property
    def search_owed_at(self) -> float:
        """When a search from the beginning that was put off may begin; infinity if none was.

        Messages of lapsed attempts, which fall due one after the other, are owed searches, too.
        """
        next_due_at = self.polled_at + LAPSED_DISTANCE_SECONDS if self._rest_due_at > self.polled_at else math.inf
        return min(next_due_at, *(planner.search_owed_at for planner in self._planners.values()))

    @property
    def may_wait_for_ends(self) -> bool:
        """Whether the end of an attempt may make another message claimable."""
        return any(planner.is_limited or planner.has_ordered for planner in self._planners.values())


class Cursor:
    """The progress of the claims of one lane, or of the searches for lapsed attempts."""

    def __init__(self) -> None:
        self._place: Place | None = None
        """The end of the last claim, if it was filled."""
        self._is_search = False
        self.restarted_at = -math.inf
        """When the last claim from the beginning began."""
        self.searched_at = -math.inf
        """The time up to which all due messages are claimed: by the last claim, or by the database's answer."""
        self.is_waiting = False
        """Whether the last claim was filled, so that more messages are likely to wait."""
        self.search_due_at = -math.inf
        self.search_owed_at = math.inf
        """When a search from the beginning that was put off may begin; infinity if none was."""
        self._may_search_at = -math.inf
        self._search_seconds = 0.0

    def is_due(self, now: float, *, wanted_at: float) -> bool:
        """Whether the next poll reads this lane: polls leave it out while nothing is due in it."""
        return self.is_waiting or now >= self.search_due_at or self.restarted_at <= wanted_at

    def note_due(self, due_at: float, *, asked_at: float | None, now: float) -> None:
        """Remember when the next message of the lane falls due, by a query at `asked_at` that covers all until then."""
        self.search_due_at = due_at
        if asked_at is not None and due_at > now:
            self.searched_at = asked_at

    def start(
        self, now: float, *, from_beginning: bool, wanted_at: float = -math.inf, only_news: bool = False
    ) -> Place:
        """Return the starting place: the beginning too if the last search from there began before `wanted_at`.

        With `only_news` it is never the beginning: a notified message does not wait for a slow search.
        """
        wants = from_beginning or self.restarted_at <= wanted_at
        is_due = now >= self.search_due_at or (wants and now >= self._may_search_at)
        self._is_search = is_due and not only_news
        self.search_owed_at = math.inf if self._is_search or not wants else self._may_search_at
        if self._is_search:
            return BEGINNING
        return self._place or Place(None, since_seconds=self.since_seconds(now))

    def since_seconds(self, now: float) -> float:
        """Return the time before `now` in which all messages fell due that a claim from the last place finds."""
        return min(now - self.searched_at + _LATE_COMMIT_SECONDS, ALL_TIME_SECONDS)

    def record(self, rows: Sequence[ClaimedRow], limit: int, *, began_at: float, ended_at: float) -> None:
        """Remember the end of a claim of up to `limit` messages from the place that `start` returned."""
        self.is_waiting = len(rows) == limit
        self._place = Place(*max((row.available_at, row.id) for row in rows)) if self.is_waiting else None
        if self._is_search:
            self._record_search(began_at, ended_at)
        if self._is_search or not self.is_waiting:
            self.searched_at = began_at

    def record_whole_search(self, *, is_filled: bool, began_at: float, ended_at: float) -> None:
        """Remember a search of a lane that each search reads from the beginning."""
        self.is_waiting = is_filled
        self._record_search(began_at, ended_at)
        if not is_filled:
            self.searched_at = began_at

    def _record_search(self, began_at: float, ended_at: float) -> None:
        # A process that was suspended, or whose event loop was blocked, measures one long search.
        last_seconds, self._search_seconds = self._search_seconds, ended_at - began_at
        pause = _pause_after(min(last_seconds, self._search_seconds))
        self.restarted_at = began_at
        self.search_due_at = ended_at + max(SEARCH_SECONDS, pause)
        self._may_search_at = ended_at + pause


class ClaimPlanner:
    """The lanes of one queue in one worker's memory. Times are seconds of a monotonic clock."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        # An assumption, until the database answers.
        self.is_limited = True
        self.has_ordered = True
        self.fresh = Cursor()
        self.retries = Cursor()
        self.after_key = ""  # The last ordering key that was read.
        self.has_place = False  # Whether it has read the whole first page, or begun its round at a random key.
        self._round_began_after: str | None = None
        self._round_has_wrapped = False
        self._page_found_some = False
        self.wanted_at = -math.inf
        """The time of the last request for a search of all lanes. Only later searches fulfil it."""
        self._others_are_older = False  # Whether a retry fell due before all fresh messages, in a queue with limits.
        self._is_known = False
        self._first = Lane.RETRIES

    @property
    def has_limits(self) -> bool:
        """Whether the queue had limits in the database's last answer. Without an answer, `is_limited` is true too."""
        return self._is_known and self.is_limited

    @property
    def search_owed_at(self) -> float:
        """When a search from the beginning that was put off may begin; infinity if none was."""
        return min(self.fresh.search_owed_at, self.retries.search_owed_at)

    def turns(self, now: float, *, fresh_only: bool = False) -> list[Lane]:
        """Return the lanes of the next poll, in order. Under a limit, the lane with the oldest message comes first."""
        if fresh_only and not self.is_limited:  # Under a limit a fresh message must not overtake the other lanes.
            return [Lane.FRESH]
        lanes = [Lane.FRESH]
        if self.has_ordered:
            lanes.append(Lane.ORDERED)
        if self.retries.is_due(now, wanted_at=self.wanted_at):
            lanes.append(Lane.RETRIES)
        # Lanes take turns at being first.
        order = (Lane.FRESH, Lane.ORDERED, Lane.RETRIES)
        place = order.index(self._first) + 1
        lanes.sort(key=lambda lane: (order.index(lane) - place) % len(order))
        self._first = lanes[0]
        if self.is_limited and Lane.RETRIES in lanes:
            lanes.remove(Lane.RETRIES)
            lanes.insert(0 if self._others_are_older else len(lanes), Lane.RETRIES)
        return lanes

    def record_due(self, row: DueRow, *, asked_at: float | None, now: float) -> bool:
        """Remember the database's answer for the queue. Return whether a poll would now find messages."""
        is_news = (row.has_ordered and not self.has_ordered) or (self._is_known and row.is_limited != self.is_limited)
        self._is_known = True
        first, other = row.first_due_seconds, row.other_due_seconds
        self._others_are_older = other is not None and (first is None or other < first)
        self.is_limited, self.has_ordered = row.is_limited, row.has_ordered
        # Under a limit every poll includes them, because the next permit may come at any time.
        other_seconds = row.other_due_seconds if row.is_limited else row.other_seconds
        self.retries.note_due(math.inf if other_seconds is None else now + other_seconds, asked_at=asked_at, now=now)
        if asked_at is not None and (row.first_seconds is None or row.first_seconds > 0):
            self.fresh.searched_at = max(asked_at, self.fresh.searched_at)
        if is_news:
            self.search(now=now)
        return is_news

    def page_limit(self, room: int) -> int:
        """Return the maximum number of ordering keys in the next page: few while the pages have no claimable message.

        A new message, for example of another queue, waits for the current page.
        """
        return room if self._page_found_some else min(room, _SEARCHED_KEYS)

    def turn_page(self, last_key: str, *, found: int) -> bool:
        """Remember the page of ordering keys that was read. Return whether a round over all keys found nothing.

        `last_key` is empty if no key follows the page.
        """
        if self._round_began_after is None:
            self._round_began_after = self.after_key
        self.after_key = last_key
        self._page_found_some = found > 0
        # The keys at which the round began may be gone: then only its second pass shows that it is complete.
        is_over = last_key == "" and (self._round_has_wrapped or self._round_began_after == "")
        is_over |= self._round_has_wrapped and last_key >= self._round_began_after
        self._round_has_wrapped |= last_key == ""
        if found or is_over:
            self._round_began_after, self._round_has_wrapped = None, False
        return is_over and not found

    def search(self, *, now: float) -> None:
        """Make the next poll claim from all lanes, from the beginning."""
        self._round_began_after, self._round_has_wrapped = None, False
        self.wanted_at = now


def _pause_after(seconds: float) -> float:
    """Return the pause after a search that took so long."""
    return min(seconds * _PAUSE_AFTER_SEARCH, _MAX_PAUSE_SECONDS) if seconds > _CHEAP_SEARCH_SECONDS else 0.0
