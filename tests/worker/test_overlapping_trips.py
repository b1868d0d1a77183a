"""Tests the trips of the kernel: the next one is on its way while the answer to the last one is taken in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.handlers import Context
from pgoutbox.kernel import statements
from pgoutbox.message import Message, Transient
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker.kernel_run import Link
from tests.support.outbox_actions import enqueue, running, settings_for, state_of
from tests.support.waiting import until
from tests.support.worker_sql import WatchedWorker, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect


async def test_outcomes_on_their_way_are_written_although_a_look_at_earlier_ones_fails(
    dsn: str, connect: Connect, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the first message is locked. The second one ends before the worker asks what became of the first, and
    both trips fail.
    """
    locked, other, holder = enqueue(db), enqueue(db), connect()
    outbox = Outbox(settings_for(dsn))
    may_end = {locked: asyncio.Event(), other: asyncio.Event()}
    trip, failures = Link.trip, 0

    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        await may_end[message.id].wait()
        raise Transient("busy")

    async def failing_trip(link: Link, steps: Sequence[Step]) -> list[list[Row]]:
        nonlocal failures
        if may_end[other].is_set() and failures < 2:
            failures += 1
            raise psycopg.OperationalError("gone")
        rows = await trip(link, steps)
        if steps[0][0] is statements.FINISH and not failures:
            may_end[other].set()
            await until(lambda: not run_of(worker).pool.open_count)
        return rows

    monkeypatch.setattr(Link, "trip", failing_trip)
    worker = WatchedWorker(outbox)
    async with running(worker):
        await until(lambda: state_of(db, locked) == state_of(db, other) == "sending")
        holder.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [locked])
        may_end[locked].set()
        await until(lambda: failures == 2)
        holder.rollback()
        await until(lambda: state_of(db, locked) == state_of(db, other) == "pending")
