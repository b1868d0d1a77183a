"""Tests that a person is told of failed messages: at once for each new cause, and the next day of all causes."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import Context, Email, Message, Outbox, Permanent
from pgoutbox.message import State
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.worker import Worker
from pgoutbox.worker.alert import alert_text
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for
from tests.support.roles import login
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, until
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Connect

OPS = "mailto:ops@club.org"


def failing_outbox(dsn: str, **settings: object) -> Outbox:
    """Build an outbox whose handler fails with the message's payload as the error."""
    outbox = Outbox(settings_for(dsn, **settings))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise Permanent(str(message.payload))

    return outbox


def alerts(db: psycopg.Connection) -> list[dict[str, Any]]:
    """Return the payloads of the alerts with their destinations, oldest first."""
    rows = db.execute(
        "SELECT payload, destination FROM pgoutbox.message WHERE topic = %s ORDER BY id", [ALERT_TOPIC]
    ).fetchall()
    return [{**payload, "to": destination} for payload, destination in rows]


def causes(db: psycopg.Connection) -> list[str]:
    return [alert["cause"] for alert in alerts(db)]


async def run_once(dsn: str, **settings: object) -> None:
    """Run a worker like a line of the crontab. No mail server exists, so its alerts wait."""
    await Worker(failing_outbox(dsn, alert_destination=OPS, **settings)).run_once()


async def test_a_first_failure_is_told_at_once_over_each_way_although_the_mail_server_is_dead(
    dsn: str, db: psycopg.Connection
) -> None:
    async with webhook_server() as server:
        hook = server.url(scheme="http")
        settings = mail_settings(1) | {
            "webhook_allow_http": True,
            "webhook_allowed_networks": "127.0.0.0/8",
            "webhook_ports": f"443,{server.port}",
        }
        outbox = failing_outbox(dsn, alert_destination=f"{OPS} {hook}", **settings)
        async with running(Worker(outbox)):
            failed = enqueue(db, payload="RCPT ada@example.org: 550 5.1.1 no such user")
            await until(lambda: bool(server.received))
        told = json.loads(server.received[0].body)
    assert {"event": "failed", "topic": "greet", "messages": 1, "newest_id": failed}.items() <= told.items()
    assert told["cause"] == "RCPT (address): 550 #.#.# no such user"
    assert "pgoutbox failures --topic greet" in told["text"]
    assert "ada" not in json.dumps(told)
    assert [alert["to"] for alert in alerts(db)] == [OPS, hook]


@pytest.mark.slow
async def test_each_cause_is_told_once_a_day_in_each_run_of_cron(dsn: str, db: psycopg.Connection) -> None:
    for address in ("ada", "bob", "cid"):
        enqueue(db, payload=f"RCPT {address}@example.org: 550 no such user")
        await run_once(dsn)
    assert causes(db) == ["RCPT (address): 550 no such user"]
    enqueue(db, payload="KeyError: 'name'")
    await run_once(dsn)
    assert causes(db)[1:] == ["KeyError: 'name'"]


async def test_an_alert_is_sent_in_the_run_that_finds_the_failure(dsn: str, db: psycopg.Connection) -> None:
    async with accepting_server() as inbox:
        enqueue(db, payload="no such user")
        outbox = failing_outbox(dsn, alert_destination=OPS, **mail_settings(inbox.port))
        await Worker(outbox).run_once()
        (mail,) = inbox.received
    assert b"Subject: Failed: greet: no such user\r\n" in mail.content


@pytest.mark.slow
async def test_two_workers_that_look_at_the_same_time_tell_once(dsn: str, db: psycopg.Connection) -> None:
    for cause in ("x", "y", "z"):
        enqueue(db, payload=cause)
    await Worker(failing_outbox(dsn)).run_once()
    await asyncio.gather(*(run_once(dsn) for _ in range(4)))
    assert sorted(causes(db)) == ["x", "y", "z"]


