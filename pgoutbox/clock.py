"""Durations, and a clock for ages within this process. The time itself comes from PostgreSQL."""

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
    """Seconds on a clock that also counts while the machine is suspended. For ages only; the database has the time."""
    return time.clock_gettime(_CLOCK)
