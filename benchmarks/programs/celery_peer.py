"""Celery on Redis, configured so that no message is lost: tasks are acknowledged after they have run.

enqueue --count N: `apply_async` with one producer. work: run tasks until SIGTERM. PGOUTBOX_DSN is the URL of Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

from celery import Celery

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import Tally, hold_lifeline, say, wait_for_go


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("enqueue", "work"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=4)
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

    @app.task(name=TOPIC)
    def record(_user_id: int) -> None:
        tally.count()

    if arguments.mode == "enqueue":
        began_at = time.monotonic()
        with app.producer_or_acquire() as producer:
            for number in range(arguments.count):
                record.apply_async((number,), producer=producer)
        say(seconds=time.monotonic() - began_at, count=arguments.count)
        return 0
    wait_for_go()
    worker = app.Worker(
        pool="solo", loglevel="ERROR", quiet=True, without_gossip=True, without_mingle=True, without_heartbeat=True
    )
    with contextlib.suppress(SystemExit):  # Celery ends like this after SIGTERM.
        worker.start()
    tally.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
