"""Tests the live views of topics, workers and ended attempts."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox, Topic, Transient
from pgoutbox.cli.main import main
from pgoutbox.database import operator_connection
from pgoutbox.message import State
from pgoutbox.operations import activity
from pgoutbox.settings import load_settings
from pgoutbox.worker import Worker
from tests.support.command_line import run_on_terminal
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, lapse, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    with operator_connection.connect(load_settings(dsn=dsn), read_only=True) as connection:
        yield connection


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    return connect(autocommit=True)


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_shows_the_states_of_its_messages(operator: psycopg.Connection, database: psycopg.Connection) -> None:
    for state in (State.PENDING, State.SENDING, State.FAILED, State.SENT, State.SENT):
        put(database, state)
    put(database, State.SENT, age=timedelta(minutes=5))
    later, again = put(database), put(database)
    database.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 hour' WHERE id = %s", (later,))
    database.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", (again,))
    (topic,) = activity.topic_activity(operator, window_seconds=60)
    assert (topic.queue, topic.topic) == ("default", "mail")
    assert (topic.due, topic.scheduled, topic.retries, topic.sending, topic.failed) == (2, 1, 1, 1, 1)
    assert (topic.sent_per_second, topic.ended_per_second) == (2 / 60, 3 / 60)
    assert topic.oldest_due_seconds is not None
    assert activity.topic_activity(operator, queue="bulk") == []
    database.execute("UPDATE pgoutbox.message SET max_attempts = max_attempts + 1 WHERE id = %s", (again,))
    assert activity.topic_activity(operator)[0].retries == 0, "a snooze is not a retry"


def test_an_empty_topic_is_visible_while_attempts_end(
    operator: psycopg.Connection, database: psycopg.Connection
) -> None:
    put(database, State.SENT)
    put(database, State.SENT, topic="old", age=timedelta(minutes=5))
    assert [(topic.topic, topic.due) for topic in activity.topic_activity(operator)] == [("mail", 0)]


# --- workers ----------------------------------------------------------------------------------------------------------


async def test_a_worker_is_shown_with_its_messages(
    dsn: str, operator: psycopg.Connection, db: psycopg.Connection
) -> None:
    outbox = Outbox(load_settings(dsn=dsn, worker_name="a-rather-long-name-of-a-pod-in-some-cluster-7d9f8b6c5d"))
    seen: list[list[activity.WorkerActivity]] = []

    @outbox.handler("greet")
    async def greet(message: object, ctx: object) -> None:
        seen.append(activity.list_workers(operator))

    message_id = enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    ((found,),) = seen
    assert (found.worker, found.in_flight, found.expired_leases, found.queues) == (worker.name, 1, 0, ["default"])
    assert found.connected_at is not None
    assert found.lease_expires_at is not None
    assert message_id


async def test_an_idle_worker_is_shown_with_its_queues_and_topics(
    dsn: str, operator: psycopg.Connection, db: psycopg.Connection
) -> None:
    outbox = Outbox(load_settings(dsn=dsn, worker_name="a-rather-long-name-of-a-pod-in-some-cluster-7d9f8b6c5d"))
    outbox.define(Topic("mail.bulk", queue="bulk"))

    @outbox.handler("greet")
    async def greet(message: object, ctx: object) -> None: ...

    worker = Worker(outbox, queues=["*"])
    async with running(worker):
        await until(lambda: [found.seen_at for found in activity.list_workers(operator) if found.seen_at])
        (found,) = activity.list_workers(operator)
    assert (found.worker, found.in_flight, found.topics) == (worker.name, 0, ["greet"])
    assert found.queues == ["bulk", "default"]
    assert found.connected_at is not None


def test_a_vanished_worker_is_shown_by_its_remaining_messages(
    operator: psycopg.Connection, database: psycopg.Connection
) -> None:
    put(database, State.SENDING)
    lapse(database, put(database, State.SENDING))
    (found,) = activity.list_workers(operator)
    assert (found.worker, found.in_flight, found.expired_leases, found.connected_at) == ("w", 2, 1, None)


# --- outcomes ---------------------------------------------------------------------------------------------------------


async def test_each_ended_attempt_is_printed_once(
    dsn: str, operator: psycopg.Connection, db: psycopg.Connection
) -> None:
    outbox = Outbox(load_settings(dsn=dsn))

    @outbox.handler("greet")
    async def greet(message: object, ctx: object) -> None:
        raise Transient("mailbox full")

    follower = activity.Follower(operator)
    assert follower.poll() == []
    message_id = enqueue(db)
    await Worker(outbox).run_once()
    (told,) = follower.poll()
    assert (told.message_id, told.attempt_count, told.outcome, told.reason) == (message_id, 1, "retry", "mailbox full")
    assert told.worker is not None
    assert follower.poll() == []


def test_a_late_committed_end_is_printed_too(
    operator: psycopg.Connection, connect: Connect, database: psycopg.Connection
) -> None:
    late = connect(autocommit=False)
    late_id = put(late, State.SENT)
    follower = activity.Follower(operator, since=timedelta(hours=1))
    first = put(database, State.SENT)
    assert [row.message_id for row in follower.poll()] == [first]
    late.commit()
    assert [row.message_id for row in follower.poll()] == [late_id]


def test_tail_begins_at_the_requested_time(operator: psycopg.Connection, database: psycopg.Connection) -> None:
    put(database, State.SENT, age=timedelta(hours=3))
    recent = put(database, State.SENT, age=timedelta(hours=1))
    assert activity.Follower(operator).poll() == []
    assert [row.message_id for row in activity.Follower(operator, since=timedelta(hours=2)).poll()] == [recent]


def test_more_than_a_page_is_printed_completely(operator: psycopg.Connection, database: psycopg.Connection) -> None:
    database.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, state, attempt_count, claimed_at, worker, finished_at)
        SELECT 'mail', '1', 'sent', 1, now(), 'w', now() FROM generate_series(1, 2500)
        """
    )
    told = activity.Follower(operator, since=timedelta(hours=1)).poll()
    assert len({row.message_id for row in told}) == len(told) == 2500


