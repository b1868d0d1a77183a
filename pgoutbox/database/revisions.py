"""The revisions of the schema: those of this package, those that were applied, and those that version tables name.

A version table is Alembic's: that of `pgoutbox migrate`, or one of an application. A stamp, a restore or a dropped
schema can leave it with another revision than the schema has.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from pgoutbox.database import sql
from pgoutbox.database.server import PACKAGE_VERSION

MIGRATIONS = Path(__file__).parents[1] / "migrations"

_OWN_NAME: Final = re.compile(r"pgoutbox_(?:(\d{4})|\w+)", re.ASCII)


class Mismatch(NamedTuple):
    """A fault that every migration would keep: its cause as a code, what it is, and how to fix it."""

    code: str
    what: str
    fix: str


class Applied(NamedTuple):
    """A revision that was applied."""

    number: int
    digest: str
    package: str


class Named(NamedTuple):
    """A revision of pgoutbox that a version table names."""

    table: str
    revision: str

    @property
    def number(self) -> int:
        """The number of the revision, 0 for a name without one."""
        return number_of(self.revision)


def number_of(revision: str) -> int:
    """Return 1 for pgoutbox_0001, and 0 for a name without a number."""
    found = _OWN_NAME.fullmatch(revision)
    return int(found[1] or 0) if found else 0


def name_of(number: int) -> str:
    """Return pgoutbox_0001 for 1."""
    return f"pgoutbox_{number:04}"


def digest_of(number: int) -> str | None:
    """Return the digest of the SQL files of a revision in this package, None if it does not have the revision."""
    if not any((MIGRATIONS / "versions").glob(f"{number:04}_*.py")):
        return None
    folder = MIGRATIONS / ("sql" if number == 1 else f"sql_{number:04}")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.sql")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()


def has_table(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether the schema has this table."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        ((found,),) = cursor.execute("SELECT to_regclass('pgoutbox.' || %s) IS NOT NULL", [name]).fetchall()
        return bool(found)


def applied_in(connection: psycopg.Connection[Any]) -> list[Applied]:
    """Return the revisions that were applied. A schema of an unreleased version has none."""
    if not has_table(connection, "revision"):
        return []
    with connection.cursor(row_factory=tuple_row) as cursor:
        return [Applied._make(row) for row in cursor.execute(sql.APPLIED_REVISIONS)]


def newest_in(connection: psycopg.Connection[Any]) -> int:
    """Return the number of the newest revision that was applied, 0 without one."""
    return max((one.number for one in applied_in(connection)), default=0)


def named_in(connection: psycopg.Connection[Any]) -> list[Named]:
    """Return the revisions of pgoutbox that the version tables name, as far as this role may read them."""
    return [named for named in _all_named_in(connection) if _OWN_NAME.fullmatch(named.revision)]


def find_mismatch(connection: psycopg.Connection[Any]) -> Mismatch | None:
    """Return the fault between the schema, its version table and the files of this package, if there is one."""
    applied, has_messages = applied_in(connection), has_table(connection, "message")
    differing = [one for one in applied if digest_of(one.number) not in (None, one.digest)]
    if has_messages and not applied:
        differing = [Applied(1, "", "an unreleased version")]
    if differing:
        number, _, package = differing[0]
        return Mismatch(
            "revision-differs",
            f"revision {name_of(number)} of this database was applied by pgoutbox {package} from other files "
            f"than those of this package ({PACKAGE_VERSION})",
            "install the package that applied it. Only unreleased versions differ: if no message matters, delete them "
            "all by DROP SCHEMA pgoutbox CASCADE, and run `pgoutbox migrate` again",
        )
    newest = newest_in(connection)
    for named in named_in(connection):
        if named.number > newest:
            return _stamped(named, newest)
    if has_messages and not _all_named_in(connection):
        return Mismatch(
            "revision-unrecorded",
            "the schema pgoutbox has tables, but no version table names their revision",
            record_fix(newest),
        )
    return None


def record_fix(number: int) -> str:
    """Return how to record that `pgoutbox migrate` has applied this revision, for example before a restore."""
    table = "CREATE TABLE IF NOT EXISTS pgoutbox.alembic_version (version_num varchar(32) PRIMARY KEY)"
    row = f"INTO pgoutbox.alembic_version VALUES ('{name_of(number)}')"
    return f"run by psql, as the role that migrates: {table}; INSERT {row}; then run: pgoutbox migrate"


def _stamped(named: Named, newest: int) -> Mismatch:
    correction = "DELETE FROM {0} WHERE version_num = '{1}'"
    if newest:
        correction = "UPDATE {0} SET version_num = '{2}' WHERE version_num = '{1}'"
    statement = correction.format(named.table, named.revision, name_of(newest))
    has = f"the schema has {name_of(newest)}" if newest else "the database has no tables of pgoutbox"
    command = "pgoutbox migrate" if named.table == "pgoutbox.alembic_version" else "alembic upgrade heads"
    return Mismatch(
        "revision-stamped",
        f"{named.table} names revision {named.revision}, but {has}",
        f"run by psql: {statement}; then run: {command}",
    )


def _all_named_in(connection: psycopg.Connection[Any]) -> list[Named]:
    """Return the revisions of all version tables. That of a table that this role may not read is empty."""
    found = []
    with connection.cursor(row_factory=tuple_row) as cursor:
        for schema, name, title, is_readable in cursor.execute(sql.VERSION_TABLES).fetchall():
            rows = [("",)]
            if is_readable:
                statement = SQL("SELECT v.version_num FROM {} AS v ORDER BY 1").format(Identifier(schema, name))
                rows = cursor.execute(statement).fetchall()
            found += [Named(title, str(revision)) for (revision,) in rows]
    return found
