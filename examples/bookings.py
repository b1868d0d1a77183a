"""Ordered events: the bookings of an account go to a Redis stream, one after the other.

    PGOUTBOX_REDIS_URL=redis://127.0.0.1:6379/0 python -m examples.bookings
    PGOUTBOX_REDIS_URL=redis://127.0.0.1:6379/0 pgoutbox worker --app examples.bookings:outbox --once

The account is the ordering key, so a booking is handed over only after the previous one. A booking that fails
permanently blocks its account, and no other, until an operator decides.
"""

from __future__ import annotations

import os
from typing import Any

import psycopg
from pydantic import BaseModel

from pgoutbox import CloudEvent, Context, Message, Outbox, Topic


class Booked(BaseModel):
    """A booking: an account and an amount."""

    account: str
    amount: int


BOOKED: Topic[Booked] = Topic(
    "account.booked",
    payload=Booked,
    destination="redis:bookings",
    ordering_key=lambda p: p.account,
    halts_key=True,
)

outbox = Outbox()

TABLES = "CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, balance bigint NOT NULL)"


@outbox.handler(BOOKED)
async def publish(message: Message[Booked], ctx: Context) -> CloudEvent:  # noqa: ARG001
    """Return the booking as an event. Its id is the same at every attempt."""
    return CloudEvent(message.payload.model_dump(), subject=message.payload.account, source="https://bank.example.org")


def book(connection: psycopg.Connection[Any], account: str, amount: int) -> None:
    """Change the balance and enqueue the event, in the caller's transaction."""
    connection.execute(
        """
        INSERT INTO account AS a (name, balance) VALUES (%(name)s, %(amount)s)
        ON CONFLICT (name) DO UPDATE SET balance = a.balance + %(amount)s
        """,
        {"name": account, "amount": amount},
    )
    outbox.on(connection).enqueue(BOOKED, Booked(account=account, amount=amount))


def main() -> None:
    """Make five bookings to two accounts, each in its own transaction."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        connection.execute(TABLES)
        for account, amount in (("ada", 100), ("bob", 20), ("ada", -30), ("ada", 5), ("bob", 1)):
            with connection.transaction():
                book(connection, account, amount)
        print("pending", connection.execute("SELECT count(*) FROM pgoutbox.message_live").fetchone())


if __name__ == "__main__":
    main()
