"""The frozen dump: where it is, whether it may be made again, and how it is restored."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path
from typing import Final

import psycopg

from pgoutbox import migrate
from tests.frozen.app import play
from tests.support.dump import dump_of
from tests.support.pages import ROOT

VERSION: Final = "0.1.0"
FILE: Final = Path(__file__).parent / f"schema-{VERSION}.sql.gz"
# Commands of psql, and a setting that PostgreSQL 15 does not know.
_NOT_SQL: Final = re.compile(r"^(?:\\.*|SET transaction_timeout = 0;)\n", re.MULTILINE)


def is_released() -> bool:
    """Whether the changelog has the version."""
    return re.search(rf"^## {re.escape(VERSION)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE) is not None


def text() -> str:
    """Return the dump, which any supported server runs as one script."""
    return gzip.decompress(FILE.read_bytes()).decode()


def make(dsn: str) -> None:
    """Write the file from this empty database."""
    migrate.upgrade(dsn)

    def write() -> None:
        dumped = dump_of(dsn, "--inserts", "--no-owner", "--no-privileges")
        FILE.write_bytes(gzip.compress(_NOT_SQL.sub("", dumped).encode(), mtime=0))

    asyncio.run(play(dsn, write))


def restore(dsn: str) -> None:
    """Run the dump in this empty database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(text().encode())


def rows_of(connection: psycopg.Connection) -> dict[str, list[dict[str, object]]]:
    """Return all rows of the messages and of what belongs to them, by table and in the order of their columns."""
    tables = connection.execute(
        "SELECT c.oid::regclass::text FROM pg_class AS c WHERE c.relnamespace = 'pgoutbox'::regnamespace"
        " AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname NOT IN ('alembic_version', 'revision')"
    ).fetchall()
    return {
        name: [row for (row,) in connection.execute(f"SELECT to_jsonb(t) FROM {name} AS t ORDER BY t".encode())]
        for (name,) in tables
    }


def lost(before: dict[str, list[dict[str, object]]], after: dict[str, list[dict[str, object]]]) -> list[object]:
    """Return the rows of `before` that `after` has not, apart from new columns."""
    return [
        (table, row)
        for table, rows in before.items()
        for row in rows
        if not any(row.items() <= kept.items() for kept in after.get(table, []))
    ]
