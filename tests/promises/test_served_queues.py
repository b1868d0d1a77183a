"""People see which messages no worker takes, and a worker says which queues of its topics it does not serve."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.command_line import Done, run_process
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    from pgoutbox import Context, Message, Outbox, Topic

    outbox = Outbox()

    @outbox.handler(Topic("mail.alarm", queue="critical"))
    async def alarm(message: Message, ctx: Context) -> None: ...

    @outbox.handler("mail.note")
    async def note(message: Message, ctx: Context) -> None: ...
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    (tmp_path / "served_app.py").write_text(textwrap.dedent(APPLICATION))
    return "served_app:outbox"


@pytest.fixture
def command(dsn: str, tmp_path: Path, app: str) -> Callable[..., Done]:
    """Run a command on the test's database, with the application and a log in JSON."""

    def run(*arguments: str, **environment: str) -> Done:
        settings = {"PGOUTBOX_APP": app, "PGOUTBOX_LOG_FORMAT": "json", **environment}
        return run_process(*arguments, dsn=dsn, stdin=b"", PYTHONPATH=str(tmp_path), **settings)

    return run


def enqueue(db: psycopg.Connection, topic: str, queue: str = "default", count: int = 1) -> None:
    db.execute(
        "SELECT pgoutbox.enqueue(%s, '{}', queue => %s) FROM generate_series(1, %s)", [topic, queue, count]
    ).fetchall()


def waits(command: Callable[..., Done], *options: str) -> list[str]:
    return [message["waits"] for message in command("list", "--json", *options).lines]


def codes(command: Callable[..., Done]) -> set[str]:
    return {finding["code"] for finding in command("doctor", "--json").lines if finding["check"] == "due"}


def run_done(done: Done) -> dict[str, Any]:
    record: dict[str, Any]
    (record,) = [r for r in map(json.loads, done.err.splitlines()) if r.get("event") == "run_done"]
    return record


def test_a_run_says_nothing_about_the_queues_that_it_does_not_serve(
    db: psycopg.Connection, command: Callable[..., Done]
) -> None:
    enqueue(db, "mail.alarm", "critical")
    assert waits(command) == ["no worker"]
    assert command("worker", "--once").exit_code == 0
    assert waits(command) == ["no worker"]
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '2 minutes'")
    assert codes(command) == {"due-without-worker"}


def test_a_running_worker_beside_a_run_does_not_hide_an_unserved_queue(
    db: psycopg.Connection, command: Callable[..., Done], start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION)
    wait_until(lambda: worker.records("worker_started"), lambda: worker.log)
    assert command("worker", "--once").exit_code == 0
    enqueue(db, "mail.alarm", "critical")
    assert waits(command, "--queue", "critical") == ["no worker"]
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '2 minutes'")
    assert codes(command) == {"due-in-unserved-queue"}


def test_a_topic_without_a_handler_is_told_after_a_run(db: psycopg.Connection, command: Callable[..., Done]) -> None:
    enqueue(db, "push.notify")
    assert command("worker", "--drain").exit_code == 0
    assert waits(command) == ["no handler"]


def test_messages_that_the_next_run_takes_wait_for_it(db: psycopg.Connection, command: Callable[..., Done]) -> None:
    """Each line of a crontab counts, whichever ran last, for 25 hours."""
    assert command("worker", "--once", "--queue", "critical").exit_code == 0
    assert command("worker", "--once").exit_code == 0
    enqueue(db, "mail.alarm", "critical")
    enqueue(db, "mail.note")
    assert waits(command) == ["next run", "next run"]
    db.execute("UPDATE pgoutbox.worker SET ended_at = now() - interval '26 hours' WHERE queues = '{critical}'")
    assert waits(command, "--queue", "critical") == ["no worker"]
    assert waits(command, "--queue", "default") == ["next run"]


def test_each_line_of_a_crontab_has_its_own_interval(db: psycopg.Connection, command: Callable[..., Done]) -> None:
    """An hourly run is not overdue because another line runs every minute."""
    for queue, interval in (("critical", "1 hour"), ("default", "1 minute")):
        for _ in range(2):
            assert command("worker", "--once", "--queue", queue).exit_code == 0
            db.execute("UPDATE pgoutbox.worker SET ended_at = ended_at - %s::interval", [interval])
        db.execute("UPDATE pgoutbox.worker SET ended_at = now(), seen_at = now()")
    for topic, queue in (("mail.alarm", "critical"), ("mail.note", "default")):
        enqueue(db, topic, queue)
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '10 minutes'")
    late = [f["about"] for f in command("doctor", "--json").lines if f["check"] == "due"]
    assert late == [{"queue": "default"}]


