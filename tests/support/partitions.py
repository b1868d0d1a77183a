"""Partitions of past and future days, for the retention tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

if TYPE_CHECKING:
    import psycopg


def add_partition(db: psycopg.Connection[Any], days_ago: int, *, days: int = 1) -> str:
    """Create a partition that begins this many days before today, and return its name."""
    ((name, lower_at, upper_at),) = db.execute(
        """
        SELECT
            'message_done_' || to_char(b.lower_at AT TIME ZONE 'UTC', 'YYYYMMDD'),
            b.lower_at,
            b.lower_at + make_interval(hours => 24 * %s)
        FROM (SELECT date_trunc('day', now(), 'UTC') - make_interval(hours => 24 * %s) AS lower_at) AS b
        """,
        [days, days_ago],
    ).fetchall()
    db.execute(
        sql.SQL("CREATE TABLE {} PARTITION OF pgoutbox.message_done FOR VALUES FROM ({}) TO ({})").format(
            sql.Identifier("pgoutbox", name), sql.Literal(lower_at), sql.Literal(upper_at)
        )
    )
    # The outbox creates partitions under the schema's owner, and detaches them with that owner's rights.
    db.execute(sql.SQL("ALTER TABLE {} OWNER TO pgoutbox_owner").format(sql.Identifier("pgoutbox", name)))
    return str(name)


def partitions_of(db: psycopg.Connection[Any]) -> list[str]:
    """Return the names of the partitions by time."""
    return [name for (name,) in db.execute("SELECT name FROM pgoutbox.partitions()")]


def drop_partitions(db: psycopg.Connection[Any]) -> None:
    """Drop every partition except the default partition."""
    for name in partitions_of(db):
        db.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier("pgoutbox", name)))


def tables_of_partitions(db: psycopg.Connection[Any]) -> list[str]:
    """Return the tables that are, or were, partitions by time."""
    rows = db.execute(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'pgoutbox'::regnamespace AND relkind = 'r'"
        " AND relname ~ '^message_done_[0-9]{8}$' ORDER BY 1"
    )
    return [name for (name,) in rows]
