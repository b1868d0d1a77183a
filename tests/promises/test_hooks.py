"""A hook runs once for each failed message, however the last attempt ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Failure, Message, Outbox, Permanent, Worker
from tests.support.outbox_actions import enqueue, lapse, settings_for, state_of

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    import os
    import signal

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("mail")
    async def mail(message, ctx):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", ["a killed process", "a payload near the limit"])
async def test_a_hook_runs_once(dsn: str, db: psycopg.Connection, start_worker: StartWorker, way: str) -> None:
    outbox, failures = Outbox(settings_for(dsn)), list[tuple[int, object]]()

    @outbox.handler("mail")
    async def mail(message: Message, ctx: Context) -> None:
        raise Permanent("no")

    @outbox.on_failed("mail")
    async def tell(message: Message[Failure], ctx: Context) -> None:
        failures.append((message.payload.message_id, message.payload.payload))

    payload = "x" * 16_777_000 if way == "a payload near the limit" else "short"
    message_id = enqueue(db, "mail", payload, max_attempts=1)
    if way == "a killed process":
        start_worker(APPLICATION).wait()
        lapse(db, message_id)
    for _ in range(3):
        await Worker(outbox).run_once()
    assert state_of(db, message_id) == "failed"
    assert failures == [(message_id, "short" if way == "a killed process" else None)]
