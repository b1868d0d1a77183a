"""Nothing begins in a paused queue or of a paused topic. All other messages go on."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest

from pgoutbox import Sent, Transient
from pgoutbox.operations import Operator, Rate
from tests.support.held import STOP_CLAIMS, Held, waiting_count
from tests.support.held_messages import DESTINATION, HOLD, open_breaker
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    begin,
    cancel,
    enqueue,
    expire,
    lapse,
    make_due,
    running,
    state_of,
)
from tests.support.waiting import until, until_idle, until_polled, wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker

APPLICATION: Final = """
    from pgoutbox import Context, Message, Outbox

    outbox = Outbox()


    @outbox.handler("digest")
    @outbox.handler("note")
    async def deliver(message: Message, ctx: Context) -> None: ...
"""


async def test_nothing_of_a_paused_topic_begins_until_it_is_resumed(dsn: str, db: psycopg.Connection) -> None:
    waiting = {kind: enqueue(db) for kind in ("fresh", "retried", "lost", "suspect")}
    waiting["elsewhere"] = enqueue(db, queue="other")
    waiting["ordered"] = enqueue(db, ordering_key="k")
    waiting["behind it"] = enqueue(db, "careful", ordering_key="k")
    ending = {kind: enqueue(db, coalesce_key=kind) for kind in ("cancelled", "superseded", "expired", "failed")}
    lost = [waiting["lost"], waiting["suspect"], *ending.values()]
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [waiting["retried"]])
    for message_id in lost:
        begin(db, message_id)
    db.execute("UPDATE pgoutbox.message SET max_attempts = 2 WHERE id = %s", [waiting["suspect"]])
    db.execute("UPDATE pgoutbox.message SET max_attempts = 1 WHERE id = %s", [ending["failed"]])
    cancel(db, ending["cancelled"])
    waiting["newer"] = enqueue(db, coalesce_key="superseded")
    ending["overtaken"] = enqueue(db, coalesce_key="n")
    waiting["newest"] = enqueue(db, coalesce_key="n")
    ending["late"], ending["ordered and late"] = enqueue(db), enqueue(db, ordering_key="late")
    for kind in ("expired", "late", "ordered and late"):
        expire(db, ending[kind])
    for message_id in lost:
        lapse(db, message_id)
    Operator(db).pause_topic("greet")
    others = [
        enqueue(db, "careful", queue=queue, ordering_key=key) for queue in ("default", "other") for key in (None, "o")
    ]

    held = Held(dsn, queues=["default", "other"])
    for message_id in (*waiting.values(), *others):
        held.end(message_id, Sent())
    async with running(held.worker):
        ends = dict.fromkeys(ending, "skipped") | {"cancelled": "cancelled", "failed": "failed"}
        await until(lambda: {kind: state_of(db, message_id) for kind, message_id in ending.items()} == ends)
        await until(lambda: all(state_of(db, message_id) == "sent" for message_id in others))
        await until_idle(held.worker)
        assert {kind: state_of(db, message_id) for kind, message_id in waiting.items()} == {
            kind: "sending" if kind == "suspect" else "pending" for kind in waiting
        }
        await Held(dsn, queues=["default", "other"]).run_once()
        assert sorted(held.begun) == [(message_id, 1) for message_id in sorted(others)]
        assert Operator(db).resume_topic("greet")
        await until(lambda: all(state_of(db, message_id) == "sent" for message_id in waiting.values()))
    begun = [message_id for message_id, _ in held.begun]
    assert begun.index(waiting["ordered"]) < begun.index(waiting["behind it"])


async def test_attempts_in_flight_continue_and_their_retries_wait(dsn: str, db: psycopg.Connection) -> None:
    held = Held(dsn)
    sent, failing = enqueue(db), enqueue(db)
    async with running(held.worker):
        await held.until_begun(sent, failing)
        Operator(db).pause_topic("greet")
        held.end(sent, Sent())
        held.end(failing, Transient("busy"))
        await until(lambda: [state_of(db, message_id) for message_id in (sent, failing)] == ["sent", "pending"])
        make_due(db, failing)
        await until_polled(held.worker, db)
        assert sorted(held.begun) == [(sent, 1), (failing, 1)]
        Operator(db).resume_topic("greet")
        await held.until_begun(failing, attempt_count=2)


@pytest.mark.parametrize("has_rate", [False, True])
async def test_a_pause_ends_by_itself_also_if_its_end_is_moved_forward(
    dsn: str, db: psycopg.Connection, *, has_rate: bool
) -> None:
    if has_rate:
        Operator(db).limit_rate("default", Rate(100, 1))
    Operator(db).pause_topic("greet", duration=timedelta(hours=1))
    waiting = [enqueue(db), enqueue(db, ordering_key="k")]
    held = Held(dsn, poll_interval_seconds=3600)
    for message_id in waiting:
        held.end(message_id, Sent())
    async with running(held.worker):
        await until_idle(held.worker)
        Operator(db).pause_topic("greet", duration=timedelta(seconds=1))
        await until(lambda: [state_of(db, message_id) for message_id in waiting] == ["sent", "sent"])


@pytest.mark.parametrize("other_count", [0, 10])
async def test_a_lapsed_suspect_begins_as_soon_as_its_topic_is_resumed(
    dsn: str, db: psycopg.Connection, other_count: int
) -> None:
    suspect = enqueue(db, max_attempts=2)
    begin(db, suspect)
    lapse(db, suspect)
    Operator(db).pause_topic("greet")
    held = Held(dsn, poll_interval_seconds=3600)
    async with running(held.worker):
        await until_idle(held.worker)
        for message_id in [enqueue(db, "careful") for _ in range(other_count)]:
            held.end(message_id, Sent())
        await until_polled(held.worker, db)  # It has looked at lapsed attempts within the last second.
        Operator(db).resume_topic("greet")
        await held.until_begun(suspect, attempt_count=2)
        held.end(suspect, Sent())


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_message_of_a_paused_topic_is_not_the_probe_of_its_breaker(
    dsn: str, db: psycopg.Connection, key: str | None
) -> None:
    message_id = enqueue(db, destination=DESTINATION, ordering_key=key)
    open_breaker(db)
    Operator(db).pause_topic("greet")
    held = Held(dsn)
    held.end(message_id, Sent())
    async with running(held.worker):
        await until_idle(held.worker)  # The probe that is due does not keep it awake.
        await until_polled(held.worker, db)
        assert held.begun == []
        assert db.execute("SELECT holds FROM pgoutbox.breaker").fetchall() == [([HOLD],)]
        Operator(db).resume_topic("greet")
        await until(lambda: state_of(db, message_id) == "sent")


async def test_a_pause_waits_for_no_claim_and_stops_the_next_one(dsn: str, db: psycopg.Connection) -> None:
    """The claim has chosen its message before the pause, and commits after it: this message is in flight."""
    db.execute(STOP_CLAIMS)
    db.execute("SELECT pg_advisory_lock(1)")
    slow = Held(dsn, worker_name="slow", lock_timeout_seconds=PATIENCE_SECONDS)
    chosen = enqueue(db)
    slow.end(chosen, Sent())
    async with running(slow.worker):
        await until(lambda: waiting_count(db) == 1)
        Operator(db).pause_topic("greet")
        later = enqueue(db)
        db.execute("SELECT pg_advisory_unlock(1)")
        await until(lambda: state_of(db, chosen) == "sent")
        await until_polled(slow.worker, db)
        assert slow.begun == [(chosen, 1)]
        assert state_of(db, later) == "pending"


async def test_an_uncommitted_pause_or_resume_stops_no_claim(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    held = Held(dsn)
    free, paused = enqueue(db), enqueue(db, "careful")
    held.end(free, Sent())
    Operator(db).pause_topic("careful")
    with connect() as changer:
        changer.execute("SELECT")
        Operator(changer).pause_topic("greet")
        Operator(changer).resume_topic("careful")
        await held.run_once()
        assert held.begun == [(free, 1)]
        changer.rollback()
    assert [state_of(db, message_id) for message_id in (free, paused)] == ["sent", "pending"]


@pytest.mark.parametrize("backlog", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_backlog_of_a_paused_topic_delays_no_other_message(
    db: psycopg.Connection, start_worker: StartWorker, backlog: int
) -> None:
    add = """
        SELECT pgoutbox.enqueue_many(jsonb_agg(jsonb_build_object('topic', %s::text, 'payload', n)))
        FROM generate_series(1, %s) AS n GROUP BY n / 1000
    """
    db.execute("SELECT pgoutbox.pause_topic('digest')")
    db.execute(add, ["digest", backlog])
    db.execute(add, ["note", 200])
    states = "SELECT count(*) FROM pgoutbox.message WHERE topic = %s AND state = %s AND attempt_count = %s"
    worker = start_worker(APPLICATION, concurrency="10", batch_size="10", poll_interval_seconds="3600")

    def until_delivered(count: int) -> None:
        wait_until(lambda: db.execute(states, ["note", "sent", 1]).fetchone() == (count,), lambda: worker.log)

    until_delivered(200)
    for number in range(201, 221):  # One by one, beside the backlog.
        db.execute("SELECT pgoutbox.enqueue('note', '1')")
        until_delivered(number)
    assert db.execute(states, ["digest", "pending", 0]).fetchone() == (backlog,)
    db.execute("DELETE FROM pgoutbox.message_live WHERE topic = 'digest' AND id % 1000 <> 0")
    db.execute("SELECT pgoutbox.resume_topic('digest')")
    wait_until(lambda: db.execute(states, ["digest", "sent", 1]).fetchone() == (backlog // 1000,), lambda: worker.log)


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
