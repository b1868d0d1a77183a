"""A worker that cannot renew its leases does not keep its messages."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.support.outbox_actions import attempts_of, enqueue, row_of
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

DYING_THREAD = """
    import asyncio
    import ctypes
    import threading

    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        if message.attempt_count > 1:
            return
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        await asyncio.Event().wait()
"""


def test_a_worker_whose_lease_thread_dies_ends_with_a_reason_and_another_one_delivers(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    message_id = enqueue(db)
    dying = start_worker(DYING_THREAD, shutdown_grace_seconds="0")
    assert dying.wait() == 1
    assert "leases are no longer renewed, and the worker has stopped: SystemExit" in dying.log
    assert start_worker(DYING_THREAD, "--drain").wait() == 0
    assert row_of(db, message_id).state == "sent"
    assert [outcome for _, outcome, _ in attempts_of(db, message_id)] == ["released"]


WITHOUT_FILES = """
    import asyncio
    import os
    import resource
    import signal

    from pgoutbox import Outbox

    outbox = Outbox()


    def allow(more_files):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + more_files, most))


    if "MORE_FILES" in os.environ:
        allow(int(os.environ["MORE_FILES"]))


    @outbox.handler("greet")
    async def greet(message, ctx):
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
        allow(0)
        await told.wait()
"""


def test_a_worker_that_can_open_no_file_renews_its_leases(db: psycopg.Connection, start_worker: StartWorker) -> None:
    message_id = enqueue(db)
    worker = start_worker(WITHOUT_FILES, lease_seconds="1")
    renewed = "SELECT lease_expires_at > claimed_at + interval '2 s' FROM pgoutbox.in_flight_view"
    wait_until(lambda: db.execute(renewed).fetchone() == (True,), lambda: worker.log)
    assert start_worker(WITHOUT_FILES, "--once").wait() == 0
    os.kill(worker.pid, signal.SIGUSR1)
    wait_until(lambda: row_of(db, message_id).state == "sent", lambda: worker.log)
    assert row_of(db, message_id).attempt_count == 1


def test_a_worker_with_too_few_files_to_renew_leases_ends_with_a_reason(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    message_id = enqueue(db)
    # Enough for an event loop and a connection, but not for the event loop of the lease thread.
    worker = start_worker(WITHOUT_FILES, environment={"MORE_FILES": "5"})
    assert worker.wait() == 1
    assert "error: leases are no longer renewed, and the worker has stopped: OSError" in worker.log
    assert row_of(db, message_id).state == "pending"
