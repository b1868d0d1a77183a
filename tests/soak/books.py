"""The records of a run: those that the database writes from the beginning, and the wait until everything is
delivered."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import psycopg
from rich.console import Console

from pgoutbox.operations import MessageFilter, Operator, Rate
from tests.soak.app import ACCOUNTS
from tests.soak.crew import Process
from tests.soak.liveness import install_liveness
from tests.soak.runs import install_refusals
from tests.soak.witness import install_witness
from tests.support.judge import install_judge
from tests.support.ledger import Ledger, install_audit, owed_count

_OWED: Final = """
SELECT id, topic, queue, state, attempt_count, worker, lease_expires_at - now(), available_at - now(), coalesce_key,
    ordering_key
FROM pgoutbox.message_view
WHERE state IN ('pending', 'sending')
ORDER BY id
LIMIT 5
"""
_HOOKS_OWED: Final = "SELECT count(*) FROM pgoutbox.message_live WHERE topic LIKE '%.failed' AND state <> 'failed'"
DRAIN_SECONDS: Final = 600.0
REDRIVE_SECONDS: Final = 2.0
# Sent messages of these topics are not kept.
FORGOTTEN_TOPICS: Final = ("soak.forgotten", "soak.fanout")

console = Console(soft_wrap=True)


def open_books(connection: psycopg.Connection, chance: random.Random) -> None:
    """Make the database write its account from now on. Call it before the first enqueue, on an autocommit
    connection."""
    install_audit(connection)
    install_judge(connection)
    install_witness(connection)
    install_refusals(connection)
    install_liveness(connection)
    connection.execute("CREATE TABLE soak_effect (message_id bigint NOT NULL, attempt_count integer NOT NULL)")
    connection.execute("CREATE TABLE soak_account (id integer PRIMARY KEY, change_count bigint NOT NULL DEFAULT 0)")
    connection.execute("INSERT INTO soak_account (id) SELECT * FROM generate_series(0, %s)", [ACCOUNTS - 1])
    for topic in FORGOTTEN_TOPICS:
        Operator(connection).set_retention(topic, "sent", timedelta())
    limit(connection, chance)


def limit(connection: psycopg.Connection, chance: random.Random) -> None:
    """Change the limits of the limited queues; they stay high enough for the producers' messages."""
    Operator(connection).limit_rate("rated", Rate(chance.choice([80, 160]), 4), burst=chance.choice([1, 50, 80]))
    Operator(connection).limit_in_flight("crowded", chance.choice([2, 3, 6]))


def drain(connection: psycopg.Connection, ledger: Ledger, workers: Sequence[Process]) -> float | None:
    """Keep the workers alive until no message is owed. Return the seconds, or None if that never happened.

    Messages behind a message that halts their key are owed too, and so is that message: an operator redrives it.
    """
    began_at = reported_at = redriven_at = time.monotonic()
    while (now := time.monotonic()) < began_at + DRAIN_SECONDS:
        for process in workers:
            process.keep_alive()
        owed = owed_count(connection) + connection.execute(_HOOKS_OWED).fetchall()[0][0]
        if owed == 0 or now > redriven_at + REDRIVE_SECONDS:
            redriven_at = now
            try:
                done = Operator(connection).act_on_all("redrive", MessageFilter(topic="soak.halted"))
            except psycopg.errors.ProgramLimitExceeded:
                ledger.write("refused", "a redrive")
                continue
            if owed == done["redriven"] == done["locked"] == 0:
                return now - began_at
        if now > reported_at + 10:
            reported_at = now
            console.print(f"{now - began_at:6.0f} s  {owed:5} messages owed")
        time.sleep(0.1)
    for row in connection.execute(_OWED):
        console.print(f"owed: {row}")
    return None
