"""The next message of a key begins as soon as the one before it has ended, also if another worker serves its topic."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.outbox_actions import Options, begin, enqueue
from tests.support.proxy import proxy_to
from tests.support.waiting import wait_until

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

# Its handler waits for the file that the payload names.
NAMED = """
    import asyncio
    import os

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def handle(message, ctx):
        while not os.path.exists(os.path.join(os.environ["GO_ON"], message.payload)):
            await asyncio.sleep(0.05)
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


@pytest.mark.parametrize(
    "place",
    [Options(queue="last", coalesce_key="k"), Options(queue="last", ordering_key="k")],
    ids=["coalesce", "ordering"],
)
def test_the_next_message_begins_in_another_worker_while_that_of_the_first_one_is_full(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path, place: Options
) -> None:
    """The slot that the first message leaves goes to another queue, which comes first."""
    environment = {"GO_ON": str(tmp_path)}
    first = enqueue(db, "greet", "first", **place)
    left = enqueue(db, payload="", queue="last")  # It waits for the slot, until its worker leaves it to the other one.
    busy = start_worker(
        NAMED, "--queue", "next", "--queue", "last", environment=environment, concurrency="1", **SETTINGS
    )
    wait_until(lambda: state_of(db, first) == "sending", lambda: busy.log)
    other = enqueue(db, payload="other", queue="next")
    idle = start_worker(NAMED, "--queue", "last", environment=environment, **SETTINGS)
    wait_until(lambda: state_of(db, left) == "sent", lambda: idle.log)
    wait_until(lambda: idle_count(db) == 1, lambda: idle.log)
    second = enqueue(db, "greet", "", **(place | {"notify": False}))
    (tmp_path / "first").touch()
    wait_until(lambda: state_of(db, second) == "sent", lambda: idle.log)
    assert state_of(db, other) == "sending"


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
