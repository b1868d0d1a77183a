"""Bulk actions: redrive or cancel many messages, each in a thread with its own connection.

A bulk action processes the messages that existed at its start, oldest first, and commits each batch. Its progress is in
the memory of this process; its changes are in the audit.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import psycopg

from pgoutbox.dashboard.database import RefusedError
from pgoutbox.dashboard.reads import GROUP_ROWS, Search, newest_id, search_ahead
from pgoutbox.dashboard.types import BulkAction
from pgoutbox.errors import PgOutboxError, StateError
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import messages
from pgoutbox.operations.audit import Actor, OperatorAction, as_actor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pgoutbox.dashboard.database import Database
    from pgoutbox.dashboard.types import Connection, Viewer

logger = logging.getLogger(__name__)


MAX_MESSAGES: Final = 1_000_000
_AT_ONCE: Final = 2
_REMEMBERED: Final = 20
_BATCH: Final = 500
_ROWS: Final = 20_000
_OWED: Final = frozenset({State.PENDING, State.SENDING})
_REDRIVABLE: Final = frozenset({State.FAILED, State.CANCELLED})


@dataclass(slots=True)
class Bulk:
    """The progress of one bulk action. `results` counts the result of each message."""

    id: str
    action: BulkAction
    what: Search
    viewer: Viewer
    began_at: datetime
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


def bulk_search(action: BulkAction, what: Search) -> Search:
    """Limit the search to the states that the action allows; `StateError` if the filter selects others."""
    allowed, usual = (_REDRIVABLE, {State.FAILED}) if action == "redrive" else (_OWED, _OWED)
    states = frozenset(what.which.states or usual)
    if not states <= allowed:
        raise StateError(
            f"only {' and '.join(sorted(allowed))} messages can be {_PARTICIPLES[action]}, "
            f"not {', '.join(sorted(states - allowed))}"
        )
    return replace(what, which=replace(what.which, states=tuple(sorted(states))))


_PARTICIPLES: Final = {"redrive": "redriven", "cancel": "cancelled"}


class Bulks:
    """The bulk actions of this process: at most two run, and the last twenty are kept."""

    def __init__(self, database: Database, *, most: int = MAX_MESSAGES) -> None:
        self._database = database
        self._most = most
        self._bulks: dict[str, Bulk] = {}
        self._lock = threading.Lock()

    def start(self, action: BulkAction, what: Search, viewer: Viewer) -> Bulk:
        """Start a bulk action; `StateError` if too many are running."""
        bulk = Bulk(secrets.token_hex(8), action, bulk_search(action, what), viewer, datetime.now(UTC))
        with self._lock:
            if sum(known.is_running for known in self._bulks.values()) >= _AT_ONCE:
                raise StateError(f"{_AT_ONCE} bulk actions are running; wait until one ends, or stop one")
            self._bulks[bulk.id] = bulk
            over = [known.id for known in self._bulks.values() if not known.is_running]
            for forgotten in over[: max(0, len(self._bulks) - _REMEMBERED)]:
                del self._bulks[forgotten]
        threading.Thread(target=self._run, args=(bulk,), name=f"pgoutbox bulk {bulk.id}", daemon=True).start()
        return bulk

    def find(self, bulk_id: str) -> Bulk | None:
        """Return the bulk action with this id, or None if this process does not have it."""
        with self._lock:
            return self._bulks.get(bulk_id)

    def latest(self) -> list[Bulk]:
        """Return the bulk actions, newest first."""
        with self._lock:
            return list(self._bulks.values())[::-1]

    def stop(self) -> None:
        """Stop all bulk actions. Committed batches remain."""
        for bulk in self.latest():
            bulk.stop.set()

    def _run(self, bulk: Bulk) -> None:
        actor = Actor(bulk.viewer.name, bulk.viewer.origin or None)
        try:
            with self._database.connection() as connection, as_actor(actor):
                bulk.status = self._work(connection, bulk)
        except (psycopg.Error, PgOutboxError) as error:
            # The driver's text can quote parameters.
            bulk.error = _error_text(error)
            bulk.status = "broken"
            logger.warning(
                "a bulk action of the dashboard failed",
                extra={"event": LogEvent.WEB_BULK_BROKEN, "action": bulk.action, "error": type(error).__name__},
            )

    def _work(self, connection: Connection, bulk: Bulk) -> Literal["done", "stopped", "capped"]:
        act = OperatorAction(**bulk.what.which.given(), error_group=bulk.what.group)
        bulk.through_id = newest_id(connection)
        left = self._most
        for found in _batches(connection, bulk):
            if bulk.stop.is_set():
                return "stopped"
            if left <= 0:
                return "capped"
            chosen = found[:left]
            left -= len(chosen)
            if chosen:
                bulk.results.update(_do(connection, bulk, chosen, act))
                bulk.reached_id = chosen[-1][0]
        return "done"


def _error_text(error: Exception) -> str:
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return str(RefusedError("do this", "pgoutbox_operator"))
    return str(error) if isinstance(error, PgOutboxError) else "the database reported an error"


def _batches(connection: Connection, bulk: Bulk) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield batches of matching ids with their attempt counts.

    Yields an empty batch after rows without a match, so that the bulk action can be stopped.
    """
    rows = _ROWS if bulk.what.group is None else GROUP_ROWS
    after_id: int | None = 0
    while after_id is not None:
        found, last_id = search_ahead(
            connection, bulk.what, after_id=after_id, through_id=bulk.through_id or 0, rows=rows
        )
        remaining = iter(found)
        while batch := list(islice(remaining, _BATCH)):
            yield batch
        bulk.reached_id = last_id or bulk.reached_id
        after_id = last_id
        if not found:
            yield []


def _do(connection: Connection, bulk: Bulk, chosen: Sequence[tuple[int, int]], act: OperatorAction) -> Iterator[str]:
    states = bulk.what.which.states
    ids, attempt_counts = [message_id for message_id, _ in chosen], [count for _, count in chosen]
    if bulk.action == "cancel":
        yield from (met.result for met in messages.cancel_each(connection, ids, states=states, act=act))
        return
    for answer in messages.redrive(connection, ids, states=states, attempt_counts=attempt_counts, act=act):
        yield answer.result
