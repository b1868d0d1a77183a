"""The server's clock, compared with the time that has passed here: whether leases that have lapsed may be trusted.

A step forward by more than a lease makes every lease lapse at once, although the workers that hold them are alive. So
lapsed leases are left alone after a step, for as long as live workers need to renew theirs. Pure: knows no database.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Final

_TOLERANCE_SHARE: Final = 3  # Of a lease: live workers renew after a third of it.
_ASKED_AFTER_LEASES: Final = 2


class ServerClock:
    """What the server's clock may say. Times named `at` are of any clock that never goes back, in seconds."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._known: datetime | None = None
        self._known_at = -math.inf
        self._asked_at = -math.inf
        self._trusted_again_at: float | None = None

    def is_due(self, at: float) -> bool:
        """Whether the server is to be asked for its time: it told none for two leases, or trust may return."""
        if self._trusted_again_at is not None and at >= self._trusted_again_at:
            return True
        return at - self._asked_at >= _ASKED_AFTER_LEASES * self._lease_seconds

    def note(self, now: datetime, *, asked_at: float, answered_at: float) -> float | None:
        """Compare with what the server says. Returns by how many seconds it has stepped forward, once for each step."""
        self._asked_at = asked_at
        ahead = 0.0
        if self._known is not None:
            ahead = (now - self._known).total_seconds() - (answered_at - self._known_at)
        if ahead > self._lease_seconds / _TOLERANCE_SHARE:
            if self._trusted_again_at is None:
                self._trusted_again_at = answered_at + self._lease_seconds
                return ahead
            if answered_at < self._trusted_again_at:
                return None
        self._trusted_again_at = None
        self._known, self._known_at = now, asked_at
        return None

    def limit(self, at: float) -> datetime | None:
        """The time beyond which the server's clock has stepped forward; None if it has not been asked."""
        if self._known is None:
            return None
        return self._known + timedelta(seconds=at - self._known_at + self._lease_seconds / _TOLERANCE_SHARE)
