"""Bulk actions on many messages, each in a thread with its own connection.

A bulk action processes the messages that existed at its start, oldest first, and commits each batch. Its progress is in
the memory of this process; its changes are in the audit.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

import psycopg

from pgoutbox.dashboard.credentials import Viewer
from pgoutbox.dashboard.database import Database, RefusedError
from pgoutbox.errors import MessageNotFoundError, PgOutboxError, StateError
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.operations import MessageFilter, Operator
from pgoutbox.operations.acts import ActArguments, ActName

_telemetry: Final = Telemetry(logging.getLogger(__name__))


MAX_MESSAGES: Final = 1_000_000
_AT_ONCE: Final = 2
_REMEMBERED: Final = 20
_BATCH: Final = 500


@dataclass(slots=True)
class Bulk:
    """The progress of one bulk action. `results` counts the result of each message."""

    id: str
    action: ActName
    which: MessageFilter
    viewer: Viewer
    began_at: datetime
    changes: ActArguments
    status: Literal["running", "done", "stopped", "capped", "broken"] = "running"
    results: Counter[str] = field(default_factory=Counter)
    reached_id: int = 0
    through_id: int | None = None
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def is_running(self) -> bool:
        """Whether its thread is running."""
        return self.status == "running"


class Bulks:
    """The bulk actions of this process: at most two run, and the last twenty are kept."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bulks: dict[str, Bulk] = {}
        self._lock = threading.Lock()

    def start(self, action: ActName, which: MessageFilter, viewer: Viewer, changes: ActArguments) -> Bulk:
        """Start a bulk action; `StateError` if too many are running, or the action cannot change these states."""
        bulk = Bulk(secrets.token_hex(8), action, which.limited_to(action), viewer, datetime.now(UTC), changes)
        with self._lock:
            if sum(known.is_running for known in self._bulks.values()) >= _AT_ONCE:
                raise StateError(f"{_AT_ONCE} bulk actions are running; wait until one ends, or stop one")
            self._bulks[bulk.id] = bulk
            over = [known.id for known in self._bulks.values() if not known.is_running]
            for forgotten in over[: max(0, len(self._bulks) - _REMEMBERED)]:
                del self._bulks[forgotten]
        threading.Thread(target=self._run, args=(bulk,), name=f"pgoutbox bulk {bulk.id}", daemon=True).start()
        return bulk

    def find(self, bulk_id: str) -> Bulk:
        """Return the bulk action with this id. Raises `MessageNotFoundError` if this process does not have it."""
        with self._lock:
            if bulk_id not in self._bulks:
                raise MessageNotFoundError("this process has no such bulk action; see the audit for its changes")
            return self._bulks[bulk_id]

    def latest(self) -> list[Bulk]:
        """Return the bulk actions, newest first."""
        with self._lock:
            return list(self._bulks.values())[::-1]

    def stop(self) -> None:
        """Stop all bulk actions. Committed batches remain."""
        for bulk in self.latest():
            bulk.stop.set()

    def _run(self, bulk: Bulk) -> None:
        try:
            with self._database.connection() as connection:
                operator = Operator(connection, actor=bulk.viewer.name, origin=bulk.viewer.origin or None)
                bulk.status = self._work(operator, bulk)
        except (psycopg.Error, PgOutboxError) as error:
            # The driver's text can quote parameters.
            bulk.error = _error_text(error)
            bulk.status = "broken"
            _telemetry.report(
                logging.WARNING,
                LogEvent.WEB_BULK_BROKEN,
                "a bulk action of the dashboard failed",
                action=bulk.action,
                error=type(error).__name__,
            )

    def _work(self, operator: Operator, bulk: Bulk) -> Literal["done", "stopped", "capped"]:
        for batch in operator.bulk(bulk.action, bulk.which, batch_size=_BATCH, limit=MAX_MESSAGES, **bulk.changes):
            bulk.results.update(result.result for result in batch.results)
            bulk.reached_id, bulk.through_id = batch.reached_id, batch.through_id
            if bulk.stop.is_set():
                return "stopped"
        return "capped" if bulk.results.total() >= MAX_MESSAGES else "done"


def _error_text(error: Exception) -> str:
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return str(RefusedError("do this", "pgoutbox_operator"))
    return str(error) if isinstance(error, PgOutboxError) else "the database reported an error"
