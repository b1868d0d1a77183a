"""Steps of the server's clock, detected by comparison with the elapsed time in this process.

A step forward by more than a lease makes every lease lapse at once, although the workers that hold them are alive. So
after a step, lapsed leases are ignored until live workers have had time to renew theirs. Pure: no database.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Final

_TOLERANCE_SHARE: Final = 3  # Share of a lease: live workers renew after a third of it.
_ASKED_AFTER_LEASES: Final = 2


class ServerClock:
    """The expected range of the server's clock. Times named `at` are seconds of a monotonic clock."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._known: datetime | None = None
        self._known_at = -math.inf
        self._asked_at = -math.inf
        self._trusted_again_at: float | None = None

    def is_due(self, at: float) -> bool:
        """Whether to query the server's time: the last answer is two leases old, or lapsed leases may count again."""
        if self._trusted_again_at is not None and at >= self._trusted_again_at:
            return True
        return at - self._asked_at >= _ASKED_AFTER_LEASES * self._lease_seconds

    def note(self, now: datetime, *, asked_at: float, answered_at: float) -> float | None:
        """Compare with the server's time. Return the seconds of a step forward, once for each step."""
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
        """Return the latest server time without a step forward; None if the server has not been asked."""
        if self._known is None:
            return None
        return self._known + timedelta(seconds=at - self._known_at + self._lease_seconds / _TOLERANCE_SHARE)
