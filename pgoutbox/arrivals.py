"""Up to which id a worker has seen all messages, so that it can claim new ones without reading past the others.

A message that the worker has not seen although its id is small belongs to a transaction that was open at the time. The
server's snapshots tell when all of those have ended: whoever enqueues has a transaction id before it draws the id of a
message. Pure arithmetic.
"""

from __future__ import annotations

from typing import Final

from pgoutbox.store import Horizon

_MAX_MARKS: Final = 32


class Arrivals:
    """The floor of new messages, as one worker knows it: None until it knows one."""

    def __init__(self) -> None:
        self.floor_id: int | None = None
        self._visible_id: int | None = None
        self._last: Horizon | None = None
        # An id, and the transaction before which all must have ended until the messages up to it are visible.
        self._marks: list[tuple[int, int]] = []

    @property
    def visible_id(self) -> int | None:
        """A search that begins now finds all messages up to this id, if they were ever committed."""
        return self._visible_id

    def learn(self, horizon: Horizon) -> None:
        """Remember what an answer of the database covers."""
        last = self._last
        self._last = horizon
        if last is None or last.started_at != horizon.started_at or last.last_id > horizon.last_id:
            self.floor_id = self._visible_id = None  # Another server may give out the same ids again.
            self._marks.clear()
            return
        # This message id was read before that transaction id.
        mark = (last.last_id, horizon.next_xid)
        if len(self._marks) == _MAX_MARKS:
            self._marks[-1] = mark
        else:
            self._marks.append(mark)
        while self._marks and self._marks[0][1] <= horizon.xmin:
            self._visible_id = self._marks.pop(0)[0]

    def note_searched(self, visible_id: int | None) -> None:
        """A search for fresh messages has left nothing behind that began when `visible_id` was that of this object."""
        if visible_id is not None and self._visible_id is not None:
            self.floor_id = max(visible_id, self.floor_id or 0)
