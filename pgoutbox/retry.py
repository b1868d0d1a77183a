"""When the next attempt follows: pure arithmetic, no clock, no database.

A policy yields a delay in seconds for the attempt that just failed. The database adds it to its own clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from pgoutbox.errors import ConfigurationError

DEFAULT_MAX_ATTEMPTS = 11
MAX_DELAY_SECONDS = 30 * 86_400.0
_MAX_EXPONENT = 62


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a message is retried after a transient failure.

    The default doubles from `base_seconds` up to `cap_seconds` and spreads each delay evenly over
    `[delay * (1 - jitter), delay]`, so that messages which failed together do not return together. The exponent is
    capped before the power is taken, so that no attempt count can overflow.

    `RetryPolicy.steps(60, 300, 900, 3600)` names each delay instead; the last one repeats.

    >>> RetryPolicy(base_seconds=2, jitter=0).delay_seconds(3)
    8.0
    """

    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    base_seconds: float = 5.0
    cap_seconds: float = 3600.0
    jitter: float = 0.5
    step_seconds: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 10_000:
            raise ConfigurationError(f"max_attempts={self.max_attempts}: must be from 1 to 10000")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter={self.jitter}: must be from 0 to 1")
        for name, value in (("base_seconds", self.base_seconds), ("cap_seconds", self.cap_seconds)):
            _check_seconds(name, value)
        for value in self.step_seconds:
            _check_seconds("step_seconds", value)

    @classmethod
    def steps(cls, *seconds: float, max_attempts: int = DEFAULT_MAX_ATTEMPTS, jitter: float = 0.0) -> RetryPolicy:
        """A policy with one delay per failed attempt; the last one repeats until `max_attempts`."""
        if not seconds:
            raise ConfigurationError("steps: name at least one delay in seconds")
        return cls(max_attempts=max_attempts, cap_seconds=max(seconds), jitter=jitter, step_seconds=tuple(seconds))

    def delay_seconds(self, attempt_count: int, *, retry_after: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt_count` failed.

        `retry_after`, in seconds, is what the receiver asked for: it wins over the policy's own delay, within the cap.
        """
        if retry_after is not None:
            asked = retry_after if math.isfinite(retry_after) else self.cap_seconds
            return min(max(asked, 0.0), self.cap_seconds)
        if self.step_seconds:
            full = self.step_seconds[min(max(attempt_count, 1), len(self.step_seconds)) - 1]
        else:
            exponent = min(max(attempt_count, 1) - 1, _MAX_EXPONENT)
            full = min(self.base_seconds * 2.0**exponent, self.cap_seconds)
        return full * (1.0 - self.jitter * random.random())


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= MAX_DELAY_SECONDS):
        raise ConfigurationError(f"{name}={value}: must be from 0 to {MAX_DELAY_SECONDS:.0f} seconds (30 days)")


def bounded_delay(seconds: float) -> float:
    """A delay that a handler asked for, made finite and kept within 0 and 30 days."""
    if not math.isfinite(seconds):
        return MAX_DELAY_SECONDS
    return min(max(seconds, 0.0), MAX_DELAY_SECONDS)
