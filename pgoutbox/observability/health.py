"""The answers to health probes: whether a worker is alive, and whether it is ready. Pure but for the event loop check.

Alive means that its event loop is not blocked; a blocked one can only be restarted. Ready means that the worker would
find a new message in time. The reasons contain no host, no user and no value of a setting.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pgoutbox.observability.measures import WorkerStatus

_STALE_FACTOR: Final = 2
_STALE_SLACK_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 0.5


def reasons_not_ready(status: WorkerStatus, *, poll_interval_seconds: float) -> list[str]:
    """Return the reasons why a worker is not ready, for operators; none if it is.

    With many databases it is ready if it serves one of them: another process could not serve the others either.
    """
    if status.is_stopping:
        return ["the worker is stopping"]
    if status.databases:
        not_served = databases_not_served(status, poll_interval_seconds=poll_interval_seconds)
        return ["no database is served"] if len(not_served) == len(status.databases) else []
    if status.is_copy:
        return ["the database is a copy, nothing is claimed: see `pgoutbox doctor` and `pgoutbox adopt`"]
    if not status.is_started:
        return ["the worker has not started: it has not reached the database yet"]
    reasons = []
    if not status.is_database_up:
        reasons.append("the database does not answer")
    if status.is_listener_up is False:
        reasons.append("the listener is not connected")
    # A worker without a free slot does not poll, and need not.
    limit = _STALE_FACTOR * poll_interval_seconds + _STALE_SLACK_SECONDS
    if status.polled_seconds_ago > limit and status.busy < status.slots:
        reasons.append(f"the last poll was {status.polled_seconds_ago:.0f} s ago")
    return reasons


def databases_not_served(status: WorkerStatus, *, poll_interval_seconds: float) -> Mapping[str, str]:
    """Return the reason of each database that a worker of many databases does not serve."""
    return {
        name: reasons[0]
        for name, one in status.databases.items()
        if (
            reasons := [one.failure]
            if one.failure
            else reasons_not_ready(one, poll_interval_seconds=poll_interval_seconds)
        )
    }


class LoopWatch:
    """Checks from other threads whether an event loop is blocked. Costs nothing between checks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit_seconds: float) -> None:
        self._loop = loop
        self._limit_seconds = limit_seconds
        self._turn = threading.Lock()
        self._asked_at = 0.0
        self._answered: threading.Event | None = None

    def reason_not_alive(self) -> str | None:
        """Return a reason if the loop is blocked, that is, if a check waits for longer than the limit; else None."""
        with self._turn:
            if self._answered is None or self._answered.is_set():
                answered = threading.Event()
                try:
                    self._loop.call_soon_threadsafe(answered.set)
                except RuntimeError:
                    return "the event loop is closed"
                self._asked_at, self._answered = time.monotonic(), answered
            asked_at, answered = self._asked_at, self._answered
        if not answered.wait(_ANSWER_SECONDS):
            waited = time.monotonic() - asked_at
            if waited > self._limit_seconds:
                return f"the event loop has been blocked for {waited:.0f} s"
        return None
