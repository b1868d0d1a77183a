"""The schema as a later release may leave it while workers and producers of this package run: it has only grown."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from pgoutbox import migrate

if TYPE_CHECKING:
    import psycopg

VARIABLE: Final = "PGOUTBOX_TEST_LATER_SCHEMA"
# A new column in each table and view, a new option of messages, an index on each new column, and a new revision that
# every package may work with.
GROW: Final = """
DO $grow$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT c.oid, c.oid::regclass AS name, c.relkind
        FROM pg_class AS c
        WHERE c.relnamespace = 'pgoutbox'::regnamespace
            AND c.relkind IN ('c', 'r', 'p', 'v')
            AND NOT c.relispartition
            AND c.relname <> 'alembic_version'
            -- Functions and workers build rows of the other types: a revision replaces those, or makes another type.
            AND (c.relkind <> 'c' OR c.relname = 'draft')
        ORDER BY c.relkind = 'v', c.oid
    LOOP
        CASE one.relkind
            WHEN 'c' THEN
                EXECUTE format('ALTER TYPE %s ADD ATTRIBUTE later text', one.name);
            WHEN 'v' THEN
                EXECUTE format(
                    'CREATE OR REPLACE VIEW %s AS SELECT former.*, NULL::text AS later FROM (%s) AS former',
                    one.name, rtrim(pg_get_viewdef(one.oid), ';')
                );
            ELSE
                EXECUTE format('ALTER TABLE %s ADD COLUMN later text', one.name);
                EXECUTE format('CREATE INDEX ON %s (later)', one.name);
        END CASE;
    END LOOP;
    INSERT INTO pgoutbox.revision (number, lowest_package, applied_by, digest)
    VALUES (2, '0.1', '0.2.0', 'of a later release');
END
$grow$
"""


def is_wanted() -> bool:
    """Whether the tests run on a later schema."""
    return os.environ.get(VARIABLE) == "1"


def upgrade(dsn: str, connection: psycopg.Connection) -> None:
    """Migrate this database, as far as the tests want."""
    migrate.upgrade(dsn)
    if is_wanted():
        connection.execute(GROW.encode())