def test_the_start_of_a_worker_names_the_queues_of_its_topics_that_it_does_not_serve(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    worker = start_worker(APPLICATION)
    wait_until(lambda: worker.records("topics_not_served"), lambda: worker.log)
    (record,) = worker.records("topics_not_served")
    assert (record["level"], record["queues"], record["topics"]) == ("WARNING", ["critical"], ["mail.alarm"])
    assert "--queue" in str(record["message"])
    everything = start_worker(APPLICATION, "--queue", "*")
    wait_until(lambda: everything.records("worker_started"), lambda: everything.log)
    enqueue(db, "mail.alarm", "critical")
    wait_until(lambda: db.execute("SELECT FROM pgoutbox.message WHERE state = 'sent'").fetchall(), lambda: "not sent")
    assert everything.records("topics_not_served") == []


@pytest.mark.parametrize("mode", ["--once", "--drain"])
def test_a_run_counts_the_due_messages_that_it_left(
    db: psycopg.Connection, command: Callable[..., Done], mode: str
) -> None:
    enqueue(db, "mail.note")
    enqueue(db, "mail.alarm", "critical", 3)
    done = command("worker", mode, PGOUTBOX_LOG_LEVEL="INFO")
    record = run_done(done)
    assert (done.exit_code, record["sent"], record["left_due"], record["left_queues"]) == (0, 1, 3, ["critical"])
    assert "left due" in record["message"]
    done = command("worker", mode, "--queue", "*", PGOUTBOX_LOG_LEVEL="INFO")
    record = run_done(done)
    assert (record["sent"], record["left_due"], record["left_queues"]) == (3, 0, [])


@pytest.mark.parametrize("queues", [[], ["--queue", "*"], ["--queue", "critical"]], ids=["default", "all", "named"])
def test_a_run_warns_of_due_messages_that_no_worker_serves(
    db: psycopg.Connection, command: Callable[..., Done], queues: list[str]
) -> None:
    """The queue is that of the enqueue, and of no topic: `*` does not stand for it."""
    enqueue(db, "mail.note", "bulk", 3)
    enqueue(db, "mail.note", "later", 2)
    db.execute("SELECT pgoutbox.enqueue('mail.note', '{}', queue => 'other', ordering_key => 'k')")
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = 1")
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 hour' WHERE queue = 'later'")
    done = command("worker", "--once", *queues)  # As cron does: without a terminal.
    (line,) = done.err.splitlines()
    warning = json.loads(line)
    assert (done.exit_code, done.out, warning["level"]) == (0, "", "WARNING")
    assert (warning["queues"], warning["message_count"]) == (["bulk", "other"], 4)
    assert "--queue" in warning["message"]
    record = run_done(command("worker", "--once", *queues, PGOUTBOX_LOG_LEVEL="INFO"))
    assert (record["left_due"], record["left_queues"]) == (4, ["bulk", "other"])
    for queue in ("bulk", "other"):  # Other lines of the crontab.
        command("worker", "--once", "--queue", queue, "--max-messages", "1")
    assert command("worker", "--once", *queues).err == ""
    record = run_done(command("worker", "--once", *queues, PGOUTBOX_LOG_LEVEL="INFO"))
    assert (record["left_due"], record["left_queues"]) == (2, ["bulk"])
    db.execute("UPDATE pgoutbox.worker SET ended_at = now() - interval '26 hours'")
    assert json.loads(command("worker", "--once", *queues).err)["queues"] == ["bulk"]


def test_a_run_counts_at_least_a_thousand_due_messages(db: psycopg.Connection, command: Callable[..., Done]) -> None:
    enqueue(db, "mail.note", "bulk", 1001)
    warning = json.loads(command("worker", "--once").err)
    assert (warning["queues"], warning["message_count"]) == (["bulk"], "at least 1000")


@pytest.mark.parametrize("mode", ["--once", "--drain"])
def test_a_run_does_not_wait_for_paused_topics_and_names_them(
    db: psycopg.Connection, command: Callable[..., Done], mode: str
) -> None:
    """Neither for their retries, nor for messages behind one of their ordering key."""
    enqueue(db, "mail.note", count=3)
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = 1")
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 hour' WHERE id = 1")
    db.execute("UPDATE pgoutbox.message SET ordering_key = 'k', queue = 'critical' WHERE id = 2")
    db.execute("SELECT pgoutbox.enqueue('mail.alarm', '{}', queue => 'critical', ordering_key => 'k')")
    enqueue(db, "mail.alarm", "critical")
    db.execute("SELECT pgoutbox.pause_topic('mail.note')")
    done = command("worker", mode, "--queue", "*", PGOUTBOX_LOG_LEVEL="INFO")
    record = run_done(done)
    assert (done.exit_code, record["sent"], record["left_due"], record["left_topics"]) == (0, 1, 2, ["mail.note"])
    assert "paused topics" in record["message"]
    db.execute("SELECT pgoutbox.resume_topic('mail.note')")
    record = run_done(command("worker", "--once", "--queue", "*", PGOUTBOX_LOG_LEVEL="INFO"))
    assert (record["sent"], record["left_due"], record["left_topics"]) == (3, 0, [])
