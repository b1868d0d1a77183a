"""A producer of many messages per second: transactions of --size messages by `enqueue_many`, for a number of seconds.

With --rate it sends that many messages a second, evenly spaced; otherwise as many as possible. For each transaction it
reports the number of its first message, when its COMMIT was sent and when it was answered.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import psycopg

from benchmarks.options import TOPIC
from benchmarks.programs.lifeline import hold_lifeline, say
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings
from pgoutbox.topics import NewMessage


def main() -> int:
    hold_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rate", type=float)
    arguments = parser.parse_args()
    pause = arguments.size / arguments.rate if arguments.rate else 0.0
    outbox = Outbox(load_settings())
    produced = []
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        connection.prepare_threshold = 0
        number = 0
        began_at = time.monotonic()
        due_at = began_at
        while due_at < began_at + arguments.seconds and time.monotonic() < began_at + arguments.seconds:
            time.sleep(max(0.0, due_at - time.monotonic()))
            numbers = range(number, number + arguments.size)
            outbox.on(connection).enqueue_many([NewMessage(TOPIC, {"user_id": n}) for n in numbers])
            sent_at = time.monotonic()
            connection.commit()
            produced.append((number, sent_at, time.monotonic()))
            number += arguments.size
            due_at += pause
    say(produced=produced)
    return 0


if __name__ == "__main__":
    sys.exit(main())
