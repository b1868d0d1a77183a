"""Dramatiq: enqueue a task in the transaction, and hand it to Dramatiq after the commit.

    export REDIS_URL=redis://127.0.0.1:6379/0
    python -m examples.hand_over_dramatiq 7
    pgoutbox worker --app examples.hand_over_dramatiq:outbox --once
    dramatiq examples.hand_over_dramatiq

Dramatiq runs a task twice if it is handed over twice, with the same id. So the task stores its id.
"""

# Dramatiq's types are incomplete.
# pyright: basic

from __future__ import annotations

import os
import sys

import dramatiq
import psycopg
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from redis import ConnectionPool, Redis, RedisError

from pgoutbox import Message, Outbox, SyncContext, Unavailable

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")

pool = ConnectionPool.from_url(REDIS_URL, socket_timeout=10, socket_connect_timeout=10)
broker = RedisBroker(client=Redis(connection_pool=pool))  # type: ignore[no-untyped-call]
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)
outbox = Outbox()


@dramatiq.actor
def send_invoice(order_id: int) -> None:
    """Send the invoice of an order, once for each id."""
    task = CurrentMessage.get_current_message()
    assert task is not None
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("INSERT INTO invoice VALUES (%s, %s) ON CONFLICT DO NOTHING", (task.message_id, order_id))


@outbox.handler("dramatiq.task", permanent=[KeyError])
def hand_over(message: Message, ctx: SyncContext) -> None:  # noqa: ARG001
    """Hand the task to Dramatiq. While Redis is down, the message waits and uses up no attempt."""
    task = broker.actors[message.payload["name"]].message(**message.payload["kwargs"])
    try:
        broker.enqueue(task.copy(message_id=message.idempotency_key))
    except RedisError as error:
        raise Unavailable(f"Dramatiq: {error}") from error


def main(order_id: int) -> None:
    """Enqueue the task of an order, in its transaction."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS invoice (id text PRIMARY KEY, order_id integer NOT NULL)")
        outbox.on(connection).enqueue("dramatiq.task", {"name": "send_invoice", "kwargs": {"order_id": order_id}})


if __name__ == "__main__":
    main(int(sys.argv[1]))
