"""A chat server's e-mail: scheduled, urgent, in bursts, changed by its user, and cancelled when a user is deactivated.

    python -m examples.scheduled
    pgoutbox worker --app examples.scheduled:outbox --queue email_senders --once
    pgoutbox worker --app examples.scheduled:outbox --queue deferred --once

Each queue has a worker of its own, so a burst of digests in `deferred` does not delay a notice. The onboarding waits
for the next days. `reschedule` without a time makes it due now:

    pgoutbox list --state pending
    pgoutbox list --owner user-3
    pgoutbox reschedule --topic mail.onboarding --yes

E-mail to a wrong address fails, and the rest arrives. A redrive sends it to the corrected address:

    psql "$PGOUTBOX_DSN" -c "UPDATE chat_user SET email = 'dan@example.org' WHERE id = 4"
    pgoutbox redrive --all --yes

`pgoutbox pause deferred` stops the digests on all hosts. A host delivers only the queues of its workers.

Users see their reminders and change them. The outbox is their table. With the role of a producer the application needs
the right to read payloads: `GRANT EXECUTE ON FUNCTION pgoutbox.read_payloads TO ...`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import psycopg
from pydantic import BaseModel

from pgoutbox import (
    Cancelled,
    Context,
    EditResult,
    Email,
    Message,
    NewMessage,
    Outbox,
    OwnedMessage,
    RetryPolicy,
    Skip,
    Topic,
)


class ForUser(BaseModel):
    """The recipient. The address is looked up at send time, because it may change before that."""

    user_id: int


class Onboarding(ForUser):
    """A day after the registration."""

    day: int


class Missed(ForUser):
    """A message that its recipient has not seen."""

    text: str


class Digest(ForUser):
    """A week of the chat."""

    week: int


class Reminder(ForUser):
    """What the user wants to read later."""

    text: str


def owner_of(payload: ForUser) -> str:
    """Return the owner of a message, by which the messages of a user are cancelled."""
    return f"user-{payload.user_id}"


ONBOARDING = Topic(
    "mail.onboarding",
    payload=Onboarding,
    queue="email_senders",
    owner=owner_of,
    dedupe_key=lambda p: f"{p.user_id}:{p.day}",
)
MISSED = Topic("mail.missed", payload=Missed, queue="email_senders", owner=owner_of, expires_after=24 * 3600)
DIGEST = Topic(
    "mail.digest",
    payload=Digest,
    queue="deferred",
    owner=owner_of,
    dedupe_key=lambda p: f"{p.user_id}:{p.week}",
    retry=RetryPolicy.steps(60, 300, 900, 3600),
)

REMINDER = Topic("mail.reminder", payload=Reminder, queue="email_senders", owner=owner_of)

outbox = Outbox()

TABLE = """
CREATE TABLE IF NOT EXISTS chat_user (
    id bigint PRIMARY KEY,
    email text NOT NULL,
    active boolean NOT NULL DEFAULT true
)
"""


@outbox.handler(ONBOARDING, transactional=True)
async def onboarding(message: Message[Onboarding], ctx: Context) -> Email:
    """Render the tips of a day."""
    day = message.payload.day
    return Email(to=await address_of(message, ctx), subject=f"Day {day} in the chat", text=f"The tips of day {day}.")


@outbox.handler(MISSED, transactional=True)
async def missed(message: Message[Missed], ctx: Context) -> Email:
    """Render the notice."""
    return Email(to=await address_of(message, ctx), subject="You missed a message", text=message.payload.text)


@outbox.handler(DIGEST, transactional=True)
async def digest(message: Message[Digest], ctx: Context) -> Email:
    """Render the digest."""
    text = f"The news of week {message.payload.week}."
    return Email(to=await address_of(message, ctx), subject="Your digest", text=text)


@outbox.handler(REMINDER, transactional=True)
async def reminder(message: Message[Reminder], ctx: Context) -> Email:
    """Render the reminder."""
    return Email(to=await address_of(message, ctx), subject="Your reminder", text=message.payload.text)


async def address_of(message: Message[Any], ctx: Context) -> str:
    """Return the present address of an active user. `ensure_lease` raises if the message was cancelled meanwhile."""
    query = "SELECT email FROM chat_user WHERE id = %s AND active"
    row = await (await ctx.connection.execute(query, (message.payload.user_id,))).fetchone()
    if row is None:
        raise Skip("the user is not active")
    await ctx.ensure_lease()
    return str(row[0])


def join(connection: psycopg.Connection[Any], user_id: int, email: str) -> int:
    """Add a user and schedule the onboarding. Return the number of new messages. The caller commits."""
    connection.execute("INSERT INTO chat_user (id, email) VALUES (%s, %s) ON CONFLICT DO NOTHING", (user_id, email))
    return schedule_onboarding(connection, user_id)


def schedule_onboarding(connection: psycopg.Connection[Any], user_id: int) -> int:
    """Schedule an e-mail for each of the next two days, unless it was sent or is scheduled already."""
    days = [NewMessage(ONBOARDING, Onboarding(user_id=user_id, day=day), delay=timedelta(days=day)) for day in (1, 2)]
    return sum(not answer.duplicate for answer in outbox.on(connection).enqueue_many(days))


def notify(connection: psycopg.Connection[Any], user_id: int, text: str) -> bool:
    """Enqueue a notice, unless the user is deactivated. A deactivation waits for the lock, and then cancels it too."""
    active = connection.execute("SELECT FROM chat_user WHERE id = %s AND active FOR SHARE", (user_id,))
    if active.fetchone() is None:
        return False
    outbox.on(connection).enqueue(MISSED, Missed(user_id=user_id, text=text))
    return True


def enqueue_digests(connection: psycopg.Connection[Any], week: int) -> int:
    """Enqueue a digest for each active user. Return the number of new messages."""
    users = connection.execute("SELECT id FROM chat_user WHERE active ORDER BY id FOR SHARE").fetchall()
    digests = [NewMessage(DIGEST, Digest(user_id=user_id, week=week)) for (user_id,) in users]
    return sum(not answer.duplicate for answer in outbox.on(connection).enqueue_many(digests))


def remind(connection: psycopg.Connection[Any], user_id: int, text: str, delay: timedelta) -> int:
    """Schedule a reminder. Return its id."""
    return outbox.on(connection).enqueue(REMINDER, Reminder(user_id=user_id, text=text), delay=delay).id


def reminders(connection: psycopg.Connection[Any], user_id: int) -> list[OwnedMessage]:
    """Return the reminders of a user that are not sent yet, newest first."""
    return outbox.on(connection).find(owner=f"user-{user_id}", topics=[REMINDER], payloads=True)


def change_reminder(connection: psycopg.Connection[Any], user_id: int, reminder_id: int, text: str) -> EditResult:
    """Change the text of a reminder, unless it is being sent. Another user's reminder is missing."""
    owner, payload = f"user-{user_id}", Reminder(user_id=user_id, text=text)
    return outbox.on(connection).edit(reminder_id, owner=owner, payload=payload)


