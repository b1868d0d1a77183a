"""Slots that the workers of several databases share, so that a process has one limit for its handlers.

A worker may use four times as many slots as it leaves free, so that the first message of another database finds one:
alone it has four fifths of them. The fewer are free, the fewer each may use. The last ones are for workers that have
fewer than another one, so that all get the same number. Without a free slot, the workers that wait get the next ones in
turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pgoutbox.errors import PgOutboxError

_TIMES_FREE: Final = 4


class SlotsLostError(PgOutboxError):
    """Half of the slots are lost to handlers that do not return, and only a new process has all slots."""


class Slots:
    """The slots of one process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.used_count = 0
        """Number of taken slots."""
        self.lost_count = 0
        """Number of slots of handlers that outlived their attempts."""
        self._using: set[Share] = set()
        self._waiting: dict[Share, None] = {}

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return self.count - self.used_count

    @property
    def has_lost_half(self) -> bool:
        """Whether handlers that do not return have half of the slots."""
        return self.lost_count * 2 >= self.count

    @property
    def most_used_count(self) -> int:
        """The number of slots that one worker has at most."""
        return max((share.used_count for share in self._using), default=0)

    def _hand_on(self) -> None:
        """Give the free slots to those that wait, in turn."""
        for share in list(self._waiting):
            if not self.free_count:
                return
            # A share that leaves hands its slot on, so the others may have theirs already.
            if share in self._waiting and share.free_count:
                del self._waiting[share]
                self.used_count += 1
                share.is_granted = True
                share.wake()

    def _note_free(self) -> None:
        self.used_count -= 1
        if self._waiting:
            self._hand_on()

    def _wait(self, share: Share) -> None:
        self._waiting[share] = None

    def _forget(self, share: Share) -> None:
        self._waiting.pop(share, None)


class Share:
    """What the worker of one database has of the slots. `wake` is called when it has a slot that it waited for."""

    def __init__(self, slots: Slots, wake: Callable[[], None]) -> None:
        self._slots = slots
        self.wake = wake
        self.used_count = 0
        """Number of slots that it has taken."""
        self.is_granted = False
        """Whether a slot is kept for it, until it takes it."""
        self._is_closed = False

    @property
    def free_count(self) -> int:
        """How many more slots it may take now."""
        free = self._slots.free_count
        fair = max(0, (_TIMES_FREE * free - self.used_count) // (1 + _TIMES_FREE))
        if free and not fair:
            fair = int(not self.used_count or self.used_count + 1 < self._slots.most_used_count)
        return self.is_granted + fair

    def take(self) -> bool:
        """Take a slot. Without one, wait in turn."""
        if self.is_granted:
            self.is_granted = False
        elif self.free_count:
            self._slots.used_count += 1
        else:
            self._slots._wait(self)
            return False
        self.used_count += 1
        self._slots._using.add(self)
        return True

    def give_back(self) -> None:
        """Give a slot back, unless `close` has done so."""
        if not self._is_closed:
            self._give_back()

    def _give_back(self) -> None:
        self.used_count -= 1
        if not self.used_count:
            self._slots._using.discard(self)
        self._slots._note_free()

    def leave(self) -> None:
        """Wait no longer, because there is no work."""
        self._slots._forget(self)
        if self.is_granted:
            self.is_granted = False
            self._slots._note_free()

    def close(self, *, kept_count: int = 0) -> None:
        """Give all slots back, except those of so many handlers that still run: they are lost until `return_kept`."""
        self.leave()
        while self.used_count > kept_count:
            self.give_back()
        self._slots.lost_count += self.used_count
        self._is_closed = True

    def return_kept(self) -> None:
        """Give back the slot of a handler that has ended after `close`."""
        self._slots.lost_count -= 1
        self._give_back()
