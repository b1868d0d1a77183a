"""The id up to which a worker has seen all messages, so that it can claim new ones without reading past the others.

If the worker has not seen a message with a small id, the message belongs to a transaction that was open at the time.
The server's snapshots show when all of these have ended: enqueue gets a transaction id before it draws the id of a
message. Pure arithmetic.
"""

from __future__ import annotations

from typing import Final

from pgoutbox.database.store import Horizon

_MAX_MARKS: Final = 32


class Arrivals:
    """The ids up to which one worker has seen all messages."""

    def __init__(self) -> None:
        self.seen_id: int | None = None
        """Messages with a greater id are new. None until it is known."""
        self._visible_id: int | None = None
        self._last: Horizon | None = None
        # An id, and a transaction: when all earlier ones have ended, the messages up to the id are visible.
        self._marks: list[tuple[int, int]] = []

    @property
    def visible_id(self) -> int | None:
        """A search that begins now finds all committed messages up to this id."""
        return self._visible_id

    def record(self, horizon: Horizon) -> None:
        """Remember the coverage of an answer of the database."""
        last = self._last
        self._last = horizon
        if last is None or last.started_at != horizon.started_at or last.last_id > horizon.last_id:
            self.seen_id = self._visible_id = None  # Another server may give out the same ids again.
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
        """Remember a complete search for fresh messages; `visible_id` is this object's value when it began."""
        if visible_id is not None and self._visible_id is not None:
            self.seen_id = max(visible_id, self.seen_id or 0)