def deactivate(connection: psycopg.Connection[Any], user_id: int) -> list[Cancelled]:
    """Deactivate a user and cancel the e-mail, both or neither. An e-mail that is in flight may still arrive."""
    connection.execute("UPDATE chat_user SET active = false WHERE id = %s", (user_id,))
    return outbox.on(connection).cancel_all(owner=f"user-{user_id}")


def reactivate(connection: psycopg.Connection[Any], user_id: int) -> int:
    """Activate a user again. The cancelled messages have given their dedupe keys back."""
    connection.execute("UPDATE chat_user SET active = true WHERE id = %s", (user_id,))
    return schedule_onboarding(connection, user_id)


USERS = {1: "ada@example.org", 2: "bob@example.org", 3: "cleo@example.org", 4: "dan.example.org"}


def main() -> None:
    """Play a day in the chat, each step in its own transaction. Dan's address is wrong."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        connection.execute(TABLE)
        for user_id, email in USERS.items():
            with connection.transaction():
                print(email, "joins, scheduled:", join(connection, user_id, email))
        with connection.transaction():
            print("digests:", enqueue_digests(connection, week=12))
        for user_id in (2, 3):
            with connection.transaction():
                print("user", user_id, "misses a message, notified:", notify(connection, user_id, "Are you there?"))
        with connection.transaction():
            reminder_id = remind(connection, 2, "Tea at 4", timedelta(hours=3))
        with connection.transaction():
            print("user 2 changes a reminder:", change_reminder(connection, 2, reminder_id, "Tea at 5"))
            print("user 3 changes it, too:", change_reminder(connection, 3, reminder_id, "No tea"))
            print("user 2 sees:", *(f"{one.payload['text']} ({one.state})" for one in reminders(connection, 2)))
        connection.execute("UPDATE chat_user SET email = 'ada@new.example.org' WHERE id = 1")
        print("user 1 moves to ada@new.example.org")
        with connection.transaction():
            print("user 3 is deactivated:", *(answer.result.value for answer in deactivate(connection, 3)))
        with connection.transaction():
            print("user 3 misses a message, notified:", notify(connection, 3, "Where are you?"))
        with connection.transaction():
            print("user 3 is reactivated, scheduled:", reactivate(connection, 3))


if __name__ == "__main__":
    main()
