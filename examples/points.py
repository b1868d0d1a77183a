"""A script that enqueues messages and delivers them before it ends: recount the points of each customer.

python -m examples.points
"""

from __future__ import annotations

import asyncio
import os

import psycopg
from pydantic import BaseModel

from pgoutbox import Context, Message, NewMessage, Outbox, Topic, Worker


class Customer(BaseModel):
    """The payload of a message."""

    name: str


RECOUNT = Topic("points.recount", payload=Customer, queue="points", coalesce_key=lambda customer: customer.name)

outbox = Outbox()


@outbox.handler(RECOUNT, transactional=True)
async def recount(message: Message[Customer], ctx: Context) -> None:
    """Store the sum of a customer's purchases. The sum and the end of the message commit together."""
    await ctx.connection.execute(
        """
        INSERT INTO points (customer, total)
        SELECT %(customer)s, coalesce(sum(amount), 0) FROM purchase WHERE customer = %(customer)s
        ON CONFLICT (customer) DO UPDATE SET total = excluded.total
        """,
        {"customer": message.payload.name},
    )


def create_tables(connection: psycopg.Connection) -> None:
    """Create the shop's tables. The caller commits."""
    connection.execute("CREATE TABLE IF NOT EXISTS purchase (customer text, amount integer)")
    connection.execute("CREATE TABLE IF NOT EXISTS points (customer text PRIMARY KEY, total integer NOT NULL)")


def enqueue_recounts(connection: psycopg.Connection) -> None:
    """Enqueue a message for each customer. The caller commits."""
    names = connection.execute("SELECT DISTINCT customer FROM purchase").fetchall()
    outbox.on(connection).enqueue_many([NewMessage(RECOUNT, Customer(name=name)) for (name,) in names])


def main() -> None:
    """Recount the points of all customers, and print them."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        create_tables(connection)
        connection.execute("INSERT INTO purchase VALUES ('ada', 100), ('ada', 20), ('bob', 5)")
        enqueue_recounts(connection)
        connection.commit()  # The worker sees committed messages only.
        asyncio.run(Worker(outbox, queues=["points"]).drain())
        for customer, total in connection.execute("SELECT customer, total FROM points ORDER BY customer"):
            print(customer, total)


if __name__ == "__main__":
    main()
