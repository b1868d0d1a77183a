"""pgoutbox's bulk enqueue: --count N messages by one `enqueue_many` in one transaction, the COMMIT included."""

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
    parser.add_argument("--count", type=int, required=True)
    count = parser.parse_args().count
    outbox = Outbox(load_settings())
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        began_at = time.monotonic()
        outbox.on(connection).enqueue_many(NewMessage(TOPIC, {"user_id": number}) for number in range(count))
        connection.commit()
        say(seconds=time.monotonic() - began_at, count=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