async def test_the_failures_of_yesterday_are_told_in_one_message(dsn: str, db: psycopg.Connection) -> None:
    ids = [put(db, State.FAILED, topic="mail") for _ in range(3)]
    db.execute(
        "UPDATE pgoutbox.message SET last_error = CASE WHEN id = %s THEN 'full' ELSE 'user ' || id || ' is gone' END,"
        " finished_at = date_trunc('day', now(), 'UTC') - interval '1 minute'",
        [ids[0]],
    )
    put(db, State.FAILED, topic="mail", age=timedelta(days=30))
    for _ in range(2):
        await run_once(dsn)
    told = alerts(db)
    assert all(len(cause.pop("group")) == 12 for cause in told[0]["causes"])
    yesterday = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    assert told == [
        {
            "event": "failed_on_day",
            "day": yesterday,
            "messages": 3,
            "causes": [
                {"topic": "mail", "cause": "user # is gone", "messages": 2, "newest_id": ids[2]},
                {"topic": "mail", "cause": "full", "messages": 1, "newest_id": ids[0]},
            ],
            "to": OPS,
        }
    ]


@pytest.mark.slow
async def test_a_new_cause_is_told_although_ten_larger_ones_go_on(dsn: str, db: psycopg.Connection) -> None:
    for cause in "abcdefghij":
        for _ in range(2):
            enqueue(db, payload=f"the parcel {cause} is lost")
    await run_once(dsn)
    enqueue(db, payload="the parcel k is lost")
    await run_once(dsn)
    assert causes(db).count("the parcel k is lost") == 1
    assert len(causes(db)) == 11


@pytest.mark.slow
async def test_of_many_new_causes_ten_are_told_at_once_and_the_others_by_later_runs(
    dsn: str, db: psycopg.Connection
) -> None:
    for cause in "abcdefghijklmnopqrstuvw":
        enqueue(db, payload=f"the parcel {cause} is lost")
    counts = []
    for _ in range(4):
        await run_once(dsn)
        counts.append(len(set(causes(db))))
    assert counts == [10, 20, 23, 23]


async def test_a_cause_is_told_although_a_thousand_newer_messages_failed_for_another(
    dsn: str, db: psycopg.Connection
) -> None:
    first = put(db, State.FAILED)
    db.execute("UPDATE pgoutbox.message SET last_error = 'new' WHERE id = %s", [first])
    db.execute(
        "INSERT INTO pgoutbox.message_failed (id, topic, queue, payload, state, attempt_count, attempt_budget,"
        " max_attempts, available_at, finished_at, last_error, created_at)"
        " SELECT nextval('pgoutbox.message_id_seq'), 'mail', 'default', 'null', 'failed', 1, 1, 1, now(), now(),"
        " 'bounce', now() FROM generate_series(1, 2000)"
    )
    await run_once(dsn)
    assert {(alert["cause"], alert["messages"]) for alert in alerts(db)} == {("new", 1), ("bounce", 2000)}


@pytest.mark.slow
async def test_a_run_on_monday_tells_of_friday(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.FAILED, topic="mail", age=timedelta(days=3))
    put(db, State.FAILED, topic="mail", age=timedelta(days=2))
    for _ in range(2):
        await run_once(dsn)
    assert [alert["event"] for alert in alerts(db)] == ["failed_on_day"] * 2
    assert len({alert["day"] for alert in alerts(db)}) == 2


@pytest.mark.slow
async def test_a_corrected_destination_is_told_and_no_other_again(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.FAILED)
    for destinations in ("mailto:typo@club.org", f"{OPS} mailto:typo@club.org", OPS):
        await Worker(failing_outbox(dsn, alert_destination=destinations)).run_once()
    assert [alert["to"] for alert in alerts(db)] == ["mailto:typo@club.org", OPS]


async def test_a_drain_does_not_wait_for_its_own_alert(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db, payload="no such user")
    outbox = failing_outbox(dsn, alert_destination=OPS, **mail_settings(1))
    await asyncio.wait_for(Worker(outbox).drain(), PROCESS_PATIENCE_SECONDS)
    assert causes(db) == ["no such user"]


