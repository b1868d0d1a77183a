"""A clock for ages within this process. The time comes from PostgreSQL."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_clock() -> float:
    """Seconds on a clock that also counts while the machine is suspended. For ages only; the database has the time."""
    return time.clock_gettime(_CLOCK)
