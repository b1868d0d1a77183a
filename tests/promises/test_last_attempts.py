"""A message that is superseded, cancelled or corrected gets no attempt with what it was before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

from pgoutbox import Context, EditResult, Message, Outbox, Outcome, Permanent, Sent, Snooze, Transient, Worker
from pgoutbox.operations import Operator
from tests.support import races
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
    settings_for,
    state_of,
    until_blocked,
)
from tests.support.roles import login
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

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


CLAIM_WAITS: Final = """
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event = 'advisory' AND application_name LIKE 'pgoutbox claim%'
"""
ACTS: Final[dict[str, Callable[[psycopg.Connection, int], Any]]] = {
    "corrected": lambda db, message_id: Operator(db).correct(message_id, {"payload": {"n": 1}}).result,
    "rescheduled": lambda db, message_id: Operator(db).reschedule(message_id).result,
    "edited": lambda db, message_id: (
        Outbox().on(db).edit(message_id, owner="account-7", payload={"n": 1}, require_transaction=False)
    ),
}


@pytest.mark.parametrize("result", ACTS)
async def test_a_backlog_goes_on_although_a_claim_misses_a_message_that_has_changed_meanwhile(
    dsn: str, db: psycopg.Connection, connect: Connect, result: str
) -> None:
    """The claim gets one message less than it has asked for, which looks as if nothing else were due."""
    delivered: list[int] = []
    gate = connect()
    with login(dsn, "pgoutbox_worker") as its_dsn:
        outbox = Outbox(settings_for(its_dsn, concurrency=10, batch_size=10))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.id)

        ids = [enqueue(db, owner="account-7") for _ in range(40)]
        races.stop_reads(db, "message_live")
        async with running(Worker(outbox)):
            for _ in range(6):  # The first trips only look for lapsed attempts.
                gate.execute("SELECT pg_advisory_xact_lock(1)")
                await until(lambda: db.execute(CLAIM_WAITS).rowcount > 0)
                assert str(ACTS[result](db, ids[0])) == result
                gate.rollback()
            await until(lambda: {*delivered} == {*ids})


async def test_a_claim_that_began_before_an_edit_does_not_hand_over_the_old_payload(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    delivered: list[object] = []
    gate = connect()
    with login(dsn, "pgoutbox_worker") as its_dsn:
        outbox = Outbox(settings_for(its_dsn))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            delivered.append(message.payload)

        message_id = enqueue(db, owner="account-7")
        races.stop_reads(db, "message_live")
        async with running(Worker(outbox)):
            for number in range(4):  # The first trips only look for lapsed attempts.
                gate.execute("SELECT pg_advisory_xact_lock(1)")
                await until(lambda: db.execute(CLAIM_WAITS).rowcount > 0)
                edit = outbox.on(db).edit(message_id, owner="account-7", payload=number, require_transaction=False)
                assert edit is EditResult.EDITED
                gate.rollback()
            await until(lambda: len(delivered) > 0)
    assert delivered == [3]


CALLS: Final = pytest.mark.parametrize(
    "call",
    [
        "enqueue('new', '1')",
        "enqueue('new', '1', queue => 'other')",
        "enqueue('new', '1', ordering_key => 'k')",
        "enqueue('new', '1', dedupe_key => 'k')",
        'enqueue_many(\'[{"topic": "new", "payload": 1}]\')',
    ],
)


def states(db: psycopg.Connection) -> list[tuple[object, ...]]:
    return db.execute("SELECT id, topic, state FROM pgoutbox.message_view ORDER BY created_at").fetchall()


def is_refused(db: psycopg.Connection, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        db.execute(statement.encode())
    return refused.value


class Stubborn:
    """An outbox whose handler of `slow` ignores that it is cancelled, until the test lets it go on."""

    def __init__(self, dsn: str, **settings: object) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings))
        self.is_called, self.go_on = asyncio.Event(), asyncio.Event()
        self.delivered: list[int] = []

        @self.outbox.handler("slow")
        async def slow(message: Message, ctx: Context) -> None:
            self.is_called.set()
            waiting = asyncio.ensure_future(self.go_on.wait())
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    continue

        @self.outbox.handler("new")
        async def new(message: Message, ctx: Context) -> None:
            self.delivered.append(message.id)


async def test_a_request_to_cancel_does_not_touch_a_new_message_that_gets_the_same_id(
    dsn: str, db: psycopg.Connection
) -> None:
    """An upgrade by logical replication copies the tables, and not the value of the sequence."""
    stubborn = Stubborn(dsn, concurrency=1)
    message_id = enqueue(db, "slow")
    async with running(Worker(stubborn.outbox)):
        await stubborn.is_called.wait()
        assert db.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchall() == [("requested",)]
        stubborn.go_on.set()
        await until(lambda: states(db) == [(message_id, "slow", "sent")])
        db.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART")
        assert enqueue(db, "new") == message_id
        await until(lambda: stubborn.delivered)
        await until(lambda: states(db)[1:] == [(message_id, "new", "sent")])


@CALLS
async def test_an_enqueue_refuses_an_id_that_was_drawn_before_the_last_maintenance(
    dsn: str, db: psycopg.Connection, call: str
) -> None:
    stubborn = Stubborn(dsn, maintenance_interval_seconds=3600)
    ids = [enqueue(db, "new") for _ in range(3)]
    await Worker(stubborn.outbox).run_once()
    assert stubborn.delivered == ids
    db.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART")
    error = is_refused(db, f"SELECT pgoutbox.{call}")
    assert "SELECT setval('pgoutbox.message_id_seq'" in str(error)
    # The statement of the error repairs it.
    for statement in str(error).partition("run: ")[2].partition("; and")[0].split(";"):
        db.execute(statement.encode())
    assert enqueue(db, "new") == max(ids) + 1


@CALLS
async def test_an_enqueue_does_not_refuse_the_id_that_it_draws_during_a_maintenance(
    db: psycopg.Connection, connect: Connect, call: str
) -> None:
    """The lock stops the enqueue where it reads the last id that was drawn before the maintenance."""
    enqueue(db, "new")
    maintenance, producer = connect(), connect(autocommit=True)
    maintenance.execute("LOCK TABLE pgoutbox.id_floor")
    enqueued = asyncio.create_task(asyncio.to_thread(producer.execute, f"SELECT pgoutbox.{call}".encode()))
    await until_blocked(db, enqueued)
    maintenance.execute("SELECT pgoutbox._forget_requests()")
    maintenance.commit()
    await enqueued
    assert [state for _, _, state in states(db)] == ["pending", "pending"]


async def test_a_cancel_of_pending_messages_at_the_moment_of_a_claim_leaves_the_attempt_alone(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    message_id = enqueue(db, "new")
    claim = connect()
    # A claim locks the row first.
    claim.execute("SELECT FROM pgoutbox.message_live FOR UPDATE")
    answer = db.execute("SELECT pgoutbox.cancel(%s, '{pending}')", [message_id]).fetchall()
    claim.rollback()
    assert answer == [("pending",)]
    stubborn = Stubborn(dsn)
    async with running(Worker(stubborn.outbox)):
        await until(lambda: states(db) == [(message_id, "new", "sent")])
    assert stubborn.delivered == [message_id]


async def test_a_cancel_that_commits_after_its_attempt_has_ended_cancels_the_retry(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    outbox, calls = Outbox(settings_for(dsn)), list[int]()
    is_called, go_on = asyncio.Event(), asyncio.Event()

    @outbox.handler("fails")
    async def fails(message: Message, ctx: Context) -> None:
        calls.append(message.attempt_count)
        is_called.set()
        await go_on.wait()
        raise ValueError

    message_id = enqueue(db, "fails")
    canceller = connect()
    async with running(Worker(outbox)):
        await is_called.wait()
        assert canceller.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchall() == [("requested",)]
        go_on.set()
        await until(lambda: states(db) == [(message_id, "fails", "pending")])
        canceller.commit()
        db.execute("SELECT pgoutbox.reschedule(%s)", [[message_id]])
        await until(lambda: states(db) == [(message_id, "fails", "cancelled")])
    assert calls == [1]
