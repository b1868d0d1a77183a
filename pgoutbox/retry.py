"""Retry policies: the delay before the next attempt. Pure arithmetic, no clock, no database.

A policy returns the delay in seconds after a failed attempt. The database adds it to its own clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from pgoutbox.clock import Duration, seconds_of
from pgoutbox.errors import ConfigurationError

DEFAULT_MAX_ATTEMPTS = 11
MAX_DELAY_SECONDS = 30 * 86_400.0
# Longer than a rolling deployment. Meanwhile a message without a reader delays its ordering key, and its owner knows
# nothing.
UNREADABLE_TIMEOUT_SECONDS = 3_600.0
_MAX_EXPONENT = 62


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """The number of attempts and the delays between them after transient failures.

    By default the delay doubles from `base` up to `cap` (seconds or timedeltas). Each delay is random in
    `[delay * (1 - jitter), delay]`, so that messages that failed together do not return together. The exponent is
    capped first, so that no attempt count can overflow.

    `RetryPolicy.steps(60, 300, 900, 3600)` lists the delays instead; the last one repeats.

    >>> RetryPolicy(base=2, jitter=0).delay_seconds(3)
    8.0
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float
    jitter: float
    step_seconds: tuple[float, ...]

    def __init__(
        self,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        base: Duration = 5.0,
        cap: Duration = 3600.0,
        jitter: float = 0.5,
    ) -> None:
        self._set(max_attempts, _seconds("base", base), _seconds("cap", cap), jitter, ())

    @classmethod
    def steps(cls, *delays: Duration, max_attempts: int = DEFAULT_MAX_ATTEMPTS, jitter: float = 0.0) -> RetryPolicy:
        """Return a policy with one delay per failed attempt; the last one repeats until `max_attempts`."""
        if not delays:
            raise ConfigurationError("steps: name at least one delay, in seconds or as a timedelta")
        seconds = tuple(_seconds("steps", delay) for delay in delays)
        policy = cls.__new__(cls)
        policy._set(max_attempts, cls().base_seconds, max(seconds), jitter, seconds)
        return policy

    def _set(
        self, max_attempts: int, base_seconds: float, cap_seconds: float, jitter: float, step_seconds: tuple[float, ...]
    ) -> None:
        if not 1 <= max_attempts <= 10_000:
            raise ConfigurationError(f"max_attempts={max_attempts}: must be from 1 to 10000")
        if not 0 <= jitter <= 1:
            raise ConfigurationError(f"jitter={jitter}: must be from 0 to 1")
        values = (max_attempts, base_seconds, cap_seconds, jitter, step_seconds)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def delay_seconds(self, attempt_count: int, *, retry_after: float | None = None) -> float:
        """Return the seconds to wait after attempt number `attempt_count` failed.

        `retry_after`, in seconds, is the receiver's request. It replaces the policy's own delay, within the cap.
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


def _seconds(name: str, duration: Duration) -> float:
    seconds = seconds_of(duration)
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_DELAY_SECONDS):
        raise ConfigurationError(f"{name}={duration}: must be from 0 to {MAX_DELAY_SECONDS:.0f} seconds (30 days)")
    return seconds


def bounded_delay(seconds: float) -> float:
    """Return a delay requested by a handler, limited to 0 to 30 days and made finite."""
    if not math.isfinite(seconds):
        return MAX_DELAY_SECONDS
    return min(max(seconds, 0.0), MAX_DELAY_SECONDS)
