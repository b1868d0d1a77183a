"""A hand-over is not repeated by the process that made it, and a success that came in time counts."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, LiteralString

import pytest

from pgoutbox import Context, Message, Outbox, Sent, SyncContext, Worker
from tests.support.held import Held
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, row_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

TAKE_AWAY: Final[LiteralString] = """
    UPDATE pgoutbox.message
    SET state = 'pending', lane = 1, key_in_flight = NULL, available_at = now()
    WHERE id = %s
"""


@pytest.mark.parametrize("way", ["goes on", "ends first", "is corrected"])
async def test_a_process_hands_a_message_over_again_only_to_another_destination(
    dsn: str, db: psycopg.Connection, way: str
) -> None:
    held = Held(dsn)
    message_id = enqueue(db)
    async with running(held.worker):
        await held.until_begun(message_id)
        db.execute(TAKE_AWAY, [message_id])
        if way == "is corrected":
            db.execute("UPDATE pgoutbox.message SET destination = 'mailto:ada@example.org' WHERE id = %s", [message_id])
        if way == "ends first":
            held.end(message_id, Sent())
        bell = enqueue(db)  # It wakes the worker.
        held.end(bell, Sent())
        await until(lambda: state_of(db, bell) == "sent" and row_of(db, message_id).attempt_count == 2)
        if way != "ends first":
            held.end(message_id, Sent())
        await until(lambda: state_of(db, message_id) == "sent")
    begun = [attempt for attempt in held.begun if attempt[0] == message_id]
    assert begun == [(message_id, 1), (message_id, 2)][: 2 if way == "is corrected" else 1]


async def test_a_thread_that_returns_in_time_beside_a_blocked_event_loop_is_not_repeated(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    is_begun, may_return = threading.Event(), threading.Event()

    @outbox.handler("quick", timeout=0.5)
    def quick(message: Message, ctx: SyncContext) -> None:
        is_begun.set()
        may_return.wait(PATIENCE_SECONDS)

    @outbox.handler("blocks")
    async def blocks(message: Message, ctx: Context) -> None:
        is_begun.wait(PATIENCE_SECONDS)
        may_return.set()
        time.sleep(1)  # noqa: ASYNC251 - it blocks the event loop until the timeout of the other one has passed

    with db.transaction():
        message_id = enqueue(db, "quick")
        enqueue(db, "blocks")
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count) == ("sent", 1)
