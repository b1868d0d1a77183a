"""Tests that examples/scheduled.py does what it promises: run as commands, delivered by a worker for each queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import psycopg
import pytest

from examples import scheduled
from pgoutbox import CancelResult, TransactionError
from tests.support.example_shell import Shell, mails, states
from tests.support.outbox_actions import attempts_of, make_due, row_of
from tests.support.roles import login
from tests.support.smtp_server import Inbox, parsed, scripted_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import Connect

pytestmark = pytest.mark.slow

PLAYED = [
    "ada@example.org joins, scheduled: 2",
    "bob@example.org joins, scheduled: 2",
    "cleo@example.org joins, scheduled: 2",
    "dan.example.org joins, scheduled: 2",
    "digests: 4",
    "user 2 misses a message, notified: True",
    "user 3 misses a message, notified: True",
    "user 2 changes a reminder: edited",
    "user 3 changes it, too: missing",
    "user 2 sees: Tea at 5 (pending)",
    "user 1 moves to ada@new.example.org",
    "user 3 is deactivated: cancelled cancelled cancelled cancelled",
    "user 3 misses a message, notified: False",
    "user 3 is reactivated, scheduled: 2",
]
NOTICE = ("bob@example.org", "Are you there?")
DIGESTS = [(email, "The news of week 12.") for email in ("ada@new.example.org", "bob@example.org")]


async def test_each_user_gets_the_mail_of_the_day(shell: Shell, inbox: Inbox, dsn: str) -> None:
    assert await shell.example("scheduled") == PLAYED
    await shell.deliver("scheduled", "--queue", "email_senders")
    assert mails(inbox) == [NOTICE]
    await shell.deliver("scheduled", "--queue", "deferred")
    assert sorted(mails(inbox)) == sorted([NOTICE, *DIGESTS])
    # Dan's digest failed. Two of the cancelled ones gave their keys to the onboarding after the reactivation.
    assert states(dsn) == {"pending": 9, "sent": 3, "failed": 1, "cancelled": 4}


async def test_the_onboarding_of_the_next_days_is_sent_now_to_the_present_addresses(
    shell: Shell, inbox: Inbox, dsn: str
) -> None:
    await shell.example("scheduled")
    assert "8 rescheduled" in await shell.pgoutbox("reschedule", "--topic", "mail.onboarding", "--yes")
    await shell.deliver("scheduled", "--queue", "email_senders")
    names = ("ada@new.example.org", "bob@example.org", "cleo@example.org")
    onboarding = [(email, f"The tips of day {day}.") for email in names for day in (1, 2)]
    assert sorted(mails(inbox)) == sorted([NOTICE, *onboarding])
    assert states(dsn)["failed"] == 2


async def test_a_reminder_arrives_with_its_new_text(shell: Shell, inbox: Inbox) -> None:
    await shell.example("scheduled")
    await shell.pgoutbox("reschedule", "--topic", "mail.reminder", "--yes")
    await shell.deliver("scheduled", "--queue", "email_senders")
    assert sorted(mails(inbox)) == sorted([NOTICE, ("bob@example.org", "Tea at 5")])


async def test_a_digest_to_a_wrong_address_arrives_after_a_correction_and_a_redrive(
    shell: Shell, inbox: Inbox, db: psycopg.Connection
) -> None:
    await shell.example("scheduled")
    await shell.deliver("scheduled", "--queue", "deferred")
    assert sorted(mails(inbox)) == DIGESTS
    with db.transaction():
        db.execute("UPDATE chat_user SET email = 'dan@example.org' WHERE id = 4")
    assert "1 redriven" in await shell.pgoutbox("redrive", "--all", "--yes")
    await shell.deliver("scheduled", "--queue", "deferred")
    assert sorted(mails(inbox)) == [*DIGESTS, ("dan@example.org", "The news of week 12.")]


async def test_a_burst_of_digests_does_not_delay_a_notice(shell: Shell, inbox: Inbox, dsn: str) -> None:
    inbox.delays = lambda received: parsed(received.content)["Subject"] == "Your digest"
    await shell.example("scheduled")
    burst = asyncio.create_task(shell.deliver("scheduled", "--queue", "deferred"))
    await until(lambda: len(inbox.delayed) == len(DIGESTS))
    await shell.deliver("scheduled", "--queue", "email_senders")
    assert mails(inbox) == [NOTICE]
    inbox.may_go_on.set()
    await burst
    assert sorted(mails(inbox)) == sorted([NOTICE, *DIGESTS])


async def test_a_message_that_is_refused_for_now_delays_no_other_and_is_not_retried_at_once(
    shell: Shell, inbox: Inbox, connect: Connect
) -> None:
    await shell.example("scheduled")
    db = connect(autocommit=True)
    async with scripted_server({"RCPT TO:<ada@new.example.org>": "450 4.2.0 greylisted"}) as server:
        greylisting = Shell(shell.environment | {"PGOUTBOX_SMTP_PORT": str(server.port)})
        await greylisting.deliver("scheduled", "--queue", "deferred")
        assert len(server.contents) == 1
    (waiting,) = db.execute("SELECT id FROM pgoutbox.message WHERE queue = 'deferred' AND state = 'pending'").fetchall()
    row = row_of(db, waiting[0])
    assert (row.attempt_count, row.due_in_seconds > 0) == (1, True)
    assert [outcome for _, outcome, _ in attempts_of(db, row.id)] == ["retry"]
    make_due(db, row.id)
    await shell.deliver("scheduled", "--queue", "deferred")
    assert mails(inbox) == DIGESTS[:1]


async def test_the_producers_role_plays_the_whole_day(shell: Shell, dsn: str, connect: Connect) -> None:
    db = connect(autocommit=True)
    db.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    db.execute("GRANT EXECUTE ON FUNCTION pgoutbox.read_payloads TO pgoutbox_producer")
    with login(dsn, "pgoutbox_producer") as producer:
        shell.environment["PGOUTBOX_DSN"] = producer
        assert await shell.example("scheduled") == PLAYED


def joined(connection: psycopg.Connection, users: Iterable[int] = (1,)) -> None:
    """Create the table, with users without messages."""
    with connection.transaction():
        connection.execute(scheduled.TABLE)
        for user_id in users:
            connection.execute("INSERT INTO chat_user VALUES (%s, %s)", (user_id, f"user{user_id}@example.org"))


def test_a_deactivation_that_rolls_back_cancels_nothing(connect: Connect, dsn: str) -> None:
    connection = connect(autocommit=True)
    joined(connection)
    with connection.transaction():
        scheduled.schedule_onboarding(connection, 1)
    with connection.transaction(force_rollback=True):
        assert [answer.result for answer in scheduled.deactivate(connection, 1)] == [CancelResult.CANCELLED] * 2
    assert states(dsn) == {"pending": 2}
    assert connection.execute("SELECT active FROM chat_user").fetchall() == [(True,)]


def test_a_step_outside_of_a_transaction_is_refused(connect: Connect, dsn: str) -> None:
    connection = connect(autocommit=True)
    joined(connection)
    with pytest.raises(TransactionError):
        scheduled.schedule_onboarding(connection, 1)
    with pytest.raises(TransactionError):
        scheduled.deactivate(connection, 1)
    assert states(dsn) == {}


async def test_a_deactivation_cancels_a_notice_that_was_enqueued_at_the_same_moment(connect: Connect, dsn: str) -> None:
    producer, admin, watcher = connect(), connect(), connect(autocommit=True)
    joined(watcher)
    assert scheduled.notify(producer, 1, "Are you there?")
    deactivation = asyncio.create_task(asyncio.to_thread(scheduled.deactivate, admin, 1))
    blocked = "SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    await until(
        lambda: deactivation.done() or watcher.execute(blocked, (producer.info.backend_pid,)).fetchone() is not None
    )
    producer.commit()
    assert [answer.result for answer in await deactivation] == [CancelResult.CANCELLED]
    admin.commit()
    assert not scheduled.notify(producer, 1, "Are you there?")
    assert states(dsn) == {"cancelled": 1}


async def test_a_message_that_was_cancelled_during_the_delivery_of_others_never_arrives(
    shell: Shell, inbox: Inbox, dsn: str, connect: Connect
) -> None:
    users = range(1, 61)
    connection = connect(autocommit=True)
    joined(connection, users)
    with connection.transaction():
        assert all(scheduled.notify(connection, user_id, "Are you there?") for user_id in users)

    def deactivate(user_ids: Iterable[int]) -> dict[int, CancelResult]:
        """Deactivate users one by one. Return the answers of those whose notice was not sent yet."""
        answers = {}
        with psycopg.connect(dsn) as admin:
            for user_id in user_ids:
                for answer in scheduled.deactivate(admin, user_id):
                    answers[user_id] = answer.result
                admin.commit()
        return answers

    inbox.delays = lambda _: True
    shell.environment.update(PGOUTBOX_CONCURRENCY="3", PGOUTBOX_BATCH_SIZE="3")
    workers = [asyncio.create_task(shell.deliver("scheduled", "--queue", "email_senders")) for _ in range(2)]
    await until(lambda: inbox.delayed)
    answers = await asyncio.to_thread(deactivate, [user for user in users if user % 3 == 0])
    inbox.may_go_on.set()
    racing = [user for user in users if user % 3 == 1]
    deactivations = [asyncio.to_thread(deactivate, order) for order in (racing, racing[::-1])]
    for answered in await asyncio.gather(*deactivations):
        answers |= {user: result for user, result in answered.items() if answers.get(user) != CancelResult.CANCELLED}
    await asyncio.gather(*workers)

    arrived = Counter(recipient for recipient, _ in mails(inbox))
    assert set(arrived.values()) == {1}
    cancelled = {user for user, result in answers.items() if result is CancelResult.CANCELLED}
    assert len(cancelled) >= 10  # The workers held at most 6 messages while the first 20 users were deactivated.
    assert not arrived.keys() & {f"user{user}@example.org" for user in cancelled}
    assert arrived.keys() >= {f"user{user}@example.org" for user in users if user not in answers}
    assert states(dsn)["pending"] == states(dsn)["failed"] == 0
