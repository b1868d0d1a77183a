"""A message that a newer one supersedes, or that is cancelled, gets no further attempt, however its attempt ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import Outcome, Permanent, Sent, Snooze, Transient
from tests.support.held import STOP_CLAIMS, Held
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    begin,
    cancel,
    enqueue,
    lapse,
    make_due,
    redrive,
    row_of,
    rows_of,
    running,
    state_of,
    until_blocked,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

# A retry is due in an hour. The worker is stopped during the attempt `stopped`, and another one has lost `lost`.
OUTCOMES: Final[dict[str, Outcome]] = {
    "retry": Transient("busy"),
    "snoozed": Snooze(3600),
    "failed": Permanent("no such user"),
}
WAYS: Final = (*OUTCOMES, "stopped", "lost", "locked")


@pytest.mark.parametrize("change", ["superseded", "cancelled"])
async def test_a_message_that_is_superseded_or_cancelled_gets_no_further_attempt(
    dsn: str, db: psycopg.Connection, connect: Connect, change: str
) -> None:
    # A message that may be lost once begins again as soon as its lease has ended.
    ids = {way: enqueue(db, coalesce_key=way, max_attempts=2 if way == "lost" else 5) for way in WAYS}
    begin(db, ids["lost"])
    holder = connect()  # It keeps a pending message from its first attempt, and a cancel from the message.
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [ids["locked"]])
    held, other = Held(dsn, shutdown_grace_seconds=0), Held(dsn)
    newer: list[int] = []
    async with running(held.worker):
        await held.until_begun(*(ids[way] for way in (*OUTCOMES, "stopped")))
        for way, message_id in ids.items():
            if change == "cancelled":
                assert cancel(db, message_id) == "requested"
            else:
                newer.append(enqueue(db, coalesce_key=way))
                for one in (held, other):
                    one.end(newer[-1], Sent())
        for way, outcome in OUTCOMES.items():
            held.end(ids[way], outcome)
        await until(lambda: all(state_of(db, ids[way]) not in {"pending", "sending"} for way in OUTCOMES))
    holder.rollback()
    lapse(db, ids["lost"])
    await other.run_once()
    ended = "skipped" if change == "superseded" else "cancelled"
    assert {way: state_of(db, message_id) for way, message_id in ids.items()} == {
        way: "failed" if way == "failed" else ended for way in WAYS
    }
    assert row_of(db, ids["locked"]).attempt_count == 0
    begun = sorted(message_id for message_id, _ in (*held.begun, *other.begun))
    assert begun == [ids[way] for way in (*OUTCOMES, "stopped")] + newer
    assert [state_of(db, message_id) for message_id in newer] == ["sent"] * len(newer)


async def test_a_cancel_that_is_rolled_back_or_redriven_leaves_the_next_attempt(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    held, other, canceller = Held(dsn), Held(dsn), connect()
    rolled_back, redriven = enqueue(db), enqueue(db)
    async with running(held.worker):
        await held.until_begun(rolled_back, redriven)
        assert cancel(canceller, rolled_back) == "requested"
        canceller.rollback()
        assert cancel(db, redriven) == "requested"
        for message_id in (rolled_back, redriven):
            held.end(message_id, Transient("busy"))
            other.end(message_id, Sent())
        await until(lambda: [row.state for row in rows_of(db)] == ["pending", "cancelled"])
    assert redrive(db, redriven)
    assert db.execute("SELECT FROM pgoutbox.message_view AS m WHERE m.cancel_requested_at IS NOT NULL").fetchall() == []
    make_due(db, rolled_back)
    await other.run_once()
    assert sorted(other.begun) == [(rolled_back, 2), (redriven, 2)]


async def test_no_older_message_is_handed_over_after_a_newer_one_that_was_sent_during_its_claim(
    dsn: str, db: psycopg.Connection
) -> None:
    db.execute(STOP_CLAIMS)
    older = enqueue(db, coalesce_key="k")
    slow, quick = Held(dsn, worker_name="slow", lock_timeout_seconds=PATIENCE_SECONDS), Held(dsn)
    db.execute("SELECT pg_advisory_lock(1)")
    run = asyncio.create_task(slow.run_once())
    await until_blocked(db, run)
    newer = enqueue(db, coalesce_key="k")
    quick.end(newer, Sent())
    await quick.run_once()
    assert quick.begun == [(newer, 1)]
    db.execute("SELECT pg_advisory_unlock(1)")
    await run
    assert slow.begun == []
    assert (row_of(db, older).state, row_of(db, older).superseded_by) == ("skipped", newer)
