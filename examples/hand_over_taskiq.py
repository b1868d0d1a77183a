"""Taskiq: enqueue a task in the transaction, and hand it to Taskiq after the commit.

    export REDIS_URL=redis://127.0.0.1:6379/0
    python -m examples.hand_over_taskiq 7
    pgoutbox worker --app examples.hand_over_taskiq:outbox --once
    taskiq worker examples.hand_over_taskiq:broker

Taskiq runs a task twice if it is handed over twice, with the same id. So the task stores its id.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import psycopg
from taskiq import Context as TaskContext
from taskiq import SendTaskError, TaskiqDepends
from taskiq_redis import RedisStreamBroker

from pgoutbox import Context, Message, Outbox, Unavailable

# By default a stream begins with the first worker of Taskiq: it would lose the tasks that were handed over earlier.
broker = RedisStreamBroker(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"), consumer_id="0")
outbox = Outbox()


@broker.task("send_invoice")
async def send_invoice(order_id: int, context: Annotated[TaskContext, TaskiqDepends()]) -> None:
    """Send the invoice of an order, once for each id."""
    values = (context.message.task_id, order_id)
    async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        await connection.execute("INSERT INTO invoice VALUES (%s, %s) ON CONFLICT DO NOTHING", values)


@outbox.handler("taskiq.task", permanent=[KeyError])
async def hand_over(message: Message, ctx: Context) -> None:  # noqa: ARG001
    """Hand the task to Taskiq. While Redis is down, the message waits and uses up no attempt."""
    task = broker.get_all_tasks()[message.payload["name"]]
    try:
        await task.kicker().with_task_id(message.idempotency_key).kiq(**message.payload["kwargs"])
    except SendTaskError as error:
        raise Unavailable(f"Taskiq: {error.__cause__}") from error


def main(order_id: int) -> None:
    """Enqueue the task of an order, in its transaction."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS invoice (id text PRIMARY KEY, order_id integer NOT NULL)")
        outbox.on(connection).enqueue("taskiq.task", {"name": "send_invoice", "kwargs": {"order_id": order_id}})


if __name__ == "__main__":
    main(int(sys.argv[1]))
