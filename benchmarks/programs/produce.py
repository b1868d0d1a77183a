"""A producer: one message per transaction at a steady mean rate, each at a random moment of its interval.

For each message it reports when its COMMIT was sent and when it was answered, by the clock that all processes share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable

import psycopg

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import hold_lifeline, say


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("pgoutbox", "pgqueuer", "procrastinate", "awa", "graphile-worker"))
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="the number of the first message")
    parser.add_argument("--queue", default="default", help="of pgoutbox")
    parser.add_argument("--ordering-key", help="of pgoutbox: give each message a key that begins so")
    arguments = parser.parse_args()
    # Statements begin and end transactions, because PgQueuer's driver requires an autocommit connection.
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        connection.prepare_threshold = 0
        makers = {
            "pgoutbox": lambda connection: _pgoutbox(connection, arguments.queue, arguments.ordering_key),
            "pgqueuer": _pgqueuer,
            "procrastinate": _procrastinate,
            "awa": _awa,
            "graphile-worker": _graphile_worker,
        }
        enqueue = makers[arguments.system](connection)
        say(
            produced=_produce(
                connection, enqueue, arguments.rate, range(arguments.first, arguments.first + arguments.count)
            )
        )
    return 0


def _produce(
    connection: psycopg.Connection[tuple[object, ...]], enqueue: Callable[[int], None], rate: float, numbers: range
) -> list[tuple[int, float, float]]:
    times = []
    start = time.monotonic() + 1 / rate
    for place, number in enumerate(numbers):
        due_at = start + (place + random.random()) / rate
        time.sleep(max(0.0, due_at - time.monotonic()))
        connection.execute("BEGIN")
        enqueue(number)
        sent_at = time.monotonic()
        connection.execute("COMMIT")
        times.append((number, sent_at, time.monotonic()))
    return times


def _pgoutbox(connection: psycopg.Connection[tuple[object, ...]], queue: str, key: str | None) -> Callable[[int], None]:
    def enqueue(number: int) -> None:
        payload = json.dumps({"user_id": number})
        if key is None and queue == "default":
            connection.execute("SELECT pgoutbox.enqueue(%s::text, %s::jsonb)", (TOPIC, payload))
            return
        ordering_key = None if key is None else f"{key}{number}"
        connection.execute(
            "SELECT pgoutbox.enqueue(%s::text, %s::jsonb, queue => %s::text, ordering_key => %s::text)",
            (TOPIC, payload, queue, ordering_key),
        )

    return enqueue


def _pgqueuer(connection: psycopg.Connection[tuple[object, ...]]) -> Callable[[int], None]:
    from pgqueuer.adapters.drivers.psycopg import SyncPsycopgDriver
    from pgqueuer.queries import SyncQueries

    queries = SyncQueries(SyncPsycopgDriver(connection))

    def enqueue(number: int) -> None:
        queries.enqueue(TOPIC, str(number).encode())

    return enqueue


def _procrastinate(connection: psycopg.Connection[tuple[object, ...]]) -> Callable[[int], None]:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())

    def enqueue(number: int) -> None:
        app.configure_task(TOPIC, queue="default", connection=connection).defer(user_id=number)

    return enqueue


def _awa(connection: psycopg.Connection[tuple[object, ...]]) -> Callable[[int], None]:
    from awa.bridge import insert_job_sync

    def enqueue(number: int) -> None:
        insert_job_sync(connection, {"user_id": number}, kind="activation", queue="mail")

    return enqueue


def _graphile_worker(connection: psycopg.Connection[tuple[object, ...]]) -> Callable[[int], None]:
    def enqueue(number: int) -> None:
        payload = json.dumps({"user_id": number})
        connection.execute("SELECT graphile_worker.add_job(%s::text, %s::json)", (TOPIC, payload))

    return enqueue


if __name__ == "__main__":
    sys.exit(main())
