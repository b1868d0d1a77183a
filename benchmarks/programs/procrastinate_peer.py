"""procrastinate: psycopg with a pool, LISTEN/NOTIFY, finished jobs kept, as pgoutbox keeps finished messages.

install: create its tables. enqueue --count N: `batch_defer_async` in pieces. work and stamp: handle jobs until SIGTERM.
--client NAME SLOTS: each job uses this client of `clients`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import AsyncExitStack

import procrastinate

from benchmarks.options import TOPIC
from benchmarks.programs.clients import CLIENTS, Send
from benchmarks.programs.lifeline import Tally, hold_lifeline, say, wait_for_go

_PIECE = 1000


async def _run(arguments: argparse.Namespace) -> None:
    tally = Tally()
    started_at: list[tuple[int, float]] = []
    send: Send | None = None
    connector = procrastinate.PsycopgConnector(
        conninfo=os.environ["PGOUTBOX_DSN"], min_size=4, max_size=max(4, arguments.pool)
    )
    app = procrastinate.App(connector=connector)

    async def record(user_id: int) -> None:
        if send is not None:
            tally.count()
            await send(user_id)
        elif arguments.mode == "stamp":
            started_at.append((user_id, time.monotonic()))
        else:
            tally.count()

    handle = app.task(name=TOPIC, queue="default")(record)
    if arguments.mode == "work":
        wait_for_go()
    async with app.open_async(), AsyncExitStack() as stack:
        if arguments.client:
            send = await CLIENTS[arguments.client[0]](stack, int(arguments.client[1]))
        match arguments.mode:
            case "install":
                await app.schema_manager.apply_schema_async()
                say(installed=True)
            case "enqueue":
                began_at = time.monotonic()
                for start in range(0, arguments.count, _PIECE):
                    numbers = range(start, min(start + _PIECE, arguments.count))
                    await handle.batch_defer_async(*({"user_id": number} for number in numbers))
                say(seconds=time.monotonic() - began_at, count=arguments.count)
            case _:
                await app.run_worker_async(queues=["default"], concurrency=arguments.concurrency, listen_notify=True)
                if arguments.mode == "stamp":
                    say(started_at=started_at)
                else:
                    tally.report()


def main() -> int:
    hold_lifeline()
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("install", "enqueue", "work", "stamp"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--pool", type=int, default=4)
    parser.add_argument("--client", nargs=2)
    asyncio.run(_run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
