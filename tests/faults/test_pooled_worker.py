"""Tests a suspended worker behind a pooler: its transaction ends without it, so only its lease blocks the others."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.database import operator_connection
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.handlers import Context
from pgoutbox.kernel import statements
from pgoutbox.message import Message, State
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from tests.support.fleet import fleet_on
from tests.support.outbox_actions import enqueue, lapse, row_of, running, settings_for, state_of
from tests.support.proxy import Proxy
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.worker_process import WorkerProcess


class Freezer:
    """Suspends a process when the proxy has all of its first claim, before that reaches the server."""

    def __init__(self, proxy: Proxy) -> None:
        self.frozen = threading.Event()
        self.worker: WorkerProcess | None = None
        self._claim = " ".join(statements.CLAIM_WITHOUT_KEYS.partition("%")[0].split())
        self._last = " ".join(statements.NEXT_DUE.partition("(")[0].split())
        self._is_claiming = False
        proxy.on_statement = self._look

    def _look(self, application: str, text: str) -> None:
        self._is_claiming |= text.startswith(self._claim)
        if self.worker and self._is_claiming and text.startswith(self._last) and not self.frozen.is_set():
            self.worker.send_signal(signal.SIGSTOP)
            self.worker.until_suspended()
            self.frozen.set()


@pytest.mark.parametrize("is_limited", [False, True], ids=["unlimited", "limited"])
async def test_a_pooled_worker_suspended_after_its_claim_leaves_no_locks(
    dsn: str, db: psycopg.Connection, proxy: Proxy, tmp_path: Path, is_limited: bool
) -> None:
    delivered: list[tuple[int, int]] = []
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("fault.deliver")
    async def deliver(message: Message, ctx: Context) -> None:
        delivered.append((message.id, message.attempt_count))

    if is_limited:
        with operator_connection.connect(settings_for(dsn)) as connection:
            Operator(connection).limit_in_flight("default", 100)
    message_id = enqueue(db, "fault.deliver")
    freezer = Freezer(proxy)
    with fleet_on(proxy.dsn, tmp_path) as fleet:
        freezer.worker = fleet.start(listen="false", lease_seconds="3600")
        fleet.until(freezer.frozen.is_set, "the worker is suspended")
        # Its claim takes effect while it is suspended.
        fleet.until(lambda: state_of(db, message_id) == State.SENDING, "the claim is committed")
        late_id = enqueue(db, "fault.deliver")
        lapse(db, message_id)
        await Worker(outbox).run_once()
    assert sorted(delivered) == [(message_id, 2), (late_id, 1)]
    assert row_of(db, message_id).state == State.SENT


async def test_a_trip_whose_end_never_arrives_keeps_its_locks_for_a_short_time(
    dsn: str, db: psycopg.Connection
) -> None:
    """A process that freezes in the midst of sending a trip has sent a part of it."""
    if db.info.server_version < 170_000:
        pytest.skip("needs transaction_timeout, which PostgreSQL has since version 17")
    limits = {"statement_timeout_seconds": 1, "connect_timeout_seconds": 1, "poll_interval_seconds": 1}
    settings = settings_for(dsn, **limits)
    delivered: list[int] = []
    outbox = Outbox(settings)

    @outbox.handler("fault.deliver")
    async def deliver(message: Message, ctx: Context) -> None:
        delivered.append(message.attempt_count)

    message_id = enqueue(db, "fault.deliver")
    frozen = WorkerConnection(dsn, settings, purpose="claim")
    await frozen.open()
    assert frozen._connection is not None
    pgconn = frozen._connection.pgconn
    pgconn.enter_pipeline_mode()
    pgconn.send_query_params(b"SELECT FROM pgoutbox.message_live FOR UPDATE", None)
    pgconn.flush()
    free = "SELECT id FROM pgoutbox.message_live FOR UPDATE SKIP LOCKED"
    await until(lambda: db.execute(free).fetchall() == [])
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, message_id) == State.SENT)
    assert delivered == [1]
    await frozen.close()


async def test_an_open_transaction_behind_a_pooler_ends_by_itself(dsn: str) -> None:
    link = WorkerConnection(dsn, settings_for(dsn, listen=False), purpose="claim")
    asked = "SELECT current_setting('idle_in_transaction_session_timeout'), %(percent)s::text || '%%'"
    assert await link.fetch(asked, {"percent": "100"}) == [("10s", "100%")]
    assert await link.fetch("SELECT current_setting('idle_in_transaction_session_timeout')", {}) == [("10s",)]
    await link.close()


def test_the_pooler_of_the_tests_answers_however_much_it_logs(pooled_dsn: str) -> None:
    """A full pipe has room for 64 kB."""
    with psycopg.connect(pooled_dsn) as connection:
        for _ in range(1_000):
            with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
                psycopg.connect(pooled_dsn, options="-c jit=off", connect_timeout=5)
        assert connection.execute("SELECT 1").fetchone() == (1,)
