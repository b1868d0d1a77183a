"""Liveness while traffic flows: a session beside the run that looks for due messages that the workers pass over.

A message is claimable if the view says `due`: it is due, no sibling or earlier message of its key is before it, no
failure halts its key, and its queue is not paused and has a permit. Also, no open transaction may have locked its row.
A lapsed attempt is claimable, too, because it has to be ended.
A look with traffic is one before which a message of the same lane began that had become due later. A message is passed
over if it was claimable at every look, `PATIENCE_SECONDS` of them with traffic. So outages, suspended workers and
backlogs need no exception: in their time, later messages do not begin either.

Messages with a fair key take turns, so the first one of a key is compared with all of its queue, and the others with
those of their key.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString, NamedTuple

import psycopg
from psycopg.rows import class_row

from tests.soak.crew import POLL_SECONDS

PATIENCE_SECONDS: Final = 2 * POLL_SECONDS
"""Every worker searches everything in each poll interval."""
LOOK_SECONDS: Final = 1.0
# After a longer gap, for example a crash of the server, the looks no longer prove that a message was always claimable.
_GAP_SECONDS: Final = 3.0

_TABLES: Final[LiteralString] = """
CREATE TABLE soak_passed_over (message_id bigint NOT NULL, queue text NOT NULL, since timestamptz NOT NULL);
CREATE TABLE soak_hung (message_id bigint NOT NULL);
-- A transaction that has locked or changed a row is its xmax, or a member of its xmax. A number is a transaction's or a
-- MultiXact's, and nobody can tell which, so only open transactions of this database count.
CREATE FUNCTION soak_is_locked(row_xmax xid) RETURNS boolean LANGUAGE plpgsql AS $function$
DECLARE
    open_xids xid[] := ARRAY(
        SELECT l.transactionid
        FROM pg_locks AS l
        JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'transactionid' AND l.granted AND a.datname = current_database()
    );
BEGIN
    RETURN row_xmax = ANY (open_xids)
        OR EXISTS (SELECT FROM pg_get_multixact_members(row_xmax) AS m WHERE m.xid = ANY (open_xids));
EXCEPTION
    WHEN OTHERS THEN
        RETURN false; -- There is no such MultiXact.
END
$function$
"""
_CLAIMABLE: Final[LiteralString] = """
SELECT
    w.id, w.attempt_count, w.available_at AS since, w.queue, m.ordering_key IS NOT NULL AS is_ordered,
    m.fair_key, row_number() OVER (PARTITION BY w.queue, m.fair_key ORDER BY w.available_at, w.id) = 1 AS is_first,
    statement_timestamp() AS at
FROM pgoutbox.waiting_view AS w
JOIN pgoutbox.message AS m ON m.id = w.id
WHERE w.reason IN ('due', 'turn', 'no worker', 'no handler')
    AND m.state = 'pending'
    AND (m.xmax = '0'::xid OR NOT soak_is_locked(m.xmax))
UNION ALL
SELECT v.id, v.attempt_count, v.lease_expires_at, v.queue, NULL, NULL, true, v.lease_expires_at
FROM pgoutbox.in_flight_view AS v
JOIN pgoutbox.message AS m ON m.id = v.id
WHERE v.lease_expires_at <= statement_timestamp()
    AND m.state = 'sending'
    AND (m.xmax = '0'::xid OR NOT soak_is_locked(m.xmax))
"""
# A message that waits for its next attempt has the due time of that attempt.
_BEGUN: Final[LiteralString] = """
SELECT m.queue, m.ordering_key IS NOT NULL, m.attempt_count > 1, m.fair_key, max(m.available_at)
FROM pgoutbox.message_view AS m
WHERE m.claimed_at >= m.available_at AND m.claimed_at > %s
GROUP BY 1, 2, 3, 4
"""


_NOTE: Final = "INSERT INTO soak_passed_over (message_id, queue, since) VALUES (%s, %s, %s)"


class _Kind(NamedTuple):
    queue: str
    is_ordered: bool
    has_failed: bool
    fair_key: str | None


class _Claimable(NamedTuple):
    id: int
    attempt_count: int
    since: datetime
    queue: str
    is_ordered: bool | None
    """None for a lapsed attempt."""
    fair_key: str | None
    is_first: bool
    """Whether it is the first one of its fair key."""
    at: datetime

    @property
    def wait(self) -> tuple[int, int, datetime]:
        """Return what identifies its wait: a message that is rescheduled waits anew."""
        return self[:3]

    def was_passed(self, since: datetime, begun: Mapping[_Kind, datetime]) -> bool:
        """Return whether a message of its lane began that fell due later; of its queue for a lapsed attempt."""

        def is_compared(kind: _Kind) -> bool:
            if kind.queue != self.queue or self.is_ordered is None:
                return kind.queue == self.queue
            if self.fair_key is not None:
                return kind.fair_key == self.fair_key or (self.is_first and kind.fair_key is not None)
            return kind[1:] == (self.is_ordered, self.attempt_count > 0, None)

        return any(at > since for kind, at in begun.items() if is_compared(kind))


def install_liveness(connection: psycopg.Connection) -> None:
    """Make room for the messages that are passed over, and for those whose cancel and handler wait for each other."""
    connection.execute(_TABLES)


def passed_over(connection: psycopg.Connection) -> list[str]:
    """Return the messages that were passed over, each with its queue."""
    rows = connection.execute("SELECT message_id, queue FROM soak_passed_over ORDER BY since")
    return [f"{message_id} in {queue}" for message_id, queue in rows]


@dataclass(slots=True)
class _Wait:
    since: datetime
    looks_with_traffic: int = 0


class Onlooker:
    """Remembers since when each message was claimable at every look."""

    def __init__(self, *, patience_looks: int = int(PATIENCE_SECONDS / LOOK_SECONDS)) -> None:
        self._patience_looks = patience_looks
        self._waits: dict[tuple[int, int, datetime], _Wait] = {}
        self._looked_at: datetime | None = None

    def look(self, connection: psycopg.Connection) -> None:
        """Look once, and note the messages that were passed over. The connection is in autocommit mode."""
        ((now,),) = connection.execute("SELECT statement_timestamp()").fetchall()
        if self._looked_at is None or (now - self._looked_at).total_seconds() > _GAP_SECONDS:
            self._waits, self._looked_at = {}, now
        begun = {_Kind(*kind): due_at for (*kind, due_at) in connection.execute(_BEGUN, [self._looked_at])}
        self._looked_at = now
        rows = connection.cursor(row_factory=class_row(_Claimable)).execute(_CLAIMABLE).fetchall()
        self._waits = {row.wait: self._waits.get(row.wait, _Wait(row.at)) for row in rows}
        for row in rows:
            wait = self._waits[row.wait]
            if row.was_passed(wait.since, begun):
                wait.looks_with_traffic += 1
                if wait.looks_with_traffic == self._patience_looks:
                    connection.execute(_NOTE, [row.id, row.queue, wait.since])


@contextlib.contextmanager
def onlooker(dsn: str) -> Iterator[None]:
    """Look every half second, on a thread. A lost connection is opened again."""
    ends = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        watching = Onlooker()
        while not ends.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(dsn, autocommit=True, application_name="onlooker", connect_timeout=5) as connection,
            ):
                while not ends.wait(LOOK_SECONDS):
                    watching.look(connection)
            ends.wait(LOOK_SECONDS)

    def run_and_tell() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - raised at the end
            errors.append(error)

    thread = threading.Thread(target=run_and_tell, name="onlooker")
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    if errors:
        raise errors[0]
