"""The next message of a key begins as soon as the one before it has ended, also if another worker serves its topic."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.outbox_actions import Options, attempts_of, begin, cancel, enqueue, running, settings_for
from tests.support.proxy import proxy_to
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker

# A handler of the topic TOPIC. It waits for a file, and then does what the payload says.
APPLICATION = """
    import asyncio
    import os

    from pgoutbox import Outbox, Permanent, RetryPolicy, Skip

    outbox = Outbox()
    topic = os.environ["TOPIC"]


    @outbox.handler(topic, retry=RetryPolicy.steps(3600))
    async def handle(message, ctx):
        while not os.path.exists(os.environ["GO_ON"]):
            await asyncio.sleep(0.05)
        match message.payload:
            case "fail":
                return Permanent("no such user")
            case "skip":
                return Skip("not needed")
"""

# No sweep comes within the patience of a test, and no lease ends, for which an idle worker polls too.
SETTINGS = {"poll_interval_seconds": "3600", "lease_seconds": "3600"}


def state_of(db: psycopg.Connection, message_id: int) -> str:
    ((state,),) = db.execute("SELECT state FROM pgoutbox.message_view WHERE id = %s", [message_id]).fetchall()
    return str(state)


def idle_count(db: psycopg.Connection) -> int:
    """Count the workers that listen, and have slept since their last statement."""
    ((count,),) = db.execute(
        "SELECT count(DISTINCT l.pid) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.granted AND a.state = 'idle' AND a.datname = current_database()"
    ).fetchall()
    return int(count)


@pytest.fixture
def environments(tmp_path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of the worker of the topic `first`, which waits for the file, and of `second`."""
    waits = {"TOPIC": "first", "GO_ON": str(tmp_path / "go-on")}
    return waits, {"TOPIC": "second", "GO_ON": "/"}


@pytest.mark.parametrize("payload", ["send", "skip", "fail"])
def test_the_next_message_of_another_workers_topic_begins_when_an_attempt_ends(
    db: psycopg.Connection,
    start_worker: StartWorker,
    environments: tuple[dict[str, str], dict[str, str]],
    payload: str,
) -> None:
    with db.transaction():
        first = enqueue(db, "first", payload, ordering_key="k")
        second = enqueue(db, "second", ordering_key="k")
    workers = [start_worker(APPLICATION, environment=environment, **SETTINGS) for environment in environments]
    wait_until(lambda: state_of(db, first) == "sending", lambda: workers[0].log)
    wait_until(lambda: idle_count(db) == 2, lambda: workers[1].log)
    assert state_of(db, second) == "pending"
    Path(environments[0]["GO_ON"]).touch()
    wait_until(lambda: state_of(db, second) == "sent", lambda: workers[1].log)


@pytest.mark.parametrize("change", ["expired", "cancelled"])
def test_the_next_message_of_another_workers_topic_begins_when_a_claim_ends_the_first(
    db: psycopg.Connection,
    connect: Connect,
    start_worker: StartWorker,
    environments: tuple[dict[str, str], dict[str, str]],
    change: str,
) -> None:
    with db.transaction():
        first = enqueue(db, "first", ordering_key="k")
        second = enqueue(db, "second", ordering_key="k")
    worker = start_worker(APPLICATION, environment=environments[1], **SETTINGS)
    wait_until(lambda: idle_count(db) == 1, lambda: worker.log)
    if change == "expired":
        db.execute("UPDATE pgoutbox.message SET expires_at = now() - interval '1 s' WHERE id = %s", [first])
    else:
        holder = connect()
        holder.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [first])
        assert db.execute("SELECT pgoutbox.cancel(%s)", [first]).fetchall() == [("requested",)]
        holder.rollback()
    other = start_worker(APPLICATION, environment=environments[0], **SETTINGS)
    wait_until(lambda: state_of(db, second) == "sent", lambda: worker.log + other.log)


def test_the_next_message_of_another_workers_topic_begins_when_a_lost_attempt_ends_the_first(
    db: psycopg.Connection, start_worker: StartWorker, environments: tuple[dict[str, str], dict[str, str]]
) -> None:
    with db.transaction():
        first = enqueue(db, "first", ordering_key="k", max_attempts=1)
        second = enqueue(db, "second", ordering_key="k")
    lost, other = (start_worker(APPLICATION, environment=environment, **SETTINGS) for environment in environments)
    wait_until(lambda: state_of(db, first) == "sending", lambda: lost.log)
    wait_until(lambda: idle_count(db) >= 1, lambda: other.log)
    lost.end()
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now()")
    start_worker(APPLICATION, environment=environments[0], **SETTINGS)
    wait_until(lambda: state_of(db, second) == "sent", lambda: other.log)
    assert state_of(db, first) == "failed"


