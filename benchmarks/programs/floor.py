"""The floor of any outbox on PostgreSQL: a loop that claims and finishes on its own tables.

It does only the work that every outbox needs. The claim skips locked rows and gives each row a lease and a number. Only
the owner of that number can write the finish, which moves the row to a history table. There are three indexes, the
fewest possible columns, two statements, and one connection.
"""

from __future__ import annotations

import os
import sys
from typing import Final, LiteralString

import psycopg

from benchmarks.programs.lifeline import Meter, hold_lifeline

TABLES: Final[LiteralString] = """
CREATE SCHEMA floor;
CREATE TABLE floor.live (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    available_at timestamptz NOT NULL DEFAULT now(),
    claimed_at timestamptz,
    lease_expires_at timestamptz,
    attempt_count integer NOT NULL DEFAULT 0,
    topic text NOT NULL,
    queue text NOT NULL,
    worker text,
    payload jsonb NOT NULL
);
CREATE INDEX live_due ON floor.live (queue, available_at, id) WHERE lease_expires_at IS NULL;
CREATE INDEX live_lease ON floor.live (lease_expires_at) WHERE lease_expires_at IS NOT NULL;
CREATE TABLE floor.done (LIKE floor.live, finished_at timestamptz NOT NULL, PRIMARY KEY (id))
"""
_CLAIM: Final[LiteralString] = """
UPDATE floor.live AS m
SET attempt_count = m.attempt_count + 1,
    claimed_at = now(),
    worker = %(worker)s::text,
    lease_expires_at = now() + interval '60 s'
FROM (
    SELECT d.id
    FROM floor.live AS d
    WHERE d.queue = %(queue)s::text AND d.lease_expires_at IS NULL AND d.available_at <= now()
        AND (d.available_at, d.id) > (%(due_at)s::timestamptz, %(id)s::bigint)
    ORDER BY d.available_at, d.id
    LIMIT %(total)s::bigint
    FOR UPDATE SKIP LOCKED
) AS due
WHERE m.id = due.id
RETURNING m.id, m.attempt_count, m.available_at, m.topic, m.payload::text
"""
_FINISH: Final[LiteralString] = """
WITH sent AS (
    DELETE FROM floor.live AS m
    USING unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
    WHERE m.id = o.id AND m.attempt_count = o.attempt_count AND m.worker = %(worker)s::text
    RETURNING m.*
)
INSERT INTO floor.done SELECT s.*, now() FROM sent AS s
RETURNING id
"""
_FIRST: Final = ("2000-01-01 00:00Z", 0)


def main(batch_size: int) -> int:
    hold_lifeline()
    meter = Meter()
    with psycopg.connect(os.environ["PGOUTBOX_DSN"], autocommit=True) as connection:
        connection.execute("SET plan_cache_mode = force_generic_plan")
        cursor = connection.cursor(binary=True)
        last: tuple[object, int] = _FIRST
        while True:
            meter.begin()
            asked = {"queue": "default", "worker": "floor", "total": batch_size, "due_at": last[0], "id": last[1]}
            rows = cursor.execute(_CLAIM, asked, prepare=True).fetchall()
            if not rows:
                if last == _FIRST:
                    break
                last = _FIRST
                continue
            last = max((row[2], row[0]) for row in rows)
            held = {"ids": [row[0] for row in rows], "attempt_counts": [row[1] for row in rows], "worker": "floor"}
            meter.handled_count += len(cursor.execute(_FINISH, held, prepare=True).fetchall())
            meter.end()
    meter.report()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
