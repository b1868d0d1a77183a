"""The locks of a migration, as other sessions meet them, sampled from pg_locks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import psycopg

SAMPLE_SECONDS: Final = 0.01
# Whether a migration has a lock that keeps others from reading or writing a table, and how long another session has
# waited behind it. A waiting migration is in the way too. Tables of an uncommitted revision are not visible here.
_SAMPLE: Final = """
SELECT
    m.pid,
    m.xact_start,
    clock_timestamp(),
    EXISTS (
        SELECT
        FROM pg_locks AS l
        JOIN pg_class AS c ON c.oid = l.relation
        WHERE l.pid = m.pid
            AND l.granted
            AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            AND c.relnamespace = to_regnamespace('pgoutbox')
            AND c.relname NOT LIKE 'alembic_version%'
    ),
    (
        SELECT coalesce(max(extract(epoch FROM clock_timestamp() - l.waitstart)), 0)::float8
        FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND NOT l.granted AND l.pid <> m.pid AND m.pid = ANY (pg_blocking_pids(l.pid))
    )
FROM pg_stat_activity AS m
WHERE m.datname = current_database() AND m.application_name = 'pgoutbox migrate' AND m.xact_start IS NOT NULL
"""


@dataclass(slots=True)
class Locks:
    """What the samples have shown so far. Each figure is exact to `SAMPLE_SECONDS` and the time of a sample."""

    held_seconds: float = 0.0
    """How long a migration had such a lock."""
    waited_seconds: float = 0.0
    """How long another session waited for a table behind a migration."""
    sample_count: int = 0

    def facts(self) -> dict[str, object]:
        """Return the figures, in seconds."""
        return {
            "longest lock of a migration, seconds": round(self.held_seconds, 2),
            "longest wait behind one, seconds": round(self.waited_seconds, 2),
        }


@contextlib.contextmanager
def watched_locks(dsn: str) -> Iterator[Locks]:
    """Sample on a thread. A lost connection is opened again."""
    locks, ends = Locks(), threading.Event()

    def run() -> None:
        while not ends.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(dsn, autocommit=True, connect_timeout=5, prepare_threshold=None) as connection,
            ):
                _sample(connection, locks, ends)
            ends.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=run, name="locks")
    thread.start()
    try:
        yield locks
    finally:
        ends.set()
        thread.join()
    if not locks.sample_count:
        raise RuntimeError("no migration was seen")


def _sample(connection: psycopg.Connection, locks: Locks, ends: threading.Event) -> None:
    since: dict[tuple[int, datetime], datetime] = {}
    while not ends.wait(SAMPLE_SECONDS):
        held: dict[tuple[int, datetime], datetime] = {}
        for pid, began_at, now, is_held, waited_seconds in connection.execute(_SAMPLE).fetchall():
            locks.sample_count += 1
            locks.waited_seconds = max(locks.waited_seconds, waited_seconds)
            if is_held:
                first_at = since.get((pid, began_at)) or now
                held[pid, began_at] = first_at
                locks.held_seconds = max(locks.held_seconds, (now - first_at).total_seconds())
        since = held
