"""Messages that no running worker serves are reported: once an hour, by workers that know their queue."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import TYPE_CHECKING

from tests.support.outbox_actions import enqueue
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker

# As if the machine had been suspended: signals put the clocks of the process forward.
APPLICATION = """
    import signal
    import time

    from pgoutbox import Outbox, Topic

    passed_seconds = 0
    monotonic, clock_gettime = time.monotonic, time.clock_gettime


    def put_forward(seconds):
        global passed_seconds
        passed_seconds += seconds


    time.monotonic = lambda: monotonic() + passed_seconds
    time.clock_gettime = lambda clock: clock_gettime(clock) + passed_seconds
    signal.signal(signal.SIGUSR1, lambda *_: put_forward(70))
    signal.signal(signal.SIGUSR2, lambda *_: put_forward(3600))

    outbox = Outbox()
    outbox.define(Topic("bill", queue="bulk"))


    @outbox.handler("bill")
    async def bill(message, ctx):
        pass
"""


def test_messages_of_dead_workers_are_reported_once_an_hour_and_again_after_a_repair(
    db: psycopg.Connection, connect: Connect, start_worker: StartWorker
) -> None:
    dead, locked = (start_worker(APPLICATION, "--queue", "bulk", worker_name=name) for name in ("dead", "locked"))
    names = "SELECT array_agg(split_part(name, ':', 1) ORDER BY name) FROM pgoutbox.worker"
    wait_until(lambda: db.execute(names).fetchone() == (["dead", "locked"],), lambda: dead.log + locked.log)
    dead.end()
    locked.end()
    worker = start_worker(APPLICATION, "--queue", "default", worker_name="watching", listen="false")
    seen = "SELECT seen_at FROM pgoutbox.worker WHERE name LIKE 'watching:%'"
    wait_until(lambda: db.execute(seen).fetchone() and "worker_started" in worker.events(), lambda: worker.log)

    def enqueue_late() -> None:
        enqueue(db, "bill", queue="bulk")
        db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '2 minutes'")

    def report_after(jump: signal.Signals) -> None:
        before, polls = db.execute(seen).fetchone(), count()
        os.kill(worker.pid, jump)

        def has_reported() -> bool:
            if next(polls) % 50 == 49:  # The jump came before the worker waited for its next report.
                os.kill(worker.pid, signal.SIGUSR1)
            return db.execute(seen).fetchone() != before

        wait_until(has_reported, lambda: worker.log)

    def warnings_after(jump: signal.Signals) -> list[tuple[object, object]]:
        """Return all warnings so far, after the next two reports: a report is logged after its commit."""
        report_after(jump)
        report_after(signal.SIGUSR1)
        return [(record["queue"], record["message"]) for record in worker.records("messages_unclaimed")]

    enqueue_late()
    assert warnings_after(signal.SIGUSR1) == []  # The others seem to run.
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '14 days' WHERE name NOT LIKE 'watching:%'")
    other = connect()
    other.execute("SELECT FROM pgoutbox.worker WHERE name LIKE 'locked:%' FOR UPDATE")
    warning = ("bulk", "no worker serves the queue of due messages")
    assert warnings_after(signal.SIGUSR1) == [warning]
    assert db.execute(names).fetchone() == (["locked", "watching"],)
    assert warnings_after(signal.SIGUSR2) == [warning] * 2
    other.rollback()
    db.execute("DELETE FROM pgoutbox.message")
    assert warnings_after(signal.SIGUSR1) == [warning] * 2
    enqueue_late()  # A new cause within the hour.
    assert warnings_after(signal.SIGUSR1) == [warning] * 3
