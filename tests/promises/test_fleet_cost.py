"""Tests that idle workers cost little: transactions of the server for one message, counted at its socket."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.budget.relay import Relay, relay_to
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

_MESSAGES = 20
_QUIET_SECONDS = 0.1
_APPLICATION = """
    from pgoutbox import Outbox

    outbox = Outbox()

    @outbox.handler("single")
    async def single(message, context):
        pass
"""
_LISTENING = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox listen%'"


def transactions_of(relay: Relay, db: psycopg.Connection) -> float:
    """Return the transactions for each of some single messages; a notification is one in each session that listens."""
    before = Counter(relay.counts)
    for number in range(_MESSAGES):
        db.execute("SELECT pgoutbox.enqueue('single', '{}')")
        wait_until(lambda: is_sent(db), lambda number=number: f"message {number} is sent")  # type: ignore[misc]
        wait_until_quiet(relay)  # The next message meets workers that sleep, as in normal traffic.
    after = relay.counts - before
    return (after["transactions"] + after["notifications"]) / _MESSAGES


def wait_until_quiet(relay: Relay) -> None:
    """Wait until nothing has passed the relay for a while."""
    seen, since = Counter(relay.counts), time.monotonic()

    def is_quiet() -> bool:
        nonlocal seen, since
        if seen != relay.counts:
            seen, since = Counter(relay.counts), time.monotonic()
        return time.monotonic() - since > _QUIET_SECONDS

    wait_until(is_quiet, lambda: "the workers sleep")


def is_sent(db: psycopg.Connection) -> bool:
    return db.execute("SELECT NOT EXISTS (SELECT FROM pgoutbox.message_live)").fetchone() == (True,)


def test_eight_idle_workers_cost_at_most_twice_the_transactions_of_one(
    dsn: str, db: psycopg.Connection, tmp_path: Path, start_worker: StartWorker
) -> None:
    (host, port) = (str(conninfo_to_dict(dsn)[name]) for name in ("host", "port"))
    with relay_to(Path(host), tmp_path, port=int(port)) as relay:
        relayed = make_conninfo(dsn, host=str(tmp_path))
        costs = []
        for count in (1, 7):
            running = int(count == 7)
            for _ in range(count):
                start_worker(_APPLICATION, dsn=relayed, lease_seconds="60")
            wait_until(
                lambda all_of=running + count: db.execute(_LISTENING).fetchone() == (all_of,),  # type: ignore[misc]
                lambda: "all workers listen",
            )
            transactions_of(relay, db)  # The first messages find the workers at their start.
            costs.append(transactions_of(relay, db))
    assert costs[1] <= 2 * costs[0], costs
