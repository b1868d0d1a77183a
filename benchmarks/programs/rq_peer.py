"""RQ on Redis, with the worker that runs jobs in its own process. The worker that forks for each job is far slower.

enqueue --count N: `enqueue_many` in pieces. work: run jobs until SIGTERM. PGOUTBOX_DSN is the URL of Redis.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from redis import Redis
from rq import Queue, SimpleWorker

from benchmarks.programs.lifeline import hold_lifeline, say, wait_for_go
from benchmarks.programs.rq_job import record, tally

_PIECE = 1000


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("enqueue", "work"))
    parser.add_argument("--count", type=int, default=0)
    arguments = parser.parse_args()
    queue = Queue("default", connection=Redis.from_url(os.environ["PGOUTBOX_DSN"]))
    if arguments.mode == "enqueue":
        began_at = time.monotonic()
        for start in range(0, arguments.count, _PIECE):
            numbers = range(start, min(start + _PIECE, arguments.count))
            queue.enqueue_many([Queue.prepare_data(record, (number,), result_ttl=0) for number in numbers])
        say(seconds=time.monotonic() - began_at, count=arguments.count)
        return 0
    wait_for_go()
    logging.disable(logging.WARNING)
    SimpleWorker([queue], connection=queue.connection).work()
    tally.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
