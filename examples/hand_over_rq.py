"""RQ: enqueue a task in the transaction, and hand it to RQ after the commit.

    export REDIS_URL=redis://127.0.0.1:6379/0
    python -m examples.hand_over_rq 7
    pgoutbox worker --app examples.hand_over_rq:outbox --once
    rq worker --url $REDIS_URL

RQ recognizes a repeated hand-over while Redis has the task or its result, here for a day after the task.
"""

# RQ's types are incomplete.
# pyright: basic

from __future__ import annotations

import os
import sys

import psycopg
from redis import Redis, RedisError
from rq import Queue, get_current_job
from rq.exceptions import DuplicateJobError

from pgoutbox import Message, Outbox, SyncContext, Unavailable

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
RESULT_SECONDS = 24 * 60 * 60

queue = Queue(connection=Redis.from_url(REDIS_URL, socket_timeout=10, socket_connect_timeout=10))
outbox = Outbox()


def send_invoice(order_id: int) -> None:
    """Send the invoice of an order, once for each id."""
    job = get_current_job()
    assert job is not None
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("INSERT INTO invoice VALUES (%s, %s) ON CONFLICT DO NOTHING", (job.id, order_id))


TASKS = {"send_invoice": send_invoice}


@outbox.handler("rq.task", permanent=[KeyError])
def hand_over(message: Message, ctx: SyncContext) -> None:  # noqa: ARG001
    """Hand the task to RQ. While Redis is down, the message waits and uses up no attempt."""
    task, kwargs, key = TASKS[message.payload["name"]], message.payload["kwargs"], message.idempotency_key
    try:
        queue.enqueue_call(task, kwargs=kwargs, job_id=key, unique=True, result_ttl=RESULT_SECONDS)
    except DuplicateJobError:
        pass  # An earlier attempt has handed it over.
    except RedisError as error:
        raise Unavailable(f"RQ: {error}") from error


def main(order_id: int) -> None:
    """Enqueue the task of an order, in its transaction."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS invoice (id text PRIMARY KEY, order_id integer NOT NULL)")
        outbox.on(connection).enqueue("rq.task", {"name": "send_invoice", "kwargs": {"order_id": order_id}})


if __name__ == "__main__":
    main(int(sys.argv[1]))
