"""Durations, and a clock for elapsed time in this process. Times of day come from PostgreSQL."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeAlias

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


Duration: TypeAlias = float | timedelta
"""A number of seconds, or a timedelta."""


def seconds_of(duration: Duration) -> float:
    """Return a duration as seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def elapsed_clock() -> float:
    """Return seconds of a clock that also runs while the machine is suspended. Use it for elapsed time only."""
    return time.clock_gettime(_CLOCK)