async def test_a_failure_that_its_worker_did_not_live_to_tell_is_told_by_another(
    dsn: str, db: psycopg.Connection
) -> None:
    put(db, State.FAILED, topic="mail")
    await run_once(dsn)
    assert [(alert["event"], alert["topic"]) for alert in alerts(db)] == [("failed", "mail")]


async def test_a_dismissed_or_redriven_failure_is_not_told(dsn: str, db: psycopg.Connection) -> None:
    gone = put(db, State.FAILED)
    db.execute("SELECT pgoutbox.dismiss(ARRAY[%s::bigint], 'known')", [gone])
    await run_once(dsn)
    assert alerts(db) == []


async def test_a_failed_alert_causes_no_alert(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.FAILED, topic=ALERT_TOPIC)
    await run_once(dsn)
    assert len(alerts(db)) == 1


async def test_an_own_handler_needs_no_destination(dsn: str, db: psycopg.Connection) -> None:
    outbox = failing_outbox(dsn)
    told: list[Mapping[str, Any]] = []

    @outbox.handler(ALERT_TOPIC)
    async def tell(message: Message[Any], ctx: Context) -> None:
        told.append(message.payload)

    enqueue(db, payload="no such user")
    await Worker(outbox).run_once()
    assert [(alert["event"], alert["cause"]) for alert in told] == [("failed", "no such user")]


async def test_without_a_destination_and_a_handler_nothing_is_enqueued(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db, payload="no such user")
    await Worker(failing_outbox(dsn)).run_once()
    assert alerts(db) == []


@pytest.mark.slow
async def test_the_workers_role_may_tell(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db, payload="no such user")
    with login(dsn, "pgoutbox_worker") as theirs:
        await run_once(theirs)
    assert causes(db) == ["no such user"]


@pytest.mark.slow
async def test_a_refused_alert_is_logged_and_delays_no_delivery(
    dsn: str, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [enqueue(db, payload="no such user") for _ in range(3)]
    with login(dsn, "pgoutbox_worker") as theirs:
        db.execute("REVOKE EXECUTE ON FUNCTION pgoutbox.enqueue_many FROM pgoutbox_worker")
        await run_once(theirs)
    assert {row.state for row in rows_of(db, *ids)} == {"failed"}
    assert [record.__dict__["reason"] for record in caplog.records if "alerts about failed" in record.message] == [
        "InsufficientPrivilege 42501"
    ]


@pytest.mark.slow
async def test_a_business_transaction_that_is_open_delays_no_alert(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    business = connect()
    enqueue(business, payload="later")
    enqueue(db, payload="no such user")
    await run_once(dsn)
    assert causes(db) == ["no such user"]
    business.rollback()


@pytest.mark.parametrize(
    "alert",
    [
        {"event": "failed", "topic": "mail", "cause": None, "group": "g", "messages": 1, "newest_id": 7},
        {
            "event": "failed",
            "topic": "mail",
            "cause": "two\nlines " * 90,
            "group": "g",
            "messages": 1_200,
            "newest_id": 7,
        },
        {
            "event": "failed_on_day",
            "day": "2026-03-01",
            "messages": 1,
            "causes": [{"topic": "a", "cause": None, "messages": 1}],
        },
    ],
)
def test_every_alert_can_be_sent_as_an_email(alert: Mapping[str, Any]) -> None:
    subject, text = alert_text(alert)
    assert "\n" not in subject
    assert Email(to="ops@club.org", subject=subject, text=text).text == text


@pytest.mark.parametrize("steps", range(5))
async def test_a_worker_that_stops_at_a_failure_does_not_wait_for_the_next_look(dsn: str, steps: int) -> None:
    worker = Worker(failing_outbox(dsn, alert_destination=OPS))
    async with worker._at_work(ends_by_itself=False) as run:
        failed = run.state.failed
        await until(lambda: failed._waiters)  # The first look is over.
        failed.set()
        for _ in range(steps):  # The cancellation meets each step of the task's way out of its wait.
            await asyncio.sleep(0)
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "pgoutbox-failure-alerts")
        task.cancel()
        await until(task.done)
