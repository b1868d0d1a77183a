"""What a migration would do: its statements on relations that exist, with their locks, before anything runs.

The statements are those of the SQL script. The locks are PostgreSQL's (its documentation: "Explicit Locking", ALTER
TABLE, CREATE INDEX).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import psycopg

from pgoutbox import migrate
from pgoutbox.database import connections

# A semicolon ends a statement unless it is in a comment, a literal or the body of a function.
_STATEMENT: Final = re.compile(r"(?>--[^\n]*|'(?:[^']|'')*'|(\$\w*\$).*?\1|BEGIN ATOMIC\b.*?\nEND|[^;])+;", re.DOTALL)
_COMMENT: Final = re.compile(r"--[^\n]*\n?")
_NAME: Final = r"(?:ONLY )?(?:IF EXISTS )?(pgoutbox\.\w+)"
# The first pattern that matches counts: the lock, and whether the statement reads the whole relation.
_LOCKS: Final = tuple(
    (re.compile(pattern.replace("NAME", _NAME), re.DOTALL), lock, reads)
    for pattern, lock, reads in (
        (r"CREATE (?:UNIQUE )?INDEX CONCURRENTLY .*?\bON NAME", "SHARE UPDATE EXCLUSIVE", True),
        (r"CREATE (?:UNIQUE )?INDEX .*?\bON NAME", "SHARE", True),
        (r"CREATE (?:CONSTRAINT |OR REPLACE )?TRIGGER .*?\bON NAME", "SHARE ROW EXCLUSIVE", False),
        (r"DROP TRIGGER .*?\bON NAME", "ACCESS EXCLUSIVE", False),
        (r"ALTER TABLE NAME VALIDATE", "SHARE UPDATE EXCLUSIVE", True),
        (r"ALTER TABLE NAME SET \(", "SHARE UPDATE EXCLUSIVE", False),
        (r"ALTER TABLE NAME ADD .*?\b(?:CHECK|NOT NULL|UNIQUE|PRIMARY KEY)\b(?!.*NOT VALID)", "ACCESS EXCLUSIVE", True),
        (r"ALTER TABLE NAME .*?\b(?:SET NOT NULL|TYPE)\b", "ACCESS EXCLUSIVE", True),
        (r"ALTER (?:TABLE|VIEW) NAME", "ACCESS EXCLUSIVE", False),
        (r"CREATE OR REPLACE VIEW NAME", "ACCESS EXCLUSIVE", False),
        (r"(?:DROP (?:TABLE|VIEW|INDEX)|TRUNCATE) NAME", "ACCESS EXCLUSIVE", False),
        (r"(?:UPDATE|DELETE FROM) NAME", "ROW EXCLUSIVE", True),
        (r"INSERT INTO NAME", "ROW EXCLUSIVE", False),
    )
)
# With the partitions of a table, and the indexes of each.
_SIZE: Final = """
SELECT coalesce(sum(pg_total_relation_size(t.relid)), pg_total_relation_size(named.oid))::bigint
FROM (SELECT to_regclass(%s) AS oid) AS named
LEFT JOIN LATERAL pg_partition_tree(named.oid) AS t ON true
WHERE named.oid IS NOT NULL
GROUP BY named.oid
"""
_BYTES_PER_SECOND: Final = 50_000_000  # Of a slow disk: a plan is rather too long than too short.


class PlannedStep(NamedTuple):
    """A statement of a migration on a relation that exists.

    All locks last until the end of the migration, which is one transaction. `seconds` is an estimate for a statement
    that reads all of the relation.
    """

    relation: str
    lock: str
    size_bytes: int
    seconds: float
    statement: str


def plan(dsn: str) -> list[PlannedStep]:
    """Return the statements of `pgoutbox migrate` on relations of this database, in their order. Changes nothing."""
    before = migrate.current(dsn)
    if before == migrate.head():
        return []
    script = migrate.upgrade_sql("head" if before is None else f"{before}:head")
    steps = []
    with connections.connect(dsn, purpose="migrate", answer_seconds=60.0) as connection:
        connection.read_only = True
        for match in _STATEMENT.finditer(script.replace(f"pgoutbox.{migrate.VERSION_TABLE}", "")):
            statement = " ".join(_COMMENT.sub("", match[0]).split())
            step = _step_of(statement, connection)
            if step is not None:
                steps.append(step)
    return steps


def _step_of(statement: str, connection: psycopg.Connection) -> PlannedStep | None:
    for pattern, lock, reads in _LOCKS:
        if found := pattern.match(statement):
            sizes = connection.execute(_SIZE, [found[1]]).fetchall()
            if not sizes:
                return None  # The migration itself creates it.
            ((size,),) = sizes
            return PlannedStep(found[1], lock, size, round(size / _BYTES_PER_SECOND, 1) if reads else 0.0, statement)
    return None
