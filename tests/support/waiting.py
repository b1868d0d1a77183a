"""Wait until a worker, a process or another session has done something, by asking again and again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from pgoutbox.clock import elapsed_clock
from tests.support.outbox_actions import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from pgoutbox.worker import Worker

PROCESS_PATIENCE_SECONDS: Final = 240.0
_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.05

T = TypeVar("T")


async def turn(times: int) -> None:
    """Let the event loop run this number of times, without a pause: it reads the data that has arrived."""
    for _ in range(times):
        await asyncio.sleep(0)


def wait_until(condition: Callable[[], T], what: Callable[[], str]) -> T:
    """Return the condition's value once it is true. Fail with the text of `what` if that never happens."""
    began_at = time.monotonic()
    while not (answer := condition()):
        waited_seconds = time.monotonic() - began_at
        assert waited_seconds < PROCESS_PATIENCE_SECONDS, f"not within {PROCESS_PATIENCE_SECONDS:g} s: {what()}"
        # Conditions ask the database or read a log, which costs more than most of what they wait for.
        time.sleep(min(max(_PAUSE_SECONDS, waited_seconds / 20), _LONGEST_PAUSE_SECONDS))
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Poll like `wait_until` on the event loop, for the effect of a session."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is another session's, which sets no event
            await asyncio.sleep(_PAUSE_SECONDS)


async def until_idle(worker: Worker) -> None:
    """Wait until the worker sleeps: a commit or a due time has to wake it."""
    await until(lambda: worker.status().is_idle)


async def until_polled(worker: Worker, connection: psycopg.Connection) -> None:
    """Wake the worker, and wait until it has polled, after everything so far, and is idle."""
    began_at = elapsed_clock()
    connection.execute("SELECT pg_notify('pgoutbox', 'all default')")

    def has_polled() -> bool:
        passed = elapsed_clock() - began_at
        status = worker.status()
        return status.is_idle and status.polled_seconds_ago < passed

    await until(has_polled)
