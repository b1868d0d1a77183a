"""Redrive and cancel of many messages: each a thread with a connection of its own, which the pages look in on.

A bulk goes through the messages that there were when it began, from the oldest on, in batches that are committed one by
one. What is known of it is in the memory of this process; what it did is in the audit.
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
from pgoutbox.observability.events import Event
from pgoutbox.operations import messages
from pgoutbox.operations.audit import Act, Actor, acting_as

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
    """One bulk, as its page shows it. `results` counts what its messages met."""

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
        """Whether its thread is at work."""
        return self.status == "running"


def bulk_search(action: BulkAction, what: Search) -> Search:
    """The same search among the states that the action is for; `StateError` if the filter wants others."""
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
    """The bulks of this process: two at once, the last twenty remembered."""

    def __init__(self, database: Database, *, most: int = MAX_MESSAGES) -> None:
        self._database = database
        self._most = most
        self._bulks: dict[str, Bulk] = {}
        self._lock = threading.Lock()

    def start(self, action: BulkAction, what: Search, viewer: Viewer) -> Bulk:
        """Begin one; `StateError` while too many are under way."""
        bulk = Bulk(secrets.token_hex(8), action, bulk_search(action, what), viewer, datetime.now(UTC))
        with self._lock:
            if sum(known.is_running for known in self._bulks.values()) >= _AT_ONCE:
                raise StateError(f"{_AT_ONCE} bulks are under way; wait for one to end, or stop it")
            self._bulks[bulk.id] = bulk
            over = [known.id for known in self._bulks.values() if not known.is_running]
            for forgotten in over[: max(0, len(self._bulks) - _REMEMBERED)]:
                del self._bulks[forgotten]
        threading.Thread(target=self._run, args=(bulk,), name=f"pgoutbox bulk {bulk.id}", daemon=True).start()
        return bulk

    def find(self, bulk_id: str) -> Bulk | None:
        """The bulk of this id, if this process remembers it."""
        with self._lock:
            return self._bulks.get(bulk_id)

    def latest(self) -> list[Bulk]:
        """Those that are remembered, the latest first."""
        with self._lock:
            return list(self._bulks.values())[::-1]

    def stop(self) -> None:
        """Stop all; what they did stays done."""
        for bulk in self.latest():
            bulk.stop.set()

    def _run(self, bulk: Bulk) -> None:
        actor = Actor(bulk.viewer.name, bulk.viewer.origin or None)
        try:
            with self._database.connection() as connection, acting_as(actor):
                bulk.status = self._work(connection, bulk)
        except (psycopg.Error, PgOutboxError) as error:
            # The driver's text can quote what it was sent.
            bulk.error = _told(error)
            bulk.status = "broken"
            logger.warning(
                "a bulk of the dashboard ended early",
                extra={"event": Event.WEB_BULK_BROKEN, "action": bulk.action, "error": type(error).__name__},
            )

    def _work(self, connection: Connection, bulk: Bulk) -> Literal["done", "stopped", "capped"]:
        act = Act(**bulk.what.which.given(), error_group=bulk.what.group)
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


def _told(error: Exception) -> str:
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return str(RefusedError("do this", "pgoutbox_operator"))
    return str(error) if isinstance(error, PgOutboxError) else "the database failed"


def _batches(connection: Connection, bulk: Bulk) -> Iterator[Sequence[tuple[int, int]]]:
    """The ids that match, some at a time, each with the number of its attempts.

    An empty batch where nothing matched for long, so that it can be stopped.
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


def _do(connection: Connection, bulk: Bulk, chosen: Sequence[tuple[int, int]], act: Act) -> Iterator[str]:
    states = bulk.what.which.states
    ids, attempt_counts = [message_id for message_id, _ in chosen], [count for _, count in chosen]
    if bulk.action == "cancel":
        yield from (met.result for met in messages.cancel_each(connection, ids, states=states, act=act))
        return
    for answer in messages.redrive(connection, ids, states=states, attempt_counts=attempt_counts, act=act):
        yield answer.result