def test_a_newer_message_of_a_coalesce_key_begins_when_the_attempt_of_the_older_one_ends(
    db: psycopg.Connection, start_worker: StartWorker, environments: tuple[dict[str, str], dict[str, str]]
) -> None:
    older = enqueue(db, "first", coalesce_key="k")
    worker = start_worker(APPLICATION, environment=environments[0], **SETTINGS)
    wait_until(lambda: state_of(db, older) == "sending", lambda: worker.log)
    wait_until(lambda: idle_count(db) == 1, lambda: worker.log)
    newer = enqueue(db, "first", coalesce_key="k", notify=False)
    Path(environments[0]["GO_ON"]).touch()
    wait_until(lambda: state_of(db, newer) == "sent", lambda: worker.log)


@pytest.mark.parametrize("is_transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize(
    "place",
    [Options(queue="last", coalesce_key="k"), Options(queue="last", ordering_key="k")],
    ids=["coalesce", "ordering"],
)
async def test_the_next_message_begins_in_another_worker_while_that_of_the_first_one_is_full(
    dsn: str, db: psycopg.Connection, place: Options, is_transactional: bool
) -> None:
    """The slot that the first message leaves goes to another queue, which comes first."""
    begun: list[tuple[str, int]] = []
    ends: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def worker(name: str, *queues: str, poll_interval_seconds: float) -> Worker:
        # Its search for due messages finds those that nobody has told it of.
        settings = settings_for(dsn, concurrency=1, poll_interval_seconds=poll_interval_seconds, lease_seconds=3600)
        outbox = Outbox(settings)

        @outbox.handler("greet", transactional=is_transactional)
        async def greet(message: Message, ctx: Context) -> None:
            begun.append((name, message.id))
            await ends[message.id].wait()

        return Worker(outbox, queues=queues)

    zeroth = enqueue(db, queue="last")
    left = enqueue(db, queue="last")
    busy = worker("busy", "next", "last", poll_interval_seconds=0.1)
    async with running(busy):
        # It leaves a message that has waited for its slot for long, and from now on claims for free slots only.
        await until(lambda: [outcome for _, outcome, _ in attempts_of(db, left)] == ["released"])
        cancel(db, left)
        first = enqueue(db, **place)
        ends[zeroth].set()
        await until(lambda: begun == [("busy", zeroth), ("busy", first)])
        other = enqueue(db, queue="next")
        async with running(worker("idle", "last", poll_interval_seconds=3600)):
            await until(lambda: idle_count(db) == 1)
            second = enqueue(db, **(place | {"notify": False}))
            await until(lambda: busy.status().polled_seconds_ago > 0.1)  # So its next claim also reads the other queue.
            ends[first].set()
            await until(lambda: len(begun) == 4)
            assert set(begun[2:]) == {("busy", other), ("idle", second)}
            for message_id in (other, second):
                ends[message_id].set()


@pytest.mark.parametrize(
    ("topic", "change", "wakes"),
    [
        ("second", "none", True),
        ("second", "scheduled", False),
        ("second", "in flight", False),
        ("first", "none", False),
    ],
)
def test_the_end_of_an_attempt_wakes_other_workers_only_for_a_message_that_they_can_begin(
    dsn: str,
    db: psycopg.Connection,
    connect: Connect,
    start_worker: StartWorker,
    environments: tuple[dict[str, str], dict[str, str]],
    topic: str,
    change: str,
    wakes: bool,
) -> None:
    heard: list[str] = []
    states: list[tuple[str, str]] = []
    listener = connect(autocommit=True)
    listener.add_notify_handler(lambda notification: heard.append(notification.payload))
    with db.transaction():
        first = enqueue(db, "first", ordering_key="k")
        second = enqueue(db, topic, ordering_key="k")

    def look(_application: str, statement: str) -> None:
        """Change the next message after the end of the first one, as the worker looks for it."""
        if statement.startswith("SELECT next.queue") and not states:
            states.append((state_of(db, first), state_of(db, second)))
            listener.execute("LISTEN pgoutbox")
            if change == "scheduled":
                db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = %s", [second])
            elif change == "in flight":
                begin(db, second)

    with socket.create_server(("127.0.0.1", 0)) as listening, proxy_to(dsn, listening) as proxy:
        proxy.on_statement = look
        # Without a listener, the worker itself sends no notification before it sleeps.
        worker = start_worker(APPLICATION, environment=environments[0], dsn=proxy.dsn, listen="false", **SETTINGS)
        Path(environments[0]["GO_ON"]).touch()
        wait_until(lambda: state_of(db, first) == "sent", lambda: worker.log)
        # The worker ends this one after it has looked.
        last = enqueue(db, "first")
        wait_until(lambda: state_of(db, last) == "sent", lambda: worker.log)
        db.execute("NOTIFY pgoutbox, 'end'")
        wait_until(lambda: listener.execute("SELECT 1").fetchone() and "end" in heard, lambda: worker.log)
    # The worker begins a message of its own topic with the end of the one before it.
    assert states == [("sent", "pending" if topic == "second" else "sending")]
    assert ("all default" in heard) == wakes, heard
