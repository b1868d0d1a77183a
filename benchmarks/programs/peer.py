"""PgQueuer, configured as its documentation recommends: asyncpg, uvloop, tuned autovacuum, durable tables.

install: create its tables. enqueue --count N: enqueue that number of jobs. drain, work, run and stamp: the same as in
`deliver`. The batch size and the driver (connection or pool) are arguments, for the search for the best settings.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode
from psycopg.conninfo import conninfo_to_dict

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import Meter, Tally, after, before, hold_lifeline, replace_method, say, wait_for_go

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LOAD_ROWS = 1000
_ASYNCPG_NAMES = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}


@asynccontextmanager
async def _driver(kind: str) -> AsyncIterator[AsyncpgDriver | AsyncpgPoolDriver]:
    found = conninfo_to_dict(os.environ["PGOUTBOX_DSN"])
    parameters = {theirs: found[ours] for ours, theirs in _ASYNCPG_NAMES.items() if ours in found}
    if kind == "pool":
        async with asyncpg.create_pool(**parameters, min_size=5, max_size=20) as pool:
            yield AsyncpgPoolDriver(pool)
    else:
        connection = await asyncpg.connect(**parameters)
        try:
            yield AsyncpgDriver(connection)
        finally:
            await connection.close()


async def _install() -> None:
    async with _driver("connection") as driver:
        queries = Queries(driver)
        await queries.install()
        await queries.optimize_autovacuum()
    say(installed=True)


async def _enqueue(count: int) -> None:
    async with _driver("connection") as driver:
        queries = Queries(driver)
        began_at = time.monotonic()
        for start in range(0, count, _LOAD_ROWS):
            numbers = range(start, min(start + _LOAD_ROWS, count))
            payloads: list[bytes | None] = [b'{"user_id": %d}' % number for number in numbers]
            await queries.enqueue([TOPIC] * len(numbers), payloads, [0] * len(numbers))
        say(seconds=time.monotonic() - began_at, count=count)


async def _work(mode: str, driver_kind: str, batch_size: int) -> None:
    meter = Meter()
    tally = Tally()
    if mode == "work":
        wait_for_go()
    started_at: list[tuple[int, float]] = []
    async with _driver(driver_kind) as driver:
        manager = PgQueuer(driver)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, manager.shutdown.set)
        if mode == "stamp":

            @manager.entrypoint(TOPIC)
            async def stamp(job: Job) -> None:
                started_at.append((int(job.payload or b"0"), time.monotonic()))
        elif mode == "work":

            @manager.entrypoint(TOPIC)
            async def count(job: Job) -> None:  # noqa: ARG001
                tally.count()
        else:

            @manager.entrypoint(TOPIC)
            async def noop(job: Job) -> None:  # noqa: ARG001
                meter.handled_count += 1

        if mode == "drain":
            replace_method(Queries, "dequeue", before, meter.begin)
            replace_method(Queries, "log_jobs", after, meter.end)
            await manager.run(batch_size=batch_size, mode=QueueExecutionMode.drain)
            meter.report()
        else:
            await manager.run(batch_size=batch_size)
            if mode == "work":
                tally.report()
                return
            say(started_at=started_at, handled_count=meter.handled_count)


def main() -> int:
    hold_lifeline()
    logging.getLogger("pgqueuer").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("install", "enqueue", "drain", "work", "run", "stamp"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--driver", choices=("connection", "pool"), default="connection")
    parser.add_argument("--batch-size", type=int, default=10)
    arguments = parser.parse_args()
    match arguments.mode:
        case "install":
            uvloop.run(_install())
        case "enqueue":
            uvloop.run(_enqueue(arguments.count))
        case mode:
            uvloop.run(_work(mode, arguments.driver, arguments.batch_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
