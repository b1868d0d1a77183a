"""Indexes that a later revision adds to a table with messages, built partition by partition while messages flow.

A revision names them in `INDEXES`, and its upgrade runs their `statements`. These adopt the indexes that `build` has
made on the partitions, and then read no table.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg.errors import UndefinedTable

from pgoutbox.database import connections

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_POLL_SECONDS: Final = 0.05
# The partitions whose own index is missing or was left behind half built, unless the index of the whole table exists.
_MISSING: Final = """
SELECT quote_ident(named.name), t.relid::regclass::text, i.indexrelid::regclass::text, pg_table_size(t.relid)
FROM pg_partition_tree(%(table)s) AS t
JOIN pg_class AS c ON c.oid = t.relid
CROSS JOIN LATERAL (SELECT CASE t.level WHEN 0 THEN %(name)s ELSE c.relname || %(suffix)s END) AS named (name)
LEFT JOIN pg_index AS i ON i.indexrelid = to_regclass('pgoutbox.' || quote_ident(named.name))
LEFT JOIN pg_index AS whole ON whole.indexrelid = to_regclass('pgoutbox.' || quote_ident(%(name)s))
WHERE t.isleaf AND i.indisvalid IS NOT TRUE AND whole.indisvalid IS NOT TRUE
ORDER BY c.relname
"""
# A timeout of the role. The settings are left alone where it has none, because a pooler would keep them.
_NO_TIMEOUTS: Final = """
SELECT set_config(s.name, '0', false)
FROM pg_settings AS s
WHERE s.name IN ('lock_timeout', 'statement_timeout') AND s.setting <> '0'
"""
# A build ends its lock of the table before its last transaction, which makes the index valid.
_WRITING: Final = """
SELECT l.virtualtransaction
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid AND a.datname = current_database()
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
"""
_DROP_HALF_BUILT: Final = """
DO $half_built$
DECLARE
    index_name text;
BEGIN
    FOR index_name IN
        SELECT i.indexrelid::regclass
        FROM pg_partition_tree('{table}') AS t
        JOIN pg_index AS i ON i.indrelid = t.relid AND NOT i.indisvalid
        WHERE t.isleaf
    LOOP
        EXECUTE 'DROP INDEX ' || index_name; -- The index of the whole table would adopt it, and never be used.
    END LOOP;
END
$half_built$
"""
_REQUIRE_OWN_NAMES: Final = """
DO $names$
DECLARE
    other text;
BEGIN
    SELECT taken.oid::regclass
    INTO other
    FROM pg_partition_tree('{table}') AS t
    JOIN pg_class AS c ON c.oid = t.relid
    CROSS JOIN LATERAL (SELECT CASE t.level WHEN 0 THEN '{name}' ELSE c.relname || '{suffix}' END) AS named (name)
    JOIN pg_class AS taken ON taken.oid = to_regclass('pgoutbox.' || quote_ident(named.name))
    LEFT JOIN pg_index AS i ON i.indexrelid = taken.oid AND i.indrelid = t.relid
    WHERE (t.isleaf OR t.level = 0)
        AND (
            i.indexrelid IS NULL
            OR coalesce(pg_partition_root(taken.oid), taken.oid) <> 'pgoutbox.{name}'::regclass
        )
    ORDER BY taken.relname
    LIMIT 1;
    IF FOUND THEN
        RAISE duplicate_object USING MESSAGE = format(
            'index {name} on {table} needs the name %s, which something else has; rename index {name}', other
        );
    END IF;
END
$names$
"""


class Index(NamedTuple):
    """An index on a table of the schema. Its name begins with that of the table: message_campaign on pgoutbox.message.

    `definition` is the rest of CREATE INDEX after the table. It is neither unique nor on a column of the same revision.
    """

    name: str
    table: str
    definition: str

    @property
    def statements(self) -> tuple[str, str, str]:
        """The statements of the revision. Without a build before, the second reads the table and blocks its writers.

        The third one fails if another index or table has the name of this index, or of its part on a partition.
        """
        create = f"CREATE INDEX IF NOT EXISTS {self.name} ON {self.table} {self.definition}"
        names = _REQUIRE_OWN_NAMES.format(name=self.name, table=self.table, suffix=self.suffix)
        return _DROP_HALF_BUILT.format(table=self.table), create, names

    @property
    def suffix(self) -> str:
        """The end of the name, after that of the table. The index of a partition has it too."""
        return self.name.removeprefix(self.table.removeprefix("pgoutbox."))


class Build(NamedTuple):
    """An index of one partition that is still to be built."""

    name: str
    relation: str
    half_built: str | None
    size_bytes: int
    statement: str


def missing_builds(connection: psycopg.Connection, index: Index) -> list[Build]:
    """Return the builds that `index` still needs, none if its table does not exist."""
    exists = "SELECT to_regclass(%s) IS NOT NULL"
    if connection.execute(exists, [index.table]).fetchone() == (False,):
        return []
    found = connection.execute(_MISSING, {"table": index.table, "name": index.name, "suffix": index.suffix})
    return [
        Build(name, relation, half_built, size, f"CREATE INDEX CONCURRENTLY {name} ON {relation} {index.definition}")
        for name, relation, half_built, size in found
    ]


def build(dsn: str, indexes: Collection[Index], report: Callable[[str], None]) -> bool:
    """Build the missing parts of these indexes, one partition after the other. Return whether a part was missing.

    Neither reads nor writes wait for it. It waits for all open transactions. After an interruption, the next call drops
    the half built index and builds the remaining ones. The caller excludes a second call.
    """
    was_missing = False
    if not indexes:
        return was_missing
    with connections.connect(dsn, purpose="migrate", answer_seconds=None) as connection:
        connection.execute(_NO_TIMEOUTS)
        for index in indexes:
            while missing := missing_builds(connection, index):
                _build(connection, missing[0], index, report)
                was_missing = True
    return was_missing


def _build(connection: psycopg.Connection, missing: Build, index: Index, report: Callable[[str], None]) -> None:
    with contextlib.suppress(UndefinedTable):  # Retention has dropped the partition.
        if missing.half_built is not None:
            # The server may still build it for a client that is gone. LOCK has no snapshot for which that would wait.
            with connection.transaction():
                connection.execute(f"LOCK TABLE {missing.relation} IN SHARE UPDATE EXCLUSIVE MODE".encode())
            writing = {*connection.execute(_WRITING)}
            while writing & {*connection.execute(_WRITING)}:
                time.sleep(_POLL_SECONDS)
            if missing in missing_builds(connection, index):
                connection.execute(f"DROP INDEX CONCURRENTLY {missing.half_built}".encode())
            return
        size = f"{missing.size_bytes / 1e6:,.1f} MB"
        report(f"building index {missing.name} on {missing.relation} ({size}), while messages flow")
        connection.execute(missing.statement.encode())
