"""Tests that a commit wakes an idle worker, and only that: processes whose next poll is an hour away."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from socket import AF_UNIX, socket
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgoutbox.operations import Correction, Operator
from tests.budget.relay import Relay, relay_to
from tests.support.proxy import proxy_to
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conftest import Connect, Server
    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

APPLICATION = """
    import os
    from pathlib import Path

    from pgoutbox import Outbox, Permanent
    from pgoutbox.message import Transient
    from pgoutbox.retry import RetryPolicy

    outbox = Outbox()

    async def deliver(message, context):
        match message.payload:
            case "fail":
                raise Permanent("no such user")
            case "hang":
                Path(os.environ["HUNG"]).touch()
                while message.attempt_count == 1 and Path(os.environ["HUNG"]).exists():
                    await asyncio.sleep(0.01)

    import asyncio
    for topic in os.environ.get("TOPICS", "a").split():
        outbox.handler(topic)(deliver)
"""
# Only a notification helps within the patience of a test, or a look after a worker that has died.
SETTINGS: Final[Mapping[str, Any]] = {
    "poll_interval_seconds": "3600",
    "lease_seconds": "3600",
    "listener_heartbeat_seconds": "600",
}
# The sessions that hold the wake-up lock of a queue: its class is documented.
_BELLS = (
    "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.classid = 1885826146"
    " AND l.mode = 'ExclusiveLock'"
)
# The workers whose last statement asked when the next message falls due, and that have slept since.
_ASLEEP = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
    " AND application_name LIKE 'pgoutbox claim%' AND query LIKE '%due.first_at%'"
    " AND state_change < clock_timestamp() - interval '0.3 s'"
)
# The sessions of workers with a lock.
_WATCHES = (
    "SELECT count(DISTINCT pid) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)"
    " WHERE a.datname = current_database() AND l.locktype = 'advisory' AND a.application_name = 'pgoutbox listen'"
)


def one(db: psycopg.Connection, query: str) -> int:
    ((count,),) = db.execute(query.encode()).fetchall()
    return int(count)


def until_idle(db: psycopg.Connection, worker: WorkerProcess, *, workers: int = 1) -> None:
    """Wait until this many workers sleep, and one has the wake-up lock."""
    wait_until(lambda: one(db, _ASLEEP) == workers and one(db, _BELLS) == 1, lambda: worker.log)


def enqueue(db: psycopg.Connection, topic: str = "a", payload: str = "", **options: object) -> int:
    """Enqueue in the transaction of this connection."""
    names = [sql.SQL("{} => {}").format(sql.Identifier(name), value) for name, value in options.items()]
    query = sql.SQL(", ").join([sql.SQL("{}, to_jsonb({}::text)").format(topic, payload), *names])
    ((message_id,),) = db.execute(sql.SQL("SELECT pgoutbox.enqueue({})").format(query)).fetchall()
    return int(message_id)


def until_sent(db: psycopg.Connection, message_id: int, worker: WorkerProcess) -> None:
    query = "SELECT state, worker, attempt_count, available_at FROM pgoutbox.message WHERE id = %s"

    def row() -> list[tuple[object, ...]]:
        return db.execute(query, [message_id]).fetchall()

    wait_until(lambda: row()[0][0] == "sent", lambda: f"{row()} {worker.log}")


@pytest.mark.parametrize("concurrency", [1, 50])
def test_an_idle_worker_misses_no_commit(
    connect: Connect, db: psycopg.Connection, start_worker: StartWorker, concurrency: int
) -> None:
    """Commits at random times meet each of its steps to sleep. With one slot it releases its lock for each message."""
    choice = random.Random(12)
    worker = start_worker(APPLICATION, **SETTINGS, concurrency=str(concurrency))
    until_idle(db, worker)
    producer = connect()
    for _ in range(120):
        message_id = enqueue(producer)
        if choice.random() < 0.2:  # Some were open while it went to sleep.
            until_sent(db, enqueue(db), worker)
        time.sleep(choice.uniform(0, 0.01))  # Commit at any moment of the worker's way to sleep.
        producer.commit()
        until_sent(db, message_id, worker)


def test_a_full_worker_gives_the_watch_of_a_limited_queue_back(
    connect: Connect, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    """Other workers would rely on it, and look seldom."""
    hung, operator = tmp_path / "hung", Operator(connect(autocommit=True))
    asked = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
        " AND application_name = 'pgoutbox listen' AND query_start > clock_timestamp() - interval '0.1 s'"
    )
    with connect() as producer:
        enqueue(producer)  # Its transaction shares the wake-up lock, so the watch asks for it again and again.
        worker = start_worker(APPLICATION, **SETTINGS, concurrency="1", environment={"HUNG": str(hung)})
        wait_until(lambda: one(db, _WATCHES) == 1 and one(db, asked), lambda: worker.log)
        operator.pause("default")
        wait_until(lambda: not one(db, asked), lambda: worker.log)  # It knows that its queue is paused.
        enqueue(db, payload="hang")
        producer.rollback()
        operator.resume("default")
        wait_until(hung.exists, lambda: worker.log)
        wait_until(lambda: one(db, _WATCHES) == 0, lambda: worker.log)
        hung.unlink()


@pytest.mark.parametrize("backlog", [0, 5_000])
def test_producers_notify_seldom_while_messages_come_fast(
    connect: Connect, db: psycopg.Connection, start_worker: StartWorker, backlog: int
) -> None:
    """The commits of transactions that notify wait for each other, in all databases of a server."""
    count = 2_000
    worker = start_worker(APPLICATION, **SETTINGS)
    until_idle(db, worker)
    with connect(autocommit=True) as listener, connect(autocommit=True) as producer:
        told: list[psycopg.Notify] = []
        listener.add_notify_handler(told.append)
        listener.execute("LISTEN pgoutbox")
        producer.execute("SELECT pgoutbox.enqueue('a', 'null') FROM generate_series(1, %s)", [backlog])
        ids = [enqueue(producer) for _ in range(count)]
        until_sent(db, ids[-1], worker)
        until_idle(db, worker)
        listener.execute("SELECT 1")
        assert len(told) <= count / 2
        told.clear()
        until_sent(db, enqueue(db), worker)
        listener.execute("SELECT 1")
        assert len(told) == 1


def test_a_worker_polls_while_a_transaction_keeps_its_lock_from_it(
    connect: Connect, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    with connect() as producer:
        message_id = enqueue(producer)
        worker = start_worker(APPLICATION, **SETTINGS)
        wait_until(lambda: one(db, _WATCHES), lambda: worker.log)
        for _ in range(20):
            until_sent(db, enqueue(db), worker)  # It notifies nobody: the lock is shared.
    until_sent(db, message_id, worker)


def test_a_commit_between_the_last_claim_and_the_lock_is_not_missed(
    dsn: str, connect: Connect, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    with socket(AF_UNIX) as listening:
        listening.bind(str(tmp_path / ".s.PGSQL.5432"))
        listening.listen()
        with proxy_to(dsn, listening) as proxy, connect() as producer:
            message_id = enqueue(producer)
            settings: dict[str, Any] = {**SETTINGS, "listener_heartbeat_timeout_seconds": "60"}
            worker = start_worker(APPLICATION, dsn=proxy.dsn, **settings)
            wait_until(lambda: one(db, _WATCHES), lambda: worker.log)
            with proxy.stalled("pgoutbox listen"):
                wait_until(lambda: one(db, _ASLEEP), lambda: "it asks for its lock")
                producer.commit()
            until_sent(db, message_id, worker)


def _failed(db: psycopg.Connection, worker: WorkerProcess) -> int:
    message_id = enqueue(db, payload="fail")
    query = "SELECT state FROM pgoutbox.message WHERE id = %s"
    wait_until(lambda: db.execute(query, [message_id]).fetchone() == ("failed",), lambda: worker.log)
    return message_id


def _redrive(operator: Operator, db: psycopg.Connection, worker: WorkerProcess) -> int:
    message_id = _failed(db, worker)
    db.execute("UPDATE pgoutbox.message SET payload = '\"\"' WHERE id = %s", [message_id])
    until_idle(db, worker)
    operator.redrive(message_id)
    return message_id


def _correct(operator: Operator, db: psycopg.Connection, worker: WorkerProcess) -> int:
    message_id = _failed(db, worker)
    until_idle(db, worker)
    operator.correct(message_id, Correction(payload="good"))
    return message_id


def _reschedule(operator: Operator, db: psycopg.Connection, worker: WorkerProcess) -> int:
    message_id = enqueue(db, delay=timedelta(hours=1), notify=False)
    until_idle(db, worker)
    operator.reschedule(message_id)
    return message_id


def _resume(operator: Operator, db: psycopg.Connection, worker: WorkerProcess) -> int:
    operator.pause("default")
    message_id = enqueue(db)
    wait_until(lambda: one(db, _ASLEEP), lambda: worker.log)
    operator.resume("default")
    return message_id


def _resume_topic(operator: Operator, db: psycopg.Connection, worker: WorkerProcess) -> int:
    operator.pause_topic("a")
    message_id = enqueue(db)
    until_sent(db, enqueue(db, "b"), worker)  # It has passed over the paused message.
    until_idle(db, worker)
    operator.resume_topic("a")
    return message_id


def test_an_act_of_an_operator_wakes_an_idle_worker(
    db: psycopg.Connection, connect: Connect, start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION, **SETTINGS, environment={"TOPICS": "a b"})
    operator = Operator(connect(autocommit=True))
    for act in (_redrive, _correct, _reschedule, _resume, _resume_topic):
        until_idle(db, worker)
        until_sent(db, act(operator, db, worker), worker)


@contextmanager
def relayed(dsn: str, directory: Path) -> Iterator[tuple[Relay, str]]:
    """Count what passes between workers and server. Yields the address for the workers, too."""
    (host, port) = (str(conninfo_to_dict(dsn)[name]) for name in ("host", "port"))
    with relay_to(Path(host), directory, port=int(port)) as relay:
        yield relay, make_conninfo(dsn, host=str(directory))


class Hearer:
    """A session on the channel of producers and workers."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._heard: list[str] = []
        connection.add_notify_handler(lambda notification: self._heard.append(notification.payload))
        connection.execute("LISTEN pgoutbox")

    def heard(self) -> list[str]:
        """Return the notifications so far, in the order of their commits."""
        self._connection.execute("NOTIFY pgoutbox, 'end'")
        wait_until(
            lambda: self._connection.execute("SELECT 1").fetchone() and "end" in self._heard, lambda: str(self._heard)
        )
        heard, self._heard[:] = self._heard[:-1], []
        return heard


