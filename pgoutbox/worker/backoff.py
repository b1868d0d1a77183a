"""Pauses between retries."""

from __future__ import annotations

import random


class Backoff:
    """Pauses that double from `first_seconds` to `max_seconds`. Jitter takes up to half of each away."""

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds = self._seconds = first_seconds
        self._max_seconds = max_seconds

    def next(self) -> float:
        """Return the seconds of the next pause."""
        seconds = self._seconds
        self._seconds = min(2 * seconds, self._max_seconds)
        return seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._seconds = self._first_seconds
