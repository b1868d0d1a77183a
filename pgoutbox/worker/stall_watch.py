"""Report a handler that blocks the worker's event loop, from the thread that keeps the leases.

While it blocks, no other attempt of the process makes progress, and no task of the event loop can report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from typing import Final

from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker.pool import AttemptPool

_BLOCKED_SECONDS: Final = 2.0
_OURS: Final = ("pgoutbox.", "asyncio.")


class StallWatch:
    """Checks whether its event loop is blocked. `check` is called from another thread."""

    def __init__(self, telemetry: Telemetry, pool: AttemptPool) -> None:
        self._telemetry = telemetry
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._asked_at: float | None = None
        self._is_reported = False

    def check(self) -> None:
        """Report the block, once, when the loop has not reacted to an earlier check for two seconds."""
        now = time.monotonic()
        asked_at = self._asked_at
        if asked_at is None:
            self._is_reported = False
            self._asked_at = now
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._answer)
        elif now - asked_at >= _BLOCKED_SECONDS and not self._is_reported:
            self._is_reported = True
            self._report()

    def _answer(self) -> None:
        self._asked_at = None

    def _report(self) -> None:
        task = asyncio.current_task(self._loop)
        work = () if task is None else self._pool.work_of(task)
        self._telemetry.report(
            logging.WARNING,
            LogEvent.LOOP_BLOCKED,
            "event loop blocked",
            topic=work[0].message.topic if work else None,
            message_id=work[0].message.id if work else None,
            place=_place_in(self._thread_id),
        )


def _place_in(thread_id: int) -> str:
    """Return module and line of the handler that a thread runs, or of the other code that it runs."""
    frame = sys._current_frames().get(thread_id)
    place = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if place and f"{module}.".startswith(_OURS):
            break
        place = f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return place
