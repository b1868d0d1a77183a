"""Nothing begins in a paused queue. Lost attempts that only have to end do end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgoutbox import Sent
from pgoutbox.operations import Operator
from tests.support.held import Held
from tests.support.outbox_actions import begin, cancel, enqueue, expire, lapse, running, state_of
from tests.support.waiting import until, until_idle, until_polled

if TYPE_CHECKING:
    import psycopg


async def test_nothing_begins_in_a_paused_queue_until_it_is_resumed(dsn: str, db: psycopg.Connection) -> None:
    waiting = {kind: enqueue(db) for kind in ("fresh", "retried", "lost", "suspect")}
    ending = {kind: enqueue(db, coalesce_key=kind) for kind in ("cancelled", "superseded", "expired", "failed")}
    waiting["ordered"] = enqueue(db, ordering_key="k")
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [waiting["retried"]])
    lost = [waiting["lost"], waiting["suspect"], *ending.values()]
    for message_id in lost:
        begin(db, message_id)
    db.execute("UPDATE pgoutbox.message SET max_attempts = 2 WHERE id = %s", [waiting["suspect"]])
    db.execute("UPDATE pgoutbox.message SET max_attempts = 1 WHERE id = %s", [ending["failed"]])
    cancel(db, ending["cancelled"])
    newer = enqueue(db, coalesce_key="superseded")
    expire(db, ending["expired"])
    for message_id in lost:
        lapse(db, message_id)
    Operator(db).pause("default")

    held = Held(dsn)
    for message_id in (*waiting.values(), newer):
        held.end(message_id, Sent())
    async with running(held.worker):
        ends = {"cancelled": "cancelled", "superseded": "skipped", "expired": "skipped", "failed": "failed"}
        await until(lambda: {kind: state_of(db, message_id) for kind, message_id in ending.items()} == ends)
        assert {kind: state_of(db, message_id) for kind, message_id in waiting.items()} == {
            kind: "sending" if kind == "suspect" else "pending" for kind in waiting
        }
        await Held(dsn).run_once()
        assert held.begun == []
        Operator(db).resume("default")
        await until(lambda: all(state_of(db, message_id) == "sent" for message_id in (*waiting.values(), newer)))


@pytest.mark.parametrize("other_count", [0, 10])
@pytest.mark.parametrize("limit", ["pause", "max_in_flight"])
async def test_a_lapsed_suspect_begins_as_soon_as_its_queue_is_free_again(
    dsn: str, db: psycopg.Connection, limit: str, other_count: int
) -> None:
    suspect, running_elsewhere = (enqueue(db, max_attempts=2) for _ in range(2))
    begin(db, suspect)
    begin(db, running_elsewhere)
    lapse(db, suspect)
    operator = Operator(db)
    if limit == "pause":
        operator.pause("default")
    else:
        operator.limit_in_flight("default", 1)
    held = Held(dsn)
    async with running(held.worker):
        await until_idle(held.worker)
        for message_id in [enqueue(db) for _ in range(other_count)]:
            held.end(message_id, Sent())
        await until_polled(held.worker, db)  # It has looked at lapsed attempts within the last second.
        if limit == "pause":
            operator.resume("default")
        else:
            operator.limit_in_flight("default", None)
        await held.until_begun(suspect, attempt_count=2)
        held.end(suspect, Sent())
