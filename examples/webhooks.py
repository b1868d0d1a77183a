"""Webhooks: notify each subscriber of a paid order, at the subscriber's URL and signed with the subscriber's secret.

    python -m examples.webhooks https://hooks.example.org/in
    pgoutbox worker --app examples.webhooks:outbox --once

The handler reads the secret at send time, so neither a secret nor a signature is stored with the message. After a
change both secrets sign, until the subscriber uses the new one.
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
    """A subscriber and a paid order."""

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
    """Read the subscriber's secrets, and render the webhook."""
    order = message.payload
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        found = await connection.execute("SELECT secrets FROM subscriber WHERE id = %s", (order.subscriber_id,))
        row = await found.fetchone()
    if row is None:
        return Skip("the subscriber is gone")
    await ctx.ensure_lease()
    return Webhook(body={"type": "order.paid", "data": {"order_id": order.order_id}}, secrets=row[0])


def pay_order(connection: psycopg.Connection, order_id: int) -> int:
    """Enqueue a webhook for every subscriber, in the caller's transaction. Return the number of subscribers."""
    subscribers = connection.execute("SELECT id, url FROM subscriber").fetchall()
    outbox.on(connection).enqueue_many(
        [
            NewMessage(ORDER_PAID, OrderPaid(subscriber_id=subscriber_id, url=url, order_id=order_id))
            for subscriber_id, url in subscribers
        ],
    )
    return len(subscribers)


def main(url: str) -> None:
    """Enqueue one order for one subscriber that is changing its secret."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute(TABLES)
        secrets = [make_secret(), make_secret()]
        connection.execute("INSERT INTO subscriber (url, secrets) VALUES (%s, %s)", (url, Jsonb(secrets)))
        print("subscribers", pay_order(connection, 7))
        print("secret", secrets[-1])


if __name__ == "__main__":
    main(sys.argv[1])
