"""A session that has locked the row of one message delays the outcome of no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Permanent, Worker
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("state", ["sent", "failed"])
async def test_a_locked_row_delays_only_its_own_outcome(
    dsn: str, db: psycopg.Connection, connect: Connect, state: str
) -> None:
    # A wait for the lock would last longer than the test.
    outbox = Outbox(settings_for(dsn, concurrency=20, lock_timeout_seconds=300, statement_timeout_seconds=300))
    handed_over: Counter[int] = Counter()
    may_end = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Permanent | None:
        handed_over[message.id] += 1
        await may_end.wait()
        return Permanent("no") if state == "failed" else None

    ids = [enqueue(db) for _ in range(20)]
    locked, *others = ids
    async with running(Worker(outbox)):
        await until(lambda: len(handed_over) == len(ids))
        other = connect()
        other.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [locked])
        may_end.set()
        await until(lambda: {row.state for row in rows_of(db, *others)} == {state})
        assert state_of(db, locked) == "sending"
        other.commit()
        await until(lambda: state_of(db, locked) == state)
    assert handed_over == dict.fromkeys(ids, 1)
