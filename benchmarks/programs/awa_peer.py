"""awa: a job queue with an engine in Rust that calls handlers in Python, with its queue storage.

install: create its tables and activate the queue storage. enqueue --count N: `enqueue_many_copy` in pieces. work and
stamp: handle jobs until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from urllib.parse import quote

import awa
from psycopg.conninfo import conninfo_to_dict

from benchmarks.programs.lifeline import Tally, hold_lifeline, say, wait_for_go

QUEUE = "mail"
_PIECE = 10_000


@dataclass
class Activation:
    """The arguments of a job; awa derives the job's kind from the name."""

    user_id: int


def _url() -> str:
    """Return the DSN as a URL, the only form that the driver accepts, with a socket's directory as a parameter."""
    found = conninfo_to_dict(os.environ["PGOUTBOX_DSN"])
    user, password, host = (quote(str(found.get(name) or ""), safe="") for name in ("user", "password", "host"))
    return f"postgresql://{user}:{password}@localhost:{found.get('port', 5432)}/{found['dbname']}?host={host}"


async def _run(arguments: argparse.Namespace) -> None:
    tally = Tally()
    started_at: list[tuple[int, float]] = []
    client = awa.AsyncClient(_url(), max_connections=20)
    match arguments.mode:
        case "install":
            await client.migrate()
            await client.install_queue_storage(schema="awa")
            say(installed=True)
        case "enqueue":
            began_at = time.monotonic()
            for start in range(0, arguments.count, _PIECE):
                jobs = [Activation(number) for number in range(start, min(start + _PIECE, arguments.count))]
                await client.enqueue_many_copy(jobs, queue=QUEUE, queue_storage_queue_stripe_count=arguments.stripes)
            say(seconds=time.monotonic() - began_at, count=arguments.count)
        case _:

            async def handle(job: awa.Job[Activation]) -> None:
                if arguments.mode == "stamp":
                    started_at.append((job.args.user_id, time.monotonic()))
                else:
                    tally.count()

            client.task(Activation, queue=QUEUE)(handle)
            if arguments.mode == "work":
                wait_for_go()
            stopped = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
            await client.start(
                [{"name": QUEUE, "max_workers": arguments.workers}], queue_storage_queue_stripe_count=arguments.stripes
            )
            await stopped.wait()
            await client.shutdown()
            if arguments.mode == "stamp":
                say(started_at=started_at)
            else:
                tally.report()
    await client.close()


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("install", "enqueue", "work", "stamp"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--stripes", type=int, default=1)
    asyncio.run(_run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
