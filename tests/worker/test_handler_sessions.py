"""Tests the sessions of transactional handlers without a worker: which attempt gets the next one, and their ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pgoutbox.worker.transactional.handler_session import HandlerSession
from pgoutbox.worker.transactional.handler_sessions import HandlerSessions
from tests.support.outbox_actions import settings_for
from tests.support.worker_sql import run_state

if TYPE_CHECKING:
    import psycopg


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


async def test_a_session_that_is_lost_in_its_clean_up_has_committed(dsn: str, db: psycopg.Connection) -> None:
    db.execute("CREATE TABLE kept (number integer)")
    db.execute(
        "CREATE OR REPLACE FUNCTION pgoutbox._reset_session() RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); END $$"
    )
    session = await HandlerSession.open(settings_for(dsn))
    await session.begin("test", seconds=60)
    await session.commit(("INSERT INTO public.kept VALUES (1)", {}))
    assert db.execute("SELECT number FROM kept").fetchall() == [(1,)]
    assert not session.is_free
