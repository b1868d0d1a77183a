"""Dramatiq on Redis.

enqueue --count N: `broker.enqueue`. work: run actors until SIGTERM. PGOUTBOX_DSN is the URL of Redis.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import Tally, hold_lifeline, say, wait_for_go


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("enqueue", "work"))
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    broker = RedisBroker(url=os.environ["PGOUTBOX_DSN"])
    dramatiq.set_broker(broker)
    tally = Tally()
    turn = threading.Lock()

    @dramatiq.actor(actor_name=TOPIC.replace(".", "_"), queue_name="default", broker=broker)
    def record(_user_id: int) -> None:
        with turn:
            tally.count()

    if arguments.mode == "enqueue":
        began_at = time.monotonic()
        for number in range(arguments.count):
            broker.enqueue(record.message(number))
        say(seconds=time.monotonic() - began_at, count=arguments.count)
        return 0
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    wait_for_go()
    worker = dramatiq.Worker(broker, worker_threads=arguments.threads)
    worker.start()
    stopping.wait()
    worker.stop()
    tally.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
