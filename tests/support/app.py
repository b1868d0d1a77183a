"""An application for the tests that run workers as processes. Its handlers report their progress on a channel."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import psycopg

from pgoutbox import Context, Message, Outbox, RetryPolicy, SyncContext

if TYPE_CHECKING:
    from typing import NoReturn

CHANNEL = "test_progress"
FAREWELL = "the application has cleaned up"
BRIEF_COUNT = 500
ALL_BRIEF = threading.Barrier(BRIEF_COUNT)

outbox = Outbox()


async def tell(what: str, message: Message) -> None:
    """Notify the test on a separate connection."""
    async with await psycopg.AsyncConnection.connect(outbox.settings.require_dsn(), autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_notify(%s, %s)", (CHANNEL, f"{what} {message.id} {message.attempt_count} {os.getpid()}")
        )


@outbox.handler("test.good")
async def good(message: Message, ctx: Context) -> None:
    """Deliver, and report it."""
    await tell("good", message)


@outbox.handler("test.poison", retry=RetryPolicy(max_attempts=3, base=0))
async def poison(message: Message, ctx: Context) -> NoReturn:
    """Kill the whole process, like a segmentation fault or the out-of-memory killer."""
    os._exit(137)


@outbox.handler("test.brief")
def brief(message: Message, ctx: SyncContext) -> None:
    """Deliver in a thread, and register an action for the end of the process."""
    atexit.register(print, FAREWELL, file=sys.stderr)
    ALL_BRIEF.wait(timeout=60)  # Each message gets its own thread.


@outbox.handler("test.blocking")
async def blocking(message: Message, ctx: Context) -> NoReturn:
    """Report the start, then block the event loop without end."""
    await tell("blocking", message)
    while True:
        time.sleep(0.1)  # noqa: ASYNC251 - the fault that the test injects


@outbox.handler("test.endless")
async def endless(message: Message, ctx: Context) -> None:
    """Report the start, then run until cancelled."""
    dsn = outbox.settings.require_dsn()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_notify(%s, %s)", (CHANNEL, f"endless {message.id} {message.attempt_count} {os.getpid()}")
        )
    await asyncio.Event().wait()


@outbox.handler("test.patient.async")
async def patient_async(message: Message, ctx: Context) -> None:
    """Do the same in a thread that an async handler starts."""
    await asyncio.to_thread(wait_for_ever, message)


@outbox.handler("test.patient")
def patient(message: Message, ctx: SyncContext) -> None:
    """Report the start, then run until the process ends."""
    wait_for_ever(message)


def wait_for_ever(message: Message) -> None:
    with psycopg.connect(outbox.settings.require_dsn(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_notify(%s, %s)", (CHANNEL, f"patient {message.id} {message.attempt_count} {os.getpid()}")
        )
    while True:
        time.sleep(0.1)  # The test injects this fault: a handler that never returns.
