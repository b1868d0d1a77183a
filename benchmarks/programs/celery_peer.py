"""Celery on Redis, configured so that no message is lost: tasks are acknowledged after they have run.

enqueue --count N: `apply_async` with one producer. work: run tasks until SIGTERM. PGOUTBOX_DSN is the URL of Redis.
--client NAME SLOTS: each task waits for this client of `clients`, in a pool of 50 threads with one event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time

from celery import Celery

from benchmarks.options import TOPIC
from benchmarks.programs.clients import CLIENTS, Send
from benchmarks.programs.lifeline import Tally, hold_lifeline, say, wait_for_go

_THREADS = 50


def _client(loop: asyncio.AbstractEventLoop, name: str, slots: str) -> Send:
    """Return a client in an event loop, which begins to run in a thread."""
    threading.Thread(target=loop.run_forever, name="client", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_open(name, int(slots)), loop).result()


async def _open(name: str, slots: int) -> Send:
    return await CLIENTS[name](contextlib.AsyncExitStack(), slots)  # The process ends with its connections.


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("enqueue", "work"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--client", nargs=2)
    arguments = parser.parse_args()
    # Celery's shutdown messages go to standard error, and only our answers to standard output.
    sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), 1)
    tally = Tally()
    app = Celery("benchmark", broker=os.environ["PGOUTBOX_DSN"])
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=arguments.prefetch,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
    )

    loop = asyncio.new_event_loop()
    send = _client(loop, *arguments.client) if arguments.client else None

    async def deliver(send: Send, user_id: int) -> None:
        tally.count()
        await send(user_id)

    @app.task(name=TOPIC)
    def record(user_id: int) -> None:
        if send is None:
            tally.count()
        else:
            asyncio.run_coroutine_threadsafe(deliver(send, user_id), loop).result()

    if arguments.mode == "enqueue":
        began_at = time.monotonic()
        with app.producer_or_acquire() as producer:
            for number in range(arguments.count):
                record.apply_async((number,), producer=producer)
        say(seconds=time.monotonic() - began_at, count=arguments.count)
        return 0
    wait_for_go()
    worker = app.Worker(
        pool="solo" if send is None else "threads",
        concurrency=None if send is None else _THREADS,
        loglevel="ERROR",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    with contextlib.suppress(SystemExit):  # Celery ends like this after SIGTERM.
        worker.start()
    tally.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