@pytest.fixture
def hearer(connect: Connect) -> Hearer:
    return Hearer(connect(autocommit=True))


def test_only_committed_messages_notify_and_once_for_each_transaction(
    db: psycopg.Connection, connect: Connect, hearer: Hearer, start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION, **SETTINGS)
    until_idle(db, worker)
    with connect() as producer:
        enqueue(producer)
        producer.rollback()
    left = enqueue(db, notify=False)
    assert hearer.heard() == []
    assert db.execute("SELECT state FROM pgoutbox.message WHERE id = %s", [left]).fetchone() == ("pending",)
    with connect() as producer:
        ids = [enqueue(producer) for _ in range(3)]
    for message_id in [left, *ids]:
        until_sent(db, message_id, worker)
    assert hearer.heard() == ["default"]


def test_a_busy_worker_lets_producers_commit_without_a_notification(
    db: psycopg.Connection, hearer: Hearer, tmp_path: Path, start_worker: StartWorker
) -> None:
    hung = tmp_path / "hung"
    worker = start_worker(APPLICATION, **SETTINGS, concurrency="1", environment={"HUNG": str(hung)})
    until_idle(db, worker)
    first = enqueue(db, payload="hang")
    wait_until(lambda: hung.exists() and one(db, _BELLS) == 0, lambda: worker.log)
    assert hearer.heard() == ["default"]
    second = enqueue(db)
    assert hearer.heard() == []
    hung.unlink()
    for message_id in (first, second):
        until_sent(db, message_id, worker)


