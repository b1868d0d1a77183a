"""What the next claim of a queue asks for: which lane first, and from where. Pure arithmetic on what claims found.

Dead index entries at the head of a queue make every claim slower than the one before, above all while an old
transaction keeps vacuum away. So a claim starts where the last one ended, the floor. Messages below the floor exist (a
transaction that committed late, a lease that ran out), so it starts from the beginning again whenever a claim came back
short, whenever a bell rang, and a few times a second under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgoutbox.store import ClaimedRow, Floor

FULL_CLAIM_SECONDS = 0.25
# A claim from the beginning may be slow; then it comes as much more rarely as keeps its share of the time small.
FULL_CLAIM_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """The parameters of one claim."""

    fresh_limit: int
    total: int
    fresh_floor: Floor | None
    retry_floor: Floor | None
    is_full: bool


class Lanes:
    """The two lanes of one queue, as one worker remembers them."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self._fresh_floor: Floor | None = None
        self._retry_floor: Floor | None = None
        self._full_due_at = 0.0
        self._retry_due_at = 0.0
        self._retries_waiting = False
        self._retries_had_turn = False

    def plan(self, room: int, *, now: float, from_beginning: bool) -> ClaimPlan:
        """Ask for up to `room` messages. `now` is any clock that never goes back, in seconds.

        Lanes take turns while both have work: fresh messages first, retries in what room is left, then the reverse.
        """
        if from_beginning or now >= self._full_due_at:
            self._fresh_floor = self._retry_floor = None
        retry_turn = (
            not from_beginning
            and not self._retries_had_turn
            and (self._retries_waiting or now >= self._retry_due_at)
        )  # fmt: skip
        return ClaimPlan(
            fresh_limit=0 if retry_turn else room,
            total=room,
            fresh_floor=self._fresh_floor,
            retry_floor=self._retry_floor,
            is_full=self._fresh_floor is None,
        )

    def learn(self, plan: ClaimPlan, rows: Sequence[ClaimedRow], *, began_at: float, ended_at: float) -> bool:
        """Remember where a claim ended. Returns whether more is likely to wait."""
        fresh = [(row.due_at, row.id) for row in rows if row.former_attempt_count == 0]
        retries = [(row.due_at, row.id) for row in rows if row.former_attempt_count > 0]
        retry_room = plan.total - len(fresh)
        self._retries_had_turn = plan.fresh_limit == 0
        if plan.fresh_limit > 0:
            self._fresh_floor = max(fresh) if len(fresh) == plan.fresh_limit else None
        if retry_room > 0:
            self._retry_due_at = ended_at + FULL_CLAIM_SECONDS
            self._retries_waiting = len(retries) == retry_room
            self._retry_floor = max(retries) if retries and self._retries_waiting else None
        if plan.is_full:
            self._full_due_at = ended_at + max(FULL_CLAIM_SECONDS, (ended_at - began_at) / FULL_CLAIM_SHARE)
        return len(rows) == plan.total
