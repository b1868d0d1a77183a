"""Live activity for `watch` and the dashboard: unfinished messages by topic, workers, and outcomes of attempts."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import fetch

MAX_DUE: Final = 100_000
_PAGE: Final = 1_000
_OVERLAP: Final = timedelta(seconds=5)
_LONG_AGO: Final = (None, 0, 0)


class TopicActivity(NamedTuple):
    """The messages of one topic in one queue by state, and the average number that ended per second.

    `due` and `scheduled` messages are pending. `retries` counts those of both of which an attempt has failed.
    """

    queue: str
    topic: str
    due: int
    scheduled: int
    retries: int
    sending: int
    failed: int
    oldest_due_seconds: float | None
    sent_per_second: float
    ended_per_second: float


class WorkerActivity(NamedTuple):
    """A worker that holds messages, reports its presence or is connected, or a last run; as in LIST_WORKERS.

    `queues` and `topics` are those that it serves, idle or not. `ended_at` is the end of a run with `--once` or
    `--drain`, and None for all others. A worker without `seen_at` reports no more: then `queues` are those of its
    messages. `connected_at` is None if its connection is gone, goes through a pooler, or belongs to a role whose
    sessions are hidden from this one. `expired_leases` counts the messages whose lease has expired.
    """

    worker: str
    in_flight: int
    expired_leases: int
    oldest_claimed_at: datetime | None
    lease_expires_at: datetime | None
    queues: list[str]
    topics: list[str]
    seen_at: datetime | None
    ended_at: datetime | None
    connected_at: datetime | None
    address: str | None


class Supply(NamedTuple):
    """The due messages of a queue or a topic, at most `MAX_DUE`, and whether a running worker serves it.

    `is_served` is None if nobody knows.
    """

    due: int
    is_served: bool | None


class OutcomeRow(NamedTuple):
    """The outcome of one attempt, or of a message without an attempt, in the order of LIST_OUTCOMES."""

    ended_at: datetime
    message_id: int
    attempt_count: int
    outcome: str
    topic: str
    queue: str
    destination: str | None
    worker: str | None
    reason: str | None


def topic_activity(
    connection: psycopg.Connection[TupleRow], *, queue: str | None = None, window_seconds: float = 10.0
) -> list[TopicActivity]:
    """Return the topics with unfinished, failed or recently ended messages, by queue and name."""
    owed = {row[:2]: row[2:] for row in fetch(connection, sql.OWED_BY_TOPIC, {"queue": queue})}
    ended = {
        row[:2]: row[2:] for row in fetch(connection, sql.ENDED_BY_TOPIC, {"queue": queue, "seconds": window_seconds})
    }
    nothing_owed, nothing_ended = (0, 0, 0, 0, 0, None), (0, 0)
    return [
        TopicActivity(*key, *owed.get(key, nothing_owed), *(n / window_seconds for n in ended.get(key, nothing_ended)))
        for key in sorted(owed.keys() | ended.keys())
    ]


def list_workers(connection: psycopg.Connection[TupleRow]) -> list[WorkerActivity]:
    """Return the workers that hold messages, report their presence or are connected, and the last run, by name."""
    return [WorkerActivity._make(row) for row in fetch(connection, sql.LIST_WORKERS, {})]


def supply(connection: psycopg.Connection[TupleRow], *, queue: str | None = None, topic: str | None = None) -> Supply:
    """Return what a queue or a topic has to do, and whether it has a worker."""
    (row,) = fetch(connection, sql.SUPPLY, {"queue": queue, "topic": topic, "cap": MAX_DUE})
    return Supply._make(row)


class Follower:
    """Reports the outcomes of attempts, from `since` before now on. Call `poll` repeatedly."""

    def __init__(
        self,
        connection: psycopg.Connection[TupleRow],
        *,
        since: timedelta = timedelta(),
        topic: str | None = None,
        queue: str | None = None,
        outcomes: Collection[str] = (),
    ) -> None:
        self._connection = connection
        self._filter = {"topic": topic, "queue": queue, "outcomes": list(outcomes) or None}
        self._reported: dict[tuple[int, int, str], datetime] = {}
        self._from = self._now() - since

    def poll(self) -> list[OutcomeRow]:
        """Return the outcomes since the last call, oldest first.

        An outcome carries the start time of its transaction, so it may appear late. Each call therefore reads some
        seconds back, and omits the outcomes that it has returned before.
        """
        now = self._now()
        new_rows: list[OutcomeRow] = []
        after: tuple[datetime | None, int, int] = _LONG_AGO
        while True:
            place = dict(zip(("after_ended_at", "after_id", "after_count"), after, strict=True))
            asked = {**self._filter, **place, "ended_from": self._from, "limit": _PAGE}
            page = [OutcomeRow._make(row) for row in fetch(self._connection, sql.LIST_OUTCOMES, asked)]
            new_rows += [row for row in page if _identity(row) not in self._reported]
            if len(page) < _PAGE:
                break
            after = (page[-1].ended_at, page[-1].message_id, page[-1].attempt_count)
        self._from = max(self._from, now - _OVERLAP)
        self._reported.update((_identity(row), row.ended_at) for row in new_rows)
        self._reported = {identity: at for identity, at in self._reported.items() if at >= self._from}
        return new_rows

    def _now(self) -> datetime:
        ((now,),) = fetch(self._connection, sql.NOW, {})
        return now  # type: ignore[no-any-return] # a column of type timestamptz


def _identity(row: OutcomeRow) -> tuple[int, int, str]:
    return row.message_id, row.attempt_count, row.outcome
