"""Tests which database errors a worker tolerates, and for how long."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import psycopg
import pytest

from pgoutbox.errors import SchemaError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.outage import Outage
from tests.support.outbox_actions import PATIENCE_SECONDS

AWAY = psycopg.OperationalError("connection refused")


class AwaitedEvent(asyncio.Event):
    """An event that signals when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.is_awaited.set()
        return await super().wait()


def outage_of() -> tuple[Outage, Telemetry]:
    """Return the outage of a worker that is to stop: its pauses end at once."""
    telemetry = Telemetry(logging.getLogger("benchmarks.outage"))
    stopping = asyncio.Event()
    stopping.set()
    return Outage(telemetry, stopping=stopping), telemetry


async def test_an_outage_and_its_end_are_logged_once_each() -> None:
    outage, telemetry = outage_of()
    for _ in range(3):
        await outage.pause_or_raise(AWAY)
        assert outage.is_ongoing
    outage.end()
    outage.end()
    assert not outage.is_ongoing
    assert (telemetry.counts[LogEvent.DATABASE_LOST], telemetry.counts[LogEvent.DATABASE_BACK]) == (1, 1)


async def test_a_stopping_worker_does_not_wait_for_the_end_of_an_outage() -> None:
    stopping = AwaitedEvent()
    outage = Outage(Telemetry(logging.getLogger("benchmarks.outage")), stopping=stopping)
    outage._backoff = Backoff(3_600.0, 3_600.0)
    outage.is_ongoing = True
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(outage.pause_or_raise(AWAY))
        await stopping.is_awaited.wait()
        stopping.set()


@pytest.mark.parametrize(
    "error",
    [psycopg.errors.SerializationFailure(), psycopg.errors.DeadlockDetected(), psycopg.errors.LockNotAvailable()],
    ids=lambda error: type(error).__name__,
)
async def test_a_lost_race_is_not_an_outage(error: psycopg.Error) -> None:
    outage, _ = outage_of()
    await outage.pause_or_raise(error)
    assert not outage.is_ongoing


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.UndefinedTable('relation "pgoutbox.message_live" does not exist'), SchemaError),
        (
            psycopg.errors.UndefinedFunction("function pgoutbox._permits(text, bigint, boolean) does not exist"),
            SchemaError,
        ),
        (psycopg.errors.UndefinedTable('relation "club.audit" does not exist'), psycopg.errors.UndefinedTable),
        (psycopg.errors.InsufficientPrivilege(), psycopg.errors.InsufficientPrivilege),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_permanent_error_is_raised(error: psycopg.Error, expected: type[Exception]) -> None:
    outage, _ = outage_of()
    with pytest.raises(expected):
        await outage.pause_or_raise(error)
    assert not outage.is_ongoing
