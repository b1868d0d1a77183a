"""Tests of the doorbell on its own connection: what it hears while it asks."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import psycopg

from pgoutbox.kernel.doorbell import Doorbell, Surroundings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgoutbox.kernel.seams import Step

_NOTHING: Step = ("SELECT 1", {})
_GATE = 42


def _doorbell(dsn: str, wake: Callable[[], None]) -> Doorbell:
    async def connect() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(dsn, autocommit=True)

    async def may_pass(_error: psycopg.Error | OSError) -> bool:
        return False

    around = Surroundings(
        connect=connect,
        may_pass=may_pass,
        want=lambda _queue: None,
        wake=wake,
        report=lambda *_arguments, **_fields: None,
        heartbeat_seconds=600.0,
    )
    return Doorbell(["default"], ["a"], around)


def test_a_watch_that_ends_before_the_answer_wakes_the_worker_that_relies_on_it(
    dsn: str, db: psycopg.Connection
) -> None:
    woken: list[str] = []

    def waits() -> bool:
        query = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
        return db.execute(query, [_GATE]).fetchone() is not None

    async def run() -> None:
        watch, other = _doorbell(dsn, lambda: None), _doorbell(dsn, lambda: woken.append("other"))
        await watch.start()
        await other.start()
        await watch.hold(lambda: _NOTHING)
        db.execute("SELECT pg_advisory_lock(%s)", [_GATE])
        # Its question has tried the locks, and the answer waits.
        asking = asyncio.create_task(other.hold(lambda: ("SELECT pg_advisory_xact_lock(%(gate)s)", {"gate": _GATE})))
        await until(waits)
        await watch.release()
        db.execute("SELECT pg_advisory_unlock(%s)", [_GATE])
        rest, _ = await asking
        assert rest.look_seconds < math.inf  # It relies on the watch that has ended.
        await other.stop()
        await watch.stop()

    asyncio.run(run())
    assert woken == ["other"]
