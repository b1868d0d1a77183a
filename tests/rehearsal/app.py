"""The handlers of the rehearsal. They run in both releases. Run as a program, it is a producer."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from importlib.metadata import version
from typing import Any

import psycopg

from pgoutbox import Message, Outbox

outbox = Outbox()


def note(**entry: object) -> None:
    """Append a record to the ledger: each is one write."""
    with open(os.environ["REHEARSAL_LEDGER"], "a", buffering=1) as ledger:  # noqa: PTH123
        what = entry.pop("what")
        ledger.write(json.dumps({"what": what, "by": version("pgoutbox"), **entry, "at": time.time()}) + "\n")


@outbox.handler("rehearse")
async def rehearse(message: Message[dict[str, Any]], ctx: object) -> None:
    """Note the hand-over. A message of the later release has what the new option gave it."""
    expected = message.payload["campaign"]
    if hasattr(message, "campaign") and message.campaign != expected:
        note(what="wrong", number=message.payload["number"], campaign=message.campaign)
    number = message.payload["number"]
    note(what="handed over", number=number, attempt=message.attempt_count, id=message.id, key=message.ordering_key)


def produce(dsn: str, seed: int, per_second: float, is_later: bool) -> None:
    """Enqueue in short transactions until the process is told to stop. One of twenty rolls back.

    A delayed transaction does not delay the time of the next one: after an outage the backlog is made up for.
    """
    chance = random.Random(seed)
    number = random.SystemRandom().randrange(1 << 32) << 20  # A process that is started again has other numbers.
    next_at = time.monotonic()
    while True:
        try:
            with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
                while True:
                    number += 1
                    write(connection, number, chance, is_later)
                    next_at += chance.expovariate(per_second)
                    time.sleep(max(0.0, next_at - time.monotonic()))
        # The driver raises the second one when both PostgreSQL and PgBouncer have said that the session has ended.
        except (psycopg.OperationalError, psycopg.InternalError) as error:
            note(what="disconnected", error=str(error))
            time.sleep(0.1)


def write(connection: psycopg.Connection, number: int, chance: random.Random, is_later: bool) -> None:
    """Run one business transaction, and note its outcome."""
    options: dict[str, Any] = chance.choice(
        [{}, {}, {"ordering_key": f"k{number % 7}"}, {"dedupe_key": f"d{number}"}, {"owner": "ada"}]
    )
    campaign = "spring" if is_later and chance.random() < 0.5 else None
    if campaign is not None:
        options["campaign"] = campaign
    rolls_back = chance.random() < 0.05
    began_at = time.time()
    with connection.transaction(force_rollback=rolls_back):
        outbox.on(connection).enqueue("rehearse", {"number": number, "campaign": campaign}, **options)
    note(what="rolled back" if rolls_back else "acknowledged", number=number, seconds=time.time() - began_at)


if __name__ == "__main__":
    produce(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "later")
