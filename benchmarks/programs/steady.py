"""The load during another measurement: `enqueue` or `finish`. It ends when its standard input says so.

`enqueue` sends --rate messages a second on four connections. `finish` ends all claimable messages, batch after batch.
It reports the milliseconds of each transaction. For enqueues it also reports the time since the scheduled moment,
because a slow one delays the later ones.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import psycopg

from benchmarks import steps
from benchmarks.options import CLAIM_PARAMETERS, TOPIC
from benchmarks.programs.lifeline import hold_lifeline, say
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.settings import load_settings

_PRODUCERS = 4


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("enqueue", "finish"))
    parser.add_argument("--rate", type=float, default=500.0)
    arguments = parser.parse_args()
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    times: list[tuple[float, float]] = []
    count = _PRODUCERS if arguments.what == "enqueue" else 1
    ready = threading.Barrier(count + 1)

    def work() -> None:
        with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
            connection.prepare_threshold = 1
            steps = _enqueue(connection, arguments.rate / count) if arguments.what == "enqueue" else _finish(connection)
            next(steps)
            ready.wait()
            for took in steps:
                times.append(took)
                if told.is_set():
                    break

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    say(ready=True)
    for thread in threads:
        thread.join()
    say(milliseconds=[took for took, _ in times], from_due=[took for _, took in times])
    return 0


def _enqueue(connection: psycopg.Connection[tuple[object, ...]], rate: float) -> Iterator[tuple[float, float]]:
    statement = "SELECT pgoutbox.enqueue(%s::text, '{\"user_id\": 1}'::jsonb)"
    connection.execute(statement, (TOPIC,))
    yield 0.0, 0.0
    due_at = time.monotonic()
    while True:
        due_at += 1 / rate
        time.sleep(max(0.0, due_at - time.monotonic()))
        began_at = time.monotonic()
        connection.execute(statement, (TOPIC,))
        ended_at = time.monotonic()
        yield (ended_at - began_at) * 1000, (ended_at - due_at) * 1000


def _finish(connection: psycopg.Connection[tuple[object, ...]]) -> Iterator[tuple[float, float]]:
    connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()))
    yield 0.0, 0.0
    while True:
        rows = connection.execute(*steps.claim(CLAIM_PARAMETERS["total"])).fetchall()
        began_at = time.monotonic()
        with connection.pipeline(), connection.transaction():
            for step in steps.finish(rows):
                connection.execute(*step)
        took = (time.monotonic() - began_at) * 1000
        yield took, took
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
