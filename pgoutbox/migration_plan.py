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
from pgoutbox.database.index_builds import missing_builds
from pgoutbox.errors import SchemaError

_COMMENT: Final = re.compile(r"--[^\n]*\n?")
_NAME: Final = r"(?:IF EXISTS )?(?:ONLY )?(pgoutbox\.\w+)"
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
        (r"CREATE TABLE .*?\bPARTITION OF NAME", "ACCESS EXCLUSIVE", False),
        (r"(?:DROP (?:TABLE|VIEW|INDEX(?: CONCURRENTLY)?)|TRUNCATE(?: TABLE)?) NAME", "ACCESS EXCLUSIVE", False),
        (r"LOCK TABLE NAME", "as it says", False),
        (r"SELECT pgoutbox\.(_lock_messages)", "ACCESS EXCLUSIVE", False),
        (r"SELECT pgoutbox\.(_note_revision)", "SHARE", False),
        (r"(?:UPDATE|DELETE FROM) NAME", "ROW EXCLUSIVE", True),
        (r"INSERT INTO NAME", "ROW EXCLUSIVE", False),
    )
)
# What the functions lock that revisions begin and end with.
_LOCKED_BY: Final = {"_lock_messages": "pgoutbox.message", "_note_revision": "pgoutbox.worker"}
# These lock no table of messages. Any other statement is shown without a relation: read it.
_HARMLESS: Final = re.compile(
    r"BEGIN|COMMIT|SET |RESET |GRANT |REVOKE |COMMENT ON (?:FUNCTION|TYPE|TABLE|VIEW|COLUMN)|ALTER TYPE|"
    r"(?:CREATE|CREATE OR REPLACE|DROP) FUNCTION|CREATE (?:TYPE|SEQUENCE|SCHEMA|VIEW)|"
    r"CREATE TABLE (?!.*(?:PARTITION OF|REFERENCES))"
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

    A lock lasts until the end of its revision, which is one transaction. The builds of indexes come before it.
    `seconds` is an estimate for a statement that reads all of the relation. A statement whose lock is not known has no
    relation.
    """

    relation: str
    lock: str
    size_bytes: int
    seconds: float
    statement: str


def plan(dsn: str) -> list[PlannedStep]:
    """Return the statements of `pgoutbox migrate` on relations of this database, in their order. Changes nothing.

    Raises `SchemaError` for a fault that no migration corrects.
    """
    before, _, fault = migrate.state(dsn)
    if fault is not None:
        raise SchemaError(fault)
    if before in (None, migrate.head()):
        return []  # A new schema has no table that anybody uses.
    steps: list[PlannedStep | None] = []
    with connections.connect(dsn, purpose="migrate", answer_seconds=60.0) as connection:
        connection.read_only = True
        for revision in migrate.pending_revisions(before):
            for index in revision.indexes:
                steps += [_step_of(build.statement, connection) for build in missing_builds(connection, index)]
            adopting = {f"{_plain(statement)};" for index in revision.indexes for statement in index.statements}
            for text in migrate.upgrade_statements(f"{before}:{revision.name}"):
                statement = _plain(text)
                if not statement or migrate.VERSION_TABLE in statement:
                    continue
                step = _step_of(statement, connection)
                if step is not None and statement in adopting:
                    step = step._replace(seconds=0.0) if step.relation else None
                steps.append(step)
            before = revision.name
    return [step for step in steps if step is not None]


def _plain(statement: str) -> str:
    return " ".join(_COMMENT.sub("", statement).split())


def _step_of(statement: str, connection: psycopg.Connection) -> PlannedStep | None:
    for pattern, lock, reads in _LOCKS:
        if found := pattern.match(statement):
            relation = _LOCKED_BY.get(found[1], found[1])
            sizes = connection.execute(_SIZE, [relation]).fetchall()
            if not sizes:
                return None  # The migration itself creates it.
            ((size,),) = sizes
            return PlannedStep(relation, lock, size, round(size / _BYTES_PER_SECOND, 1) if reads else 0.0, statement)
    return None if _HARMLESS.match(statement) else PlannedStep("", "unknown", 0, 0.0, statement)
