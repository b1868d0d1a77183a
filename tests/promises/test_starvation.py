"""No kind of message starves another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.outbox_actions import begin, enqueue, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

KINDS = ("fresh", "retried", "ordered", "lost")


def put(db: psycopg.Connection, kind: str) -> int:
    """Enqueue a message, which is due in the lane of its kind, and return its id."""
    message_id = enqueue(db, payload=kind, ordering_key="k" if kind == "ordered" else None, notify=False)
    if kind == "retried":
        db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [message_id])
    elif kind == "lost":
        begin(db, message_id, lease_seconds=-1)
    return message_id


@pytest.mark.parametrize("source", KINDS)
async def test_no_endless_source_of_messages_starves_another_kind(
    dsn: str, db: psycopg.Connection, source: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))
    others: list[int] = []
    count = 0

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        nonlocal count
        if message.payload == source:
            count += 1
            put(db, source)
            if count == 10:
                others.extend(put(db, kind) for kind in KINDS if kind != source)

    with db.transaction():
        for _ in range(20):
            put(db, source)
    async with running(Worker(outbox)):
        await until(lambda: others and all(state_of(db, message_id) == "sent" for message_id in others))
