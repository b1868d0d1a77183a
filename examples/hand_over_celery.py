"""Celery: enqueue a task in the transaction, and hand it to Celery after the commit.

    export REDIS_URL=redis://127.0.0.1:6379/0
    python -m examples.hand_over_celery 7
    pgoutbox worker --app examples.hand_over_celery:outbox --once
    celery --app examples.hand_over_celery worker

Celery runs a task twice if it is handed over twice, with the same id. So the task stores its id.
"""

# Celery ships no types.
# pyright: basic

from __future__ import annotations

import os
import sys

import psycopg
from celery import Celery, Task
from kombu.exceptions import OperationalError

from pgoutbox import Message, Outbox, SyncContext, Unavailable

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))
app.conf.broker_transport_options = {"socket_timeout": 10, "socket_connect_timeout": 10}
outbox = Outbox()


@app.task(name="send_invoice", bind=True, acks_late=True)  # type: ignore[untyped-decorator]
def send_invoice(task: Task, order_id: int) -> None:
    """Send the invoice of an order, once for each id."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("INSERT INTO invoice VALUES (%s, %s) ON CONFLICT DO NOTHING", (task.request.id, order_id))


@outbox.handler("celery.task", permanent=[KeyError])
def hand_over(message: Message, ctx: SyncContext) -> None:  # noqa: ARG001
    """Hand the task to Celery. While Redis is down, the message waits and uses up no attempt."""
    task, kwargs, key = app.tasks[message.payload["name"]], message.payload["kwargs"], message.idempotency_key
    try:
        task.apply_async(kwargs=kwargs, task_id=key, retry_policy={"max_retries": 0})
    except OperationalError as error:
        raise Unavailable(f"Celery: {error}") from error


def main(order_id: int) -> None:
    """Enqueue the task of an order, in its transaction."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS invoice (id text PRIMARY KEY, order_id integer NOT NULL)")
        outbox.on(connection).enqueue("celery.task", {"name": "send_invoice", "kwargs": {"order_id": order_id}})


if __name__ == "__main__":
    main(int(sys.argv[1]))
