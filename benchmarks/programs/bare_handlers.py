"""The limits of two kinds of handlers, without an outbox: a pool of threads, and transactions on some connections.

`threads N`: as many calls as the table `job` has rows, in a pool of N threads. `transactions N`: N connections share
the rows of `job`; each transaction updates one row, writes one row of `effect` and commits, in one round trip.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg

from benchmarks.programs.lifeline import Tally, hold_lifeline, wait_for_go

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_END = "UPDATE job SET done = true WHERE id = %s"
_END_ALL = "UPDATE job SET done = true WHERE NOT done"
_WRITE = "INSERT INTO effect (number) VALUES (%s)"


def _in_threads(ids: Sequence[int], count: int, dsn: str) -> Tally:
    tally, lock = Tally(), threading.Lock()

    def handle(_: int) -> None:
        with lock:
            tally.count()

    with ThreadPoolExecutor(count) as threads:
        for future in [threads.submit(handle, number) for number in ids]:
            future.result()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_END_ALL)
    return tally


async def _in_transactions(ids: Sequence[int], count: int, dsn: str) -> Tally:
    tally, rest = Tally(), iter(ids)

    async def work(rest: Iterator[int]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            for number in rest:
                tally.count()
                async with connection.pipeline(), connection.transaction():
                    await connection.execute(_END, [number])
                    await connection.execute(_WRITE, [number])

    await asyncio.gather(*(work(rest) for _ in range(count)))
    return tally


def main(mode: str, count: int) -> int:
    """Handle all rows of `job`, and wait for the signal to end."""
    hold_lifeline()
    dsn = os.environ["PGOUTBOX_DSN"]
    with psycopg.connect(dsn) as connection:
        ids = [number for (number,) in connection.execute("SELECT id FROM job ORDER BY id").fetchall()]
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    wait_for_go()
    tally = _in_threads(ids, count, dsn) if mode == "threads" else asyncio.run(_in_transactions(ids, count, dsn))
    told.wait()
    tally.report()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
