"""A payload that this worker cannot read waits for a worker that can, and fails after the time of its topic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pgoutbox.testing import OutboxDriver
from tests.support.command_line import Done, run_process
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    from pydantic import BaseModel

    from pgoutbox import Context, Message, Outbox, Topic

    class Person(BaseModel):
        {field}: int

    PERSON = Topic("mail.person", payload=Person{options})
    outbox = Outbox()

    @outbox.handler(PERSON)
    async def deliver(message: Message[Person], ctx: Context) -> None: ...
"""
V1 = APPLICATION.format(field="user_id", options="")
V2 = APPLICATION.format(field="account_id", options="")
ENQUEUE = "SELECT pgoutbox.enqueue('mail.person', jsonb_build_object(%s::text, n)) FROM generate_series(1, %s) AS n"
MAKE_DUE = "UPDATE pgoutbox.message_live SET available_at = now() WHERE state = 'pending' AND available_at > now()"
# Let its last attempts have been so many, the first of them so long ago.
AGE = """
UPDATE pgoutbox.message
SET available_at = now(), attempts = jsonb_set(
    jsonb_set(attempts, '{-1,started_at}', to_jsonb(now() - %s::interval)), '{-1,times}', to_jsonb(%s::integer)
)
WHERE id = %s AND state = 'pending' AND attempts IS NOT NULL
RETURNING id
"""


@pytest.fixture
def command(dsn: str, tmp_path: Path) -> Callable[..., Done]:
    """Run a command on the test's database, beside the modules of its workers."""

    def run(*arguments: str) -> Done:
        return run_process(*arguments, dsn=dsn, PYTHONPATH=str(tmp_path))

    return run


def state_counts(db: psycopg.Connection) -> dict[str, int]:
    return dict(db.execute("SELECT state, count(*) FROM pgoutbox.message GROUP BY state").fetchall())


def put(db: psycopg.Connection, field: str, count: int = 1) -> int:
    """Enqueue messages with this field, as a producer of another version does, and return the first id."""
    return int(db.execute(ENQUEUE, [field, count]).fetchall()[0][0])


def entry_of(db: psycopg.Connection, message_id: int) -> tuple[str, str | None, int] | None:
    """Return outcome, reason code and number of the last attempts of a message."""
    return db.execute(
        "SELECT outcome, reason_code, times FROM pgoutbox.attempt_view WHERE message_id = %s"
        " ORDER BY attempt_count DESC LIMIT 1",
        [message_id],
    ).fetchone()


@pytest.fixture
def two_versions(start_worker: StartWorker) -> None:
    """Start a worker of each version. They find due messages by notifications and due times only."""
    workers = [start_worker(application, poll_interval_seconds="3600") for application in (V1, V2)]
    for worker in workers:
        wait_until(lambda worker=worker: worker.records("worker_started"), lambda worker=worker: worker.log)  # type: ignore[misc]


@pytest.mark.usefixtures("two_versions")
def test_two_versions_of_a_model_side_by_side_lose_no_message(db: psycopg.Connection) -> None:
    put(db, "user_id", 20)
    put(db, "account_id", 20)

    def all_have_ended() -> bool:
        # Which worker takes a message is chance, and the pauses of the unlucky ones grow.
        db.execute(MAKE_DUE)
        return state_counts(db).keys() <= {"sent", "failed"}

    wait_until(all_have_ended, lambda: str(state_counts(db)))
    assert state_counts(db) == {"sent": 40}


@pytest.mark.usefixtures("two_versions")
def test_an_idle_worker_hears_of_a_message_that_another_one_could_not_read(db: psycopg.Connection) -> None:
    for count in range(1, 7):
        put(db, ("user_id", "account_id")[count % 2])
        wait_until(lambda count=count: state_counts(db) == {"sent": count}, lambda: str(state_counts(db)))  # type: ignore[misc]


def test_an_unreadable_message_uses_up_no_attempt_and_tells_why_it_waits(
    db: psycopg.Connection, start_worker: StartWorker, command: Callable[..., Done]
) -> None:
    message_id = put(db, "account_id")
    worker = start_worker(V1, "--once")
    assert worker.wait() == 0, worker.log
    assert entry_of(db, message_id) == ("snoozed", "unreadable", 1)
    for wait in ("1 hour", "0"):  # During the pause, and after it, until the next run.
        db.execute("UPDATE pgoutbox.message SET available_at = now() + %s::interval", [wait])
        (listed,) = command("list", "--json").lines
        assert (listed["state"], listed["waits"]) == ("pending", "unreadable")
    shown = command("show", str(message_id), "--json").json
    assert "user_id: Field required" in shown["last_error"]
    assert shown["attempt_count"] - (shown["max_attempts"] - shown["attempt_budget"]) == 0


