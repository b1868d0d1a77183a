"""Tests the sessions of transactional handlers without a worker: which attempt gets the next one."""

from __future__ import annotations

import asyncio

from pgoutbox.worker.transactional.handler_sessions import HandlerSessions
from tests.support.outbox_actions import settings_for
from tests.support.worker_sql import run_state


async def test_a_waiting_attempt_gets_the_session_before_an_attempt_that_comes_later(dsn: str) -> None:
    sessions = HandlerSessions(run_state(settings_for(dsn, concurrency=1)))
    begun: list[str] = []

    async def work(slot: str) -> None:
        for _ in range(3):
            session = await sessions.begin("attempt")
            begun.append(slot)
            await session.roll_back()
            sessions.put_back(session)

    async with asyncio.TaskGroup() as slots:
        for slot in "abc":
            slots.create_task(work(slot))
    await sessions.close()
    assert begun == list("abc") * 3
