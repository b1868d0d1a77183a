"""The number of lapsed attempts of one queue that a worker takes over at once. Pure arithmetic.

Messages whose attempt was lost are suspects: one of them may have crashed its process and ended the other attempts
there. So only few of them are in flight at once. The number grows as earlier ones end and the process survives.
"""

from __future__ import annotations

from typing import Final

MAX_SUSPECTS: Final = 32
_GROUPED_SUSPECTS: Final = 8 * MAX_SUSPECTS


class CrashSuspects:
    """The pace at which one worker takes over the suspects of one queue.

    When none is in flight, the oldest suspect is claimed alone. Then suspects that have attempts left are claimed in a
    group. When half of the group has ended, it is filled up to twice its size. When no such suspect is left, and
    periodically so that the others are not starved, the oldest is claimed alone again.
    """

    def __init__(self) -> None:
        self._group_size = 1
        self._grouped_count = 0
        self._next_is_alone = True

    @property
    def are_waiting(self) -> bool:
        """Whether the last claim found suspects, so that more suspects may wait."""
        return not self._next_is_alone or self._group_size > 1

    def may_come(self, in_flight: int) -> bool:
        """Whether more of them may be claimed, with `in_flight` in flight."""
        if self._next_is_alone or self._grouped_count == 0:
            return in_flight == 0
        return 2 * in_flight <= self._group_size

    def limit(self, room: int, in_flight: int) -> int:
        """The limit of the next claim. 1 is for a suspect that is claimed alone, with any history."""
        if not self.may_come(in_flight):
            return 0
        if self._next_is_alone:
            return 1
        limit = min(2 * self._group_size, MAX_SUSPECTS) - in_flight
        if room >= limit:
            return limit
        return room if room > 1 or in_flight == 0 else 0

    def record(self, limit: int, found: int, *, in_flight: int, is_filled: bool) -> bool:
        """Remember the result of a claim of up to `limit`; `is_filled` means that it used up the room.

        Return whether another poll is likely to find more: after an empty group, the oldest suspect may still wait.
        """
        if limit == 1:
            if found:
                self._next_is_alone = False
                self._grouped_count = 0
            elif not is_filled:
                self._next_is_alone = True
                self._group_size = 1
            return False
        self._group_size = max(self._group_size, in_flight + found)
        self._grouped_count += found
        if (found < limit and not is_filled) or self._grouped_count >= _GROUPED_SUSPECTS:
            self._next_is_alone = True
        return found == 0