def test_a_message_that_nobody_can_read_fails_after_the_time_of_its_topic(
    db: psycopg.Connection, start_worker: StartWorker, command: Callable[..., Done]
) -> None:
    """Two versions refuse it for different reasons; the time counts from the first refusal."""
    message_id = put(db, "neither")
    applications = [APPLICATION.format(field=name, options=", unreadable_timeout=7200") for name in ("user_id", "x")]
    for number, (age, times) in enumerate((("5 minutes", 1), ("119 minutes", 9), ("121 minutes", 10))):
        worker = start_worker(applications[number % 2], "--once")
        assert worker.wait() == 0, worker.log
        outcome, reason_code, _ = entry_of(db, message_id) or ("none", None, 0)
        assert (outcome, reason_code) == ("snoozed", "unreadable")
        assert db.execute(AGE, [age, times, message_id]).fetchall() == [(message_id,)]
    assert start_worker(applications[0], "--once").wait() == 0
    assert entry_of(db, message_id) == ("failed", "unreadable", 1)
    (listed,) = command("list", "--state", "failed", "--json").lines
    assert "user_id: Field required" in listed["last_error"]
    # An operator who redrives it gives it the whole time again.
    assert command("redrive", str(message_id)).exit_code == 0
    assert db.execute(AGE, ["121 minutes", 10, message_id]).fetchall() == [(message_id,)]
    assert start_worker(applications[0], "--once").wait() == 0
    assert entry_of(db, message_id) == ("snoozed", "unreadable", 1)


def test_a_pause_of_all_workers_fails_no_message(db: psycopg.Connection, start_worker: StartWorker) -> None:
    """The tenth refusal is the first one that may end it."""
    message_id = put(db, "account_id")
    assert start_worker(V1, "--once").wait() == 0
    for earlier, outcome, times in ((1, "snoozed", 2), (8, "snoozed", 9), (9, "failed", 1)):
        assert db.execute(AGE, ["2 days", earlier, message_id]).fetchall() == [(message_id,)]
        assert start_worker(V1, "--once").wait() == 0
        assert entry_of(db, message_id) == (outcome, "unreadable", times)


def test_a_cancelled_message_gets_the_whole_time_again_by_a_redrive(
    db: psycopg.Connection, start_worker: StartWorker, command: Callable[..., Done]
) -> None:
    message_id = put(db, "account_id")
    assert start_worker(V1, "--once").wait() == 0
    assert db.execute(AGE, ["2 days", 30, message_id]).fetchall() == [(message_id,)]
    for act in ("cancel", "redrive"):
        done = command(act, str(message_id))
        assert done.exit_code == 0, done
    assert start_worker(V1, "--once").wait() == 0
    assert entry_of(db, message_id) == ("snoozed", "unreadable", 1)
    history = db.execute(
        "SELECT outcome, reason_code, times FROM pgoutbox.attempt_view WHERE message_id = %s ORDER BY attempt_count",
        [message_id],
    ).fetchall()
    assert history == [("cancelled", "unreadable", 30), ("snoozed", "unreadable", 1)]


def test_a_topic_without_patience_fails_at_once(db: psycopg.Connection, start_worker: StartWorker) -> None:
    message_id = put(db, "neither")
    assert start_worker(APPLICATION.format(field="user_id", options=", unreadable_timeout=0"), "--once").wait() == 0
    assert entry_of(db, message_id) == ("failed", "unreadable", 1)


def test_the_start_of_a_worker_and_the_doctor_warn_about_pending_payloads_that_do_not_fit(
    db: psycopg.Connection, start_worker: StartWorker, command: Callable[..., Done]
) -> None:
    put(db, "account_id", 3)
    put(db, "user_id", 2)
    worker = start_worker(V1)
    wait_until(lambda: worker.records("payload_unreadable"), lambda: worker.log)
    record, *_ = worker.records("payload_unreadable")
    assert (record["level"], record["topic"], record["message_count"]) == ("WARNING", "mail.person", 3)
    assert "user_id: Field required" in str(record["reason"])
    wait_until(lambda: state_counts(db).get("sent") == 2, lambda: str(state_counts(db)))
    done = command("doctor", "--app", "promise_app_1:outbox", "--json")
    (finding,) = [one for one in done.lines if one["code"] == "payloads-unreadable"]
    assert finding["level"] == "warning"
    assert re.search(r"mail\.person: 3 of 3 sampled .*user_id: Field required", finding["what"]), finding


def test_a_test_with_an_unreadable_payload_is_red_at_once(
    dsn: str, db: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(db, "account_id")
    (tmp_path / "promise_tested_app.py").write_text(re.sub(r"^    ", "", V1, flags=re.MULTILINE))
    monkeypatch.syspath_prepend(tmp_path)
    from promise_tested_app import outbox  # type: ignore[import-not-found]

    driver = OutboxDriver(outbox, dsn)
    with pytest.raises(AssertionError, match="user_id: Field required"):
        driver.run_pass()