def test_a_full_worker_wakes_an_idle_one_that_takes_over(
    dsn: str, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    hung, directory = tmp_path / "hung", tmp_path / "relay"
    directory.mkdir()
    full = start_worker(APPLICATION, **SETTINGS, concurrency="1", environment={"HUNG": str(hung)})
    until_idle(db, full)
    with relayed(dsn, directory) as (relay, address):
        idle = start_worker(APPLICATION, dsn=address, **SETTINGS, environment={"HUNG": str(hung)})
        until_idle(db, idle, workers=2)
        before = relay.counts["notifications"]
        enqueue(db, payload="hang")
        wait_until(hung.exists, lambda: full.log)
        # Without it, it would take over at its next look.
        wait_until(lambda: relay.counts["notifications"] > before, lambda: idle.log)
        wait_until(lambda: one(db, _BELLS) == 1, lambda: idle.log)
        until_sent(db, enqueue(db), idle)


def test_a_full_worker_keeps_no_lock_of_a_queue_that_was_limited(
    db: psycopg.Connection, connect: Connect, tmp_path: Path, start_worker: StartWorker
) -> None:
    """Other idle workers would rely on it."""
    hung = tmp_path / "hung"
    operator = Operator(connect(autocommit=True))
    with connect() as producer:
        enqueue(producer)  # So it gets the watch, but not the wake-up lock.
        worker = start_worker(APPLICATION, **SETTINGS, concurrency="1", environment={"HUNG": str(hung)})
        wait_until(lambda: one(db, _WATCHES), lambda: worker.log)
        operator.pause("default")
        wait_until(lambda: one(db, _ASLEEP), lambda: worker.log)
        enqueue(db, payload="hang")
        operator.resume("default")
        wait_until(hung.exists, lambda: worker.log)
        wait_until(lambda: not one(db, _WATCHES), lambda: worker.log)


def test_a_worker_that_polls_tells_those_of_other_topics(
    connect: Connect, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    """They relied on its wake-up lock. Otherwise their messages would wait for a look."""
    worker = start_worker(APPLICATION, **SETTINGS, environment={"TOPICS": "a"})
    until_idle(db, worker)
    other = start_worker(APPLICATION, **SETTINGS, environment={"TOPICS": "b"})
    until_idle(db, other, workers=2)
    with connect(autocommit=True) as listener, connect(autocommit=True) as producer:
        told: list[psycopg.Notify] = []
        listener.add_notify_handler(told.append)
        listener.execute("LISTEN pgoutbox_idle")

        def hears() -> bool:
            until_sent(db, [enqueue(producer) for _ in range(50)][-1], worker)
            listener.execute("SELECT 1")
            return bool(told)

        wait_until(hears, lambda: worker.log)
    until_sent(db, enqueue(db, "b"), other)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_or_frozen_worker_keeps_no_message_from_an_idle_one(
    db: psycopg.Connection, start_worker: StartWorker, fault: signal.Signals
) -> None:
    watch = start_worker(APPLICATION, **SETTINGS)
    until_idle(db, watch)
    other = start_worker(APPLICATION, **SETTINGS)
    until_idle(db, other, workers=2)
    os.kill(watch.pid, fault)
    for _ in range(2):
        until_sent(db, enqueue(db), other)


def test_the_lease_of_a_killed_worker_wakes_an_idle_one_at_its_end(
    db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    hung = tmp_path / "hung"
    settings: dict[str, Any] = {**SETTINGS, "lease_seconds": "2"}
    dead = start_worker(APPLICATION, **settings, environment={"HUNG": str(hung)})
    until_idle(db, dead)
    other = start_worker(APPLICATION, **settings, environment={"HUNG": str(hung)})
    until_idle(db, other, workers=2)
    message_id = enqueue(db, payload="hang")
    wait_until(hung.exists, lambda: dead.log)
    dead.kill()
    until_sent(db, message_id, other)
    query = "SELECT attempt_count FROM pgoutbox.message WHERE id = %s"
    assert db.execute(query, [message_id]).fetchone() == (2,)


def test_workers_of_other_topics_hide_no_message_from_an_idle_one(
    dsn: str, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    workers: dict[str, WorkerProcess] = {}
    (directory := tmp_path / "relay").mkdir()
    with relayed(dsn, directory) as (relay, address):

        def start(topics: str, at: str) -> None:
            workers[topics] = start_worker(APPLICATION, dsn=at, **SETTINGS, environment={"TOPICS": topics})
            until_idle(db, workers[topics], workers=len(workers))

        start("a b", dsn)
        start("a", dsn)
        start("b", address)
        for topic in ("a", "b", "a", "b"):
            before = relay.counts["notifications"]
            until_sent(db, enqueue(db, topic), workers[topic])
            # Each of them is notified, and does not depend on a look.
            wait_until(lambda seen=before: relay.counts["notifications"] > seen, lambda: workers["b"].log)  # type: ignore[misc]
        until_idle(db, workers["a b"], workers=3)
        os.kill(workers["a b"].pid, signal.SIGSTOP)
        for topic in ("a", "b"):
            until_sent(db, enqueue(db, topic), workers[topic])
        workers["a"].stop()
        os.kill(workers["a b"].pid, signal.SIGCONT)
        until_sent(db, enqueue(db, "a"), workers["a b"])
        # Its server process would otherwise run a claim that is on its way, for a lease that lasts an hour.
        until_idle(db, workers["a b"], workers=2)
        workers["a b"].kill()
        until_sent(db, enqueue(db, "b"), workers["b"])


def test_a_worker_that_loses_its_listener_polls_until_it_is_back(
    dsn: str, db: psycopg.Connection, server: Server, start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION, **SETTINGS)
    until_idle(db, worker)
    gate = psycopg.connect(server.dsn_for(server.maintenance_dbname), autocommit=True)
    switch = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with closing(gate):
        gate.execute(switch.format(sql.Identifier(db.info.dbname), sql.SQL("false")))
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'pgoutbox listen'"
        )
        wait_until(lambda: "listener_lost" in worker.events(), lambda: worker.log)
        for _ in range(2):
            until_sent(db, enqueue(db), worker)
        gate.execute(switch.format(sql.Identifier(db.info.dbname), sql.SQL("true")))
    wait_until(lambda: "listener_back" in worker.events(), lambda: worker.log)
    until_idle(db, worker)
    until_sent(db, enqueue(db), worker)
    assert worker.events().count("listener_lost") == 1


def test_behind_a_transaction_pooler_a_worker_polls_and_says_so_once(
    db: psycopg.Connection, pooled_dsn: str, start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION, dsn=pooled_dsn, **SETTINGS)
    for _ in range(2):
        until_sent(db, enqueue(db), worker)
    assert one(db, _BELLS) == 0
    assert [record["polls"] for record in worker.records("listener_pooled")] == [True]
    assert worker.stop() == 0


def test_due_times_during_the_question_for_them_are_not_overslept(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    """Nothing notifies: each message falls due at a time of its own, while the worker handles others or asks."""
    choice = random.Random(13)
    ids = [enqueue(db, delay=timedelta(seconds=choice.uniform(0, 4))) for _ in range(100)]
    worker = start_worker(APPLICATION, listen="false", **SETTINGS)
    for message_id in ids:
        until_sent(db, message_id, worker)


def test_notifications_for_nobody_wake_no_worker(
    dsn: str, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    with relayed(dsn, tmp_path) as (relay, address):
        worker = start_worker(APPLICATION, dsn=address, **SETTINGS)
        until_idle(db, worker)
        before = relay.counts["statements"]
        db.execute("SELECT pg_notify('pgoutbox', 'loud' || n) FROM generate_series(1, 1000) AS n")
        until_sent(db, enqueue(db), worker)
        assert relay.counts["statements"] - before < 20
