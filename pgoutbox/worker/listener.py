"""The doorbell of a worker, with its connection and its log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import psycopg

from pgoutbox.database.worker_connection import (
    Lender,
    WorkerConnection,
    connect,
    is_unreachable,
    keeps_session,
    prepare_session,
)
from pgoutbox.kernel.doorbell import Connection, Doorbell, Surroundings
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.run_state import RunState

_REPORTS: Final = {
    "lost": (logging.WARNING, LogEvent.LISTENER_LOST, "listener lost, polling periodically"),
    "back": (logging.INFO, LogEvent.LISTENER_BACK, "listener back"),
    "filling": (
        logging.WARNING,
        LogEvent.NOTIFY_QUEUE_FILLING,
        "the server's notification queue is filling up: a session that listens stays in a transaction",
    ),
    "drained": (logging.INFO, LogEvent.NOTIFY_QUEUE_DRAINED, "the notification queue has drained"),
}


def new_doorbell(state: RunState) -> Doorbell:
    """Return a doorbell for the queues of this run."""

    def want(queue: str | None) -> None:
        if queue is None:
            state.kernel.sweep()
        else:
            state.kernel.want(queue)

    listener = _Listener(state)
    around = Surroundings(
        connect=listener.connect,
        may_pass=listener.may_pass,
        want=want,
        wake=state.note_progress,
        report=listener.report,
        heartbeat_seconds=state.settings.listener_heartbeat_seconds,
    )
    doorbell = Doorbell(state.queues.names, state.topics, around)
    if state.is_one_of_many:
        listener.lends_to(state.store.claims, doorbell)
    return doorbell


class _Listener:
    """What the doorbell of the kernel needs: its connection, and the log."""

    def __init__(self, state: RunState) -> None:
        self._in_flight = state.in_flight
        self._settings = state.settings
        self._telemetry = state.telemetry
        self._dsn = state.settings.require_listen_dsn()
        self._is_pooled = False
        self._purpose = "listen"
        self._lend: Callable[[bool], None] = lambda _: None
        self._borrower: WorkerConnection | None = None

    def lends_to(self, borrower: WorkerConnection, lender: Lender) -> None:
        """Let another connection of the worker be this one, while it leads to the server directly."""

        def lend(is_direct: bool) -> None:  # noqa: FBT001
            borrower.lender = lender if is_direct else None

        self._purpose, self._lend, self._borrower = borrower.purpose, lend, borrower

    async def connect(self) -> Connection | None:
        """Open a connection that keeps its session, and breaks if the server does not answer in time.

        Otherwise locks would stay in the pool, with nobody listening.
        """
        if self._borrower is not None:
            await self._borrower.rest(0.0)  # The server may have room for one of them.
        connection, is_direct = await connect(self._dsn, self._settings, purpose=self._purpose)
        self._lend(is_direct)
        if is_direct:
            await prepare_session(connection, self._settings)
            connection.answer_seconds = self._settings.listener_heartbeat_timeout_seconds
            return connection
        try:
            has_session = await keeps_session(connection, self._dsn, self._settings)
        except BaseException:
            await connection.close()
            raise
        if not self._is_pooled:
            self._is_pooled = True
            self._telemetry.report(
                logging.WARNING,
                LogEvent.LISTENER_POOLED,
                "a pooler is between the listener and PostgreSQL: set a direct connection in PGOUTBOX_LISTEN_DSN "
                "or set PGOUTBOX_LISTEN=false",
                polls=not has_session,
            )
        if has_session:
            connection.answer_seconds = self._settings.listener_heartbeat_timeout_seconds
            return connection
        await connection.close()
        return None

    async def may_pass(self, error: psycopg.Error | OSError) -> bool:
        """Whether a later attempt to connect may succeed."""
        return await is_unreachable(error, self._dsn, self._settings)

    def report(self, name: str, **facts: object) -> None:
        """Log an event of the doorbell."""
        if name == "lost":
            self._in_flight.note_lost_connection()
        self._telemetry.report(*_REPORTS[name], **facts)
