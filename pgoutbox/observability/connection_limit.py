"""A limit on the open connections of a small HTTP server, which slow clients cannot use up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")


class ConnectionLimit(Generic[C]):
    """The open connections of one server, up to `most`.

    At the limit, the connection that has waited longest for its request is closed, so that slow clients never keep a
    probe out. `close` is called with the lock held: it must neither wait nor call this object.
    """

    def __init__(self, most: int, close: Callable[[C], object]) -> None:
        self._most = most
        self._close = close
        self._lock = threading.Lock()
        self._opened_at: dict[C, float] = {}
        self._waiting: dict[C, None] = {}  # Their request has not arrived; the oldest first.

    def admit(self, connection: C) -> bool:
        """Register a connection; return False if there is no room for it."""
        with self._lock:
            if len(self._opened_at) >= self._most:
                if not self._waiting:
                    return False
                self._abort(next(iter(self._waiting)))
            self._opened_at[connection] = time.monotonic()
            self._waiting[connection] = None
        return True

    def mark_arrived(self, connection: C) -> None:
        """Keep the connection open for its response, because its request has arrived."""
        with self._lock:
            self._waiting.pop(connection, None)

    def mark_waiting(self, connection: C) -> None:
        """Note that the connection waits for a further request."""
        with self._lock:
            if connection in self._opened_at:
                self._waiting.setdefault(connection)

    def forget(self, connection: C) -> None:
        """Remove a closed connection."""
        with self._lock:
            self._remove(connection)

    def close_older_than(self, seconds: float) -> None:
        """Close each connection that was opened this long ago."""
        until = time.monotonic() - seconds
        with self._lock:
            for connection in [one for one, opened_at in self._opened_at.items() if opened_at <= until]:
                self._abort(connection)

    def _abort(self, connection: C) -> None:
        self._remove(connection)
        self._close(connection)

    def _remove(self, connection: C) -> None:
        self._opened_at.pop(connection, None)
        self._waiting.pop(connection, None)