@pytest.mark.parametrize("chosen", [{"topic": "sms"}, {"queue": "bulk"}, {"outcomes": ["failed"]}])
def test_each_filter_keeps_matching_attempts(
    operator: psycopg.Connection, database: psycopg.Connection, chosen: dict[str, object]
) -> None:
    put(database, State.SENT)
    wanted = put(database, State.FAILED, topic="sms", queue="bulk")
    follower = activity.Follower(operator, since=timedelta(hours=1), **chosen)  # type: ignore[arg-type] # one of three
    assert [row.message_id for row in follower.poll()] == [wanted]


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return run


def test_top_prints_each_refresh(cli: object, database: psycopg.Connection) -> None:
    assert callable(cli)
    put(database, State.SENDING)
    looks = [json.loads(line) for line in cli("top", "--count", "2", "--every", "0.2", "--json").splitlines()]
    assert [(look["topics"][0]["sending"], look["workers"][0]["worker"]) for look in looks] == [(1, "w")] * 2
    assert any(line.startswith("queue\ttopic\tdue\t") for line in cli("top", "--count", "1").splitlines())


def test_top_shows_the_problems_of_delivery_first(cli: object, database: psycopg.Connection) -> None:
    assert callable(cli)
    put(database, State.FAILED, topic="mail")
    database.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h'")
    put(database, State.PENDING, topic="mail")
    database.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE state = 'pending'")
    look = json.loads(cli("top", "--count", "1", "--json"))
    assert [problem["code"] for problem in look["problems"]] == ["due-without-worker", "messages-failed"]
    lines = cli("top", "--count", "1").splitlines()
    assert lines[0] == "level\twhat"
    assert lines[1].startswith("problem\tqueue default: 1 message due")


@pytest.mark.slow
def test_top_breaks_long_findings_on_a_terminal(dsn: str, database: psycopg.Connection) -> None:
    put(database, State.FAILED)
    error = " ".join(f"word{number}" for number in range(20))
    database.execute("UPDATE pgoutbox.message_failed SET last_error = %s", [error])
    shown = run_on_terminal("top", "--count", "1", dsn=dsn, COLUMNS="80", NO_COLOR="1", LINES="40").out
    assert "word19" in shown
    assert "…" not in shown


def test_workers_are_listed(cli: object, database: psycopg.Connection) -> None:
    assert callable(cli)
    assert cli("workers") == "no worker runs or holds a message\n"
    database.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, ended_at) VALUES ('cron', '{bulk}', '{}', '2026-03-01Z')"
    )
    (found,) = [json.loads(line) for line in cli("workers", "--json").splitlines()]
    assert (found["worker"], found["queues"], found["ended_at"][:10]) == ("cron", ["bulk"], "2026-03-01")
    database.execute("DELETE FROM pgoutbox.worker")
    put(database, State.SENDING)
    assert json.loads(cli("workers", "--json"))["in_flight"] == 1
    assert cli("workers").splitlines()[1].startswith("w\t1\t0\t")


def test_tail_hides_secrets(cli: object, database: psycopg.Connection) -> None:
    assert callable(cli)
    message_id = put(database, State.FAILED, destination="https://example.org/hook?token=canary")
    shown = cli("tail", "--since", "1h", "--count", "1")
    assert f" failed    message {message_id} attempt 3 default/mail " in shown
    assert "canary" not in shown + cli("tail", "--since", "1h", "--count", "1", "--json")
