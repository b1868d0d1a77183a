"""Webhooks: each subscriber of a shop hears of an order, at a URL of its own and signed with a secret of its own.

    python -m examples.webhooks https://hooks.example.org/in
    pgoutbox worker --app examples.webhooks:outbox --once

The secret is read when the webhook is sent. So neither a secret nor a signature is ever stored with the message, and
from the moment of a change on both secrets sign, until the subscriber has taken the new one over.
"""

from __future__ import annotations

import os
import sys

import psycopg
from psycopg.types.json import Jsonb
from pydantic import BaseModel

from pgoutbox import Context, Message, NewMessage, Outbox, Skip, Topic, Webhook
from pgoutbox.webhooks import make_secret


class OrderPaid(BaseModel):
    """Who is to hear of which order."""

    subscriber_id: int
    url: str
    order_id: int


ORDER_PAID = Topic(
    "webhook.order_paid",
    payload=OrderPaid,
    destination=lambda p: p.url,
    dedupe_key=lambda p: f"{p.subscriber_id}-{p.order_id}",
)

outbox = Outbox()

TABLES = """
CREATE TABLE IF NOT EXISTS subscriber (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    url text NOT NULL,
    secrets jsonb NOT NULL -- The newest first; the others are about to retire.
)
"""


@outbox.handler(ORDER_PAID)
async def tell_subscriber(message: Message[OrderPaid], ctx: Context) -> Webhook | Skip:
    """Look for the subscriber's secrets, and render."""
    order = message.payload
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        found = await connection.execute("SELECT secrets FROM subscriber WHERE id = %s", (order.subscriber_id,))
        row = await found.fetchone()
    if row is None:
        return Skip("the subscriber is gone")
    await ctx.ensure_lease()
    return Webhook(body={"type": "order.paid", "data": {"order_id": order.order_id}}, secrets=row[0])


def pay_order(connection: psycopg.Connection, order_id: int) -> int:
    """Owe every subscriber a webhook, in the caller's transaction; how many there are."""
    subscribers = connection.execute("SELECT id, url FROM subscriber").fetchall()
    outbox.enqueue_many(
        connection,
        [
            NewMessage(ORDER_PAID, OrderPaid(subscriber_id=subscriber_id, url=url, order_id=order_id))
            for subscriber_id, url in subscribers
        ],
    )
    return len(subscribers)


def main(url: str) -> None:
    """One subscriber, who is changing from one secret to another, and one order."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute(TABLES)
        secrets = [make_secret(), make_secret()]
        connection.execute("INSERT INTO subscriber (url, secrets) VALUES (%s, %s)", (url, Jsonb(secrets)))
        print("subscribers", pay_order(connection, 7))
        print("secret", secrets[-1])


if __name__ == "__main__":
    main(sys.argv[1])
