"""What the next claim asks for: which queue first, which of its lanes, and from where. Pure arithmetic on what claims
found.

Dead index entries at the head of a queue make every claim slower than the one before, above all while an old
transaction keeps vacuum away. So a claim starts where the last one ended, the floor. Messages below the floor exist (a
transaction that committed late, a lease that ran out), so it starts from the beginning again whenever a claim came back
short, whenever a bell rang, and a few times a second under load. In between, while fresh messages wait and nothing else
does, claims look at their lane alone: that statement costs a third less.

Messages whose attempt was lost are suspects: one of them may have ended its process, and with it the attempts of all
the others. So few of them are in flight at once, and more only as those before them end and the process lives.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import State
from pgoutbox.store import ClaimedRow, Floor

FULL_CLAIM_SECONDS = 0.25
# A claim from the beginning may be slow; then it comes as much more rarely as keeps its share of the time small.
FULL_CLAIM_SHARE = 0.05
MAX_SUSPECTS = 32
_GROUPED_SUSPECTS = 8 * MAX_SUSPECTS


@dataclass(frozen=True, slots=True)
class QueueShare:
    """A queue that a worker serves. Without weights, queues are served strictly in the order given."""

    name: str
    weight: int | None = None


def parse_queues(values: Sequence[str]) -> tuple[QueueShare, ...]:
    """Read `name` or `name:weight` from the command line; all or none have a weight. Nothing given means `default`.

    >>> parse_queues(["critical:6", "bulk:1"])
    (QueueShare(name='critical', weight=6), QueueShare(name='bulk', weight=1))
    """
    shares = []
    for value in values:
        match = re.fullmatch(r"([a-z][a-z0-9_.-]{0,62})(?::([1-9][0-9]{0,3}))?", value)
        if match is None:
            raise ConfigurationError(
                f"queue {value!r}: give NAME or NAME:WEIGHT, the name of a-z, 0-9, underscore, dot and hyphen, "
                "the weight from 1 to 9999"
            )
        shares.append(QueueShare(match[1], int(match[2]) if match[2] else None))
    if len({share.name for share in shares}) < len(shares):
        raise ConfigurationError(f"queues {', '.join(values)}: each may be named once")
    if len({share.weight is None for share in shares}) > 1:
        raise ConfigurationError(f"queues {', '.join(values)}: give all of them a weight, or none")
    return tuple(shares) or (QueueShare("default"),)


class Queues:
    """The queues that one worker serves, and what it remembers of them. `now` is any clock that never goes back."""

    def __init__(self, shares: Sequence[QueueShare], *, now: float) -> None:
        self._shares = tuple(shares)
        self.names = [share.name for share in shares]
        self._credits = {share.name: 0 for share in shares}
        self._lanes = {share.name: Lanes(share.name) for share in shares}
        self.looked_at = now  # When the last look at them began.

    def __contains__(self, queue: str) -> bool:
        return queue in self._lanes

    def __getitem__(self, queue: str) -> Lanes:
        return self._lanes[queue]

    def in_turn(self) -> list[Lanes]:
        """All of them, in the order in which the next look claims from them."""
        if self._shares[0].weight is None:
            return list(self._lanes.values())
        # Smooth weighted round robin: who is owed most goes first, and pays for it.
        for share in self._shares:
            self._credits[share.name] += share.weight or 0
        order = sorted(self.names, key=lambda name: -self._credits[name])
        self._credits[order[0]] -= sum(share.weight or 0 for share in self._shares)
        return [self._lanes[name] for name in order]

    def note_ordered(self, queues: Collection[str]) -> bool:
        """Remember which queues hold messages with an ordering key. Returns whether one was not known to."""
        is_news = any(not self._lanes[queue].has_ordered for queue in queues)
        for lanes in self._lanes.values():
            lanes.has_ordered = lanes.queue in queues
        return is_news

    @property
    def may_wait_for_ends(self) -> bool:
        """Whether the end of an attempt may be what the next one waits for."""
        return any(lanes.is_limited or lanes.has_ordered for lanes in self._lanes.values())

    def may_take_suspects(self, in_flight: int) -> bool:
        """Whether more suspects may be claimed from one of them while so many are in flight."""
        return any(lanes.may_take_suspects(in_flight) for lanes in self._lanes.values())


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """The parameters of one claim."""

    fresh_limit: int
    total: int
    fresh_floor: Floor | None
    retry_floor: Floor | None
    suspect_limit: int
    suspects_in_flight: int
    is_full: bool
    fresh_only: bool = False


class Lanes:
    """The lanes of one queue, as one worker remembers them."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.is_limited = False
        self.has_ordered = True  # Until the database has said otherwise.
        self.ordered_first = False
        self.after_key = ""
        self._fresh_floor: Floor | None = None
        self._retry_floor: Floor | None = None
        self._full_due_at = 0.0
        self._retry_due_at = 0.0
        self._retries_waiting = False
        self._retries_had_turn = False
        self._group_size = 1
        self._grouped_count = 0
        self._next_is_alone = True

    def plan(self, room: int, *, now: float, from_beginning: bool, suspects_in_flight: int) -> ClaimPlan:
        """Ask for up to `room` messages. `now` is any clock that never goes back, in seconds.

        Lanes take turns while both have work: fresh messages first, retries in what room is left, then the reverse.
        The oldest suspect comes alone, when none is in flight. Then those that can afford a loss come in a group: when
        half of it has ended it is filled up, to twice its size. When nobody is left for it, or now and then so that
        those outside it are not starved, the oldest comes alone again.
        """
        if from_beginning or now >= self._full_due_at:
            self._fresh_floor = self._retry_floor = None
        retry_turn = not from_beginning and self._is_retry_turn(now)
        return ClaimPlan(
            fresh_limit=0 if retry_turn else room,
            total=room,
            fresh_floor=self._fresh_floor,
            retry_floor=self._retry_floor,
            suspect_limit=self._suspect_limit(room, suspects_in_flight),
            suspects_in_flight=suspects_in_flight,
            is_full=self._fresh_floor is None,
        )

    def is_for_fresh_alone(self, now: float) -> bool:
        """Whether the next claim may leave out the other lanes: fresh messages wait, and it is nobody else's turn."""
        return (
            self._fresh_floor is not None
            and now < self._full_due_at
            and not self._is_retry_turn(now)
            and not self.is_limited
            and not self._has_suspects
        )

    def plan_fresh(self, room: int, *, from_beginning: bool) -> ClaimPlan:
        """Ask for fresh messages alone."""
        floor = None if from_beginning else self._fresh_floor
        return ClaimPlan(room, room, floor, None, 0, 0, is_full=False, fresh_only=True)

    def _is_retry_turn(self, now: float) -> bool:
        return not self._retries_had_turn and (self._retries_waiting or now >= self._retry_due_at)

    def learn(self, plan: ClaimPlan, rows: Sequence[ClaimedRow], *, began_at: float, ended_at: float) -> bool:
        """Remember where a claim ended. Returns whether more is likely to wait."""
        if plan.fresh_only:
            is_filled = len(rows) == plan.total
            self._fresh_floor = max((row.available_at, row.id) for row in rows) if is_filled else None
            self._retries_had_turn = False
            return is_filled
        if rows:
            self.is_limited = rows[0].is_limited
            self.has_ordered = rows[0].has_ordered
        fresh = [(row.available_at, row.id) for row in rows if row.former_attempt_count == 0]
        again = [row for row in rows if row.former_attempt_count > 0]
        lost = [row for row in again if row.former_state == State.SENDING]
        retries = [(row.available_at, row.id) for row in again if row.former_state == State.PENDING]
        retry_room = plan.total - len(fresh) - len(lost)
        self._retries_had_turn = plan.fresh_limit == 0
        if plan.fresh_limit > 0:
            self._fresh_floor = max(fresh) if len(fresh) == plan.fresh_limit else None
        if retry_room > 0:
            self._retry_due_at = ended_at + FULL_CLAIM_SECONDS
            self._retries_waiting = len(retries) == retry_room
            self._retry_floor = max(retries) if retries and self._retries_waiting else None
        if plan.is_full:
            self._full_due_at = ended_at + max(FULL_CLAIM_SECONDS, (ended_at - began_at) / FULL_CLAIM_SHARE)
        is_filled = len(rows) == plan.total
        found = sum(row.state == State.SENDING for row in lost)
        if plan.suspect_limit > 0:
            self._pace_suspects(plan, found, is_filled=is_filled)
        # A group that finds nobody leaves out those that come one by one.
        return is_filled or (plan.suspect_limit > 1 and found == 0)

    @property
    def _has_suspects(self) -> bool:
        """Whether the last look at the suspects found some, and more may wait."""
        return not self._next_is_alone or self._group_size > 1

    def may_take_suspects(self, in_flight: int) -> bool:
        """Whether more suspects may be claimed while so many are in flight."""
        if self._next_is_alone or self._grouped_count == 0:
            return in_flight == 0
        return 2 * in_flight <= self._group_size

    def _suspect_limit(self, room: int, in_flight: int) -> int:
        if not self.may_take_suspects(in_flight):
            return 0
        if self._next_is_alone:
            return 1
        limit = min(2 * self._group_size, MAX_SUSPECTS) - in_flight
        if room >= limit:
            return limit
        # A limit of 1 is for the one that comes alone.
        return room if room > 1 or in_flight == 0 else 0

    def _pace_suspects(self, plan: ClaimPlan, found: int, *, is_filled: bool) -> None:
        if plan.suspect_limit == 1:
            if found:
                self._next_is_alone = False
                self._grouped_count = 0
            elif not is_filled:
                self._next_is_alone = True
                self._group_size = 1
            return
        self._group_size = max(self._group_size, plan.suspects_in_flight + found)
        self._grouped_count += found
        if (found < plan.suspect_limit and not is_filled) or self._grouped_count >= _GROUPED_SUSPECTS:
            self._next_is_alone = True
