"""Migrations of the schema `pgoutbox`, stand-alone (`pgoutbox migrate`) or in the host application's own Alembic.

A stand-alone run is one transaction for each revision, with the version table `pgoutbox.alembic_version`. Only one run
is active at a time. A host that prefers a single history adds `pgoutbox:migrations/sql/../versions` to its
`version_locations`, and needs only `include_name` of this module. The DDL is in `migrations/sql`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import psycopg
from psycopg.errors import (
    DuplicateSchema,
    DuplicateTable,
    IdleInTransactionSessionTimeout,
    InvalidSchemaName,
    LockNotAvailable,
    ObjectInUse,
    UndefinedTable,
    UniqueViolation,
)

from pgoutbox.database import connections, revisions
from pgoutbox.database.index_builds import Index, build
from pgoutbox.database.revisions import digest_of, find_mismatch, has_table, name_of, named_in, number_of
from pgoutbox.database.server import PACKAGE_VERSION
from pgoutbox.errors import ConfigurationError, MissingExtraError, SchemaError
from pgoutbox.observability.events import LogEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from alembic.config import Config
    from sqlalchemy import Connection

T = TypeVar("T")

_log = logging.getLogger("pgoutbox.migrate")

SCHEMA = "pgoutbox"
VERSION_TABLE = "alembic_version"
DEFAULT_LOCK_TIMEOUT_SECONDS = 0.9
DEFAULT_PATIENCE_SECONDS = 30.0

_MINIMUM_SERVER_VERSION = 150000
_PAUSE_SECONDS = (0.2, 1.0)  # Between two tries, so that statements that wait behind the migration can run.
_OWN_REVISION = re.compile(r"^revision = ['\"]pgoutbox_\w+['\"]$", re.MULTILINE)
# Report another run that has the lock for longer.
_WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"
# The downgrade reads in this setting which messages it may delete.
_DELETE_ALL = "SET LOCAL pgoutbox.delete_messages = 'all'"
_DELETE_DELIVERED = "SET LOCAL pgoutbox.delete_messages = 'delivered'"

# The table that Alembic would create. A run locks it, because any login of the database could take an advisory lock.
_CREATE_VERSION_TABLE = """
CREATE TABLE pgoutbox.alembic_version (
    version_num varchar(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)
"""
_LOCK_VERSION_TABLE = "LOCK TABLE pgoutbox.alembic_version IN SHARE ROW EXCLUSIVE MODE"
# A revision of an application's history does not wait for it: the build may wait for that transaction.
_LOCK_BUILDS = "LOCK TABLE pgoutbox.revision IN SHARE UPDATE EXCLUSIVE MODE"
_LOCK_HOLDER = """
SELECT concat_ws(', ', 'process ' || a.pid, 'user ' || a.usename, 'application ' || nullif(a.application_name, ''))
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_database AS d ON d.oid = l.database AND d.datname = current_database()
JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.relation = to_regclass('pgoutbox.alembic_version')
    AND l.granted
    AND l.mode <> 'AccessShareLock'
LIMIT 1
"""

# Repeated grants change nothing, and take a lock. The function names the roles that it sets up.
_HAS_ROLES = """
SELECT
    (
        SELECT coalesce(bool_and(has_schema_privilege(to_regrole(named.role[1]), 'pgoutbox', 'USAGE') IS TRUE), false)
        FROM pg_catalog.pg_proc AS f
        CROSS JOIN LATERAL regexp_matches(f.prosrc, $$'(pgoutbox_[a-z_]+)'$$, 'g') AS named(role)
        WHERE f.oid = to_regprocedure('pgoutbox.set_up_roles()')
    )
    AND NOT EXISTS (
        SELECT
        FROM (
            SELECT c.relowner FROM pg_catalog.pg_class AS c WHERE c.relnamespace = 'pgoutbox'::regnamespace
            UNION ALL
            SELECT p.proowner FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = 'pgoutbox'::regnamespace
        ) AS owned(by_role)
        JOIN pg_catalog.pg_roles AS o ON o.oid = owned.by_role AND o.rolsuper
    )
"""

# A run that is suspended, or whose machine is lost, ends: the application waits behind its locks.
_LIMIT_IDLE = "SET LOCAL idle_in_transaction_session_timeout = '1s'"
# The first statement of a revision that changes the tables of messages.
LOCK_MESSAGES = "SELECT pgoutbox._lock_messages()"
FORGET_REVISION = "DELETE FROM pgoutbox.revision WHERE number = (SELECT max(r.number) FROM pgoutbox.revision AS r)"
_NOTE_REVISION = "SELECT pgoutbox._note_revision(:number, :lowest_package, :applied_by, :digest)"

_LOST_TO_ANOTHER_RUN = (
    LockNotAvailable, UniqueViolation, DuplicateSchema, DuplicateTable, UndefinedTable, InvalidSchemaName,
)  # fmt: skip

History = Literal["pgoutbox", "application"]


class _LockedError(SchemaError):
    """Nothing was changed, because of a lock of another transaction or a pause: a later try may succeed."""

    def __init__(self, why: str, what: str) -> None:
        super().__init__(what)
        self.why = why


class PendingRevision(NamedTuple):
    """A revision that a database does not have, and the indexes to build before it."""

    name: str
    indexes: tuple[Index, ...]


class SchemaState(NamedTuple):
    """The revision of a database, and the Alembic history that migrated it; None and None without the schema.

    `fault` is a reason to correct something by hand before the next migration, with the next step.
    """

    revision: str | None
    history: History | None
    fault: str | None = None


# Alembic keeps the current migration in module-level state, so only one may run at a time in a process.
_alembic_state = threading.Lock()


def upgrade(
    dsn: str,
    revision: str = "head",
    *,
    report: Callable[[str], None] | None = None,
    lock_timeout_seconds: float = DEFAULT_LOCK_TIMEOUT_SECONDS,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    deployment: str | None = None,
) -> None:
    """Apply the revisions up to `revision`, each in one transaction. Do nothing if they are applied already.

    It repeats no grants if each role of pgoutbox may use the schema: `grants` does.

    A new schema is one transaction. Large indexes of a revision are built before its transaction, while messages flow.

    A new schema gets the name `deployment`: only workers with this PGOUTBOX_DEPLOYMENT send from it. That of a schema
    that exists is changed by `pgoutbox adopt`, because its workers may have no name yet.

    `dsn` is any libpq connection string or URL. If another migration of this database is running, it reports that
    through `report` and waits for its end. It waits at most `lock_timeout_seconds` for any other lock, because the
    application waits behind it. Then it begins the revision again, without any change, for `patience_seconds`, and in
    the end raises `SchemaError`.

        upgrade("postgresql://app@localhost/app", report=print)
    """
    tell, target = report or _log.info, revision

    def run(connection: Connection) -> str | None:
        return _upgrade(connection, dsn, target, tell, deployment)

    while rest := _patiently(dsn, run, tell, lock_timeout_seconds, patience_seconds, creates=True):
        target = rest


def _upgrade(
    connection: Connection, dsn: str, target: str, report: Callable[[str], None], deployment: str | None
) -> str | None:
    """Build the indexes of the next revision, or apply it, or a new schema. Return the target until it is there."""
    before = _require_own_history(connection)
    is_new = before is None
    config = _config(connection)
    pending = [] if before is None else _pending(config, before, target)
    # This transaction excludes other runs, and has locked nothing else. A build uses up no patience of the next one.
    if pending and build(dsn, pending[0].indexes, report):
        return pending[-1].name
    if not is_new and not pending and connection.exec_driver_sql(_HAS_ROLES).scalar():
        return None
    # Nothing waits behind a new schema.
    _run_alembic("upgrade", config, pending[0].name if pending else target, limited=None if is_new else connection)
    if is_new and deployment is not None:
        connection.exec_driver_sql("UPDATE pgoutbox.home SET deployment = %(name)s", {"name": deployment})
    is_last = len(pending) <= 1
    if (missing := _set_up_roles(connection)) and is_last:
        report(
            f"roles are missing that you may not create: {', '.join(missing)}. "
            f"Let a role that may create roles run `{create_roles_sql(missing)}`, "
            "then run `pgoutbox migrate grants`"
        )
    return None if is_last else pending[-1].name


def build_indexes(
    dsn: str,
    *,
    report: Callable[[str], None] | None = None,
    lock_timeout_seconds: float = DEFAULT_LOCK_TIMEOUT_SECONDS,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> None:
    """Build the large indexes of the next revision while messages flow, for an application's own Alembic history.

    Its `alembic upgrade` then adopts them. Without it, an index is built while enqueues wait. Run it again after an
    error: it builds the remaining indexes. It waits and gives up like `upgrade`.
    """
    tell = report or _log.info

    def run(connection: Connection) -> None:
        driver = _driver_of(connection)
        _require_match(driver)
        if not has_table(driver, "message"):
            raise SchemaError("this database has no schema pgoutbox; run: pgoutbox migrate")
        connection.exec_driver_sql(_LOCK_BUILDS)
        for revision in pending_revisions(_newest_name(driver))[:1]:
            build(dsn, revision.indexes, tell)

    _patiently(dsn, run, tell, lock_timeout_seconds, patience_seconds)


def grants(
    dsn: str,
    *,
    lock_timeout_seconds: float = DEFAULT_LOCK_TIMEOUT_SECONDS,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> list[str]:
    """Create the missing roles of pgoutbox, and grant their privileges in this database.

    Run it as the owner of the schema. Idempotent. Returns the roles that are still missing because this role may not
    create roles: `create_roles_sql` returns the statements for a role that may. Raises `SchemaError` for a database
    that is not migrated. It waits and gives up like `upgrade`.
    """

    def run(connection: Connection) -> list[str]:
        missing = _set_up_roles(connection)
        if missing is None:
            raise SchemaError("this database has no schema pgoutbox; run: pgoutbox migrate")
        return missing

    return _patiently(dsn, run, _log.info, lock_timeout_seconds, patience_seconds)


def create_roles_sql(missing: Collection[str]) -> str:
    """Return the statements that create these roles."""
    return " ".join(f"CREATE ROLE {name} NOLOGIN;" for name in missing)


def downgrade(
    dsn: str,
    revision: str,
    *,
    delete_messages: bool = False,
    report: Callable[[str], None] | None = None,
    lock_timeout_seconds: float = DEFAULT_LOCK_TIMEOUT_SECONDS,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> None:
    """Revert the revisions after `revision` in one transaction; "base" reverts all and deletes all messages.

    It waits and gives up like `upgrade`. "base" also drops the schema, unless it contains your own objects. It raises
    `SchemaError` without any change while a worker runs, and without `delete_messages` if messages are not delivered.
    """
    tell = report or _log.info

    def run(connection: Connection) -> None:
        if _require_own_history(connection) is None:
            return
        connection.exec_driver_sql(_DELETE_ALL if delete_messages else _DELETE_DELIVERED)
        _run_alembic("downgrade", _config(connection), revision, limited=connection)
        if _revision_of(connection) is None:
            connection.exec_driver_sql("DROP TABLE pgoutbox.alembic_version")
            _drop_schema_if_empty(connection)

    _patiently(dsn, run, tell, lock_timeout_seconds, patience_seconds)


def count_rows(dsn: str) -> dict[str, int]:
    """Return the number of messages in each state, and of rows of the `audit`: all that "base" would delete."""
    with _transaction(dsn) as connection:
        if not has_table(_driver_of(connection), "message"):
            return {}
        rows = connection.exec_driver_sql(
            "SELECT m.state, count(*) FROM pgoutbox.message AS m GROUP BY m.state"
            " UNION ALL SELECT 'audit', count(*) FROM pgoutbox.audit HAVING count(*) > 0"
        )
        return {str(name): int(count) for name, count in rows}


def current(dsn: str) -> str | None:
    """Return the revision of the database, whichever history migrated it; None if it was never migrated."""
    return state(dsn).revision


def state(dsn: str) -> SchemaState:
    """Return the revision of the database, and whether pgoutbox or the application's own history migrated it."""
    with _transaction(dsn) as connection:
        driver = _driver_of(connection)
        mismatch = find_mismatch(driver)
        fault = None if mismatch is None else f"{mismatch.what}; {mismatch.fix}"
        if (revision := _revision_of(connection)) is not None:
            return SchemaState(revision, "pgoutbox", fault)
        if not has_table(driver, "message"):
            return SchemaState(None, None, fault)
        return SchemaState(_newest_name(driver), "application", fault)


def deployment_of(dsn: str) -> str | None:
    """Return the name of the deployment whose workers send from this migrated database; None: any worker does."""
    with _transaction(dsn) as connection:
        name = connection.exec_driver_sql("SELECT h.deployment FROM pgoutbox.home AS h").scalar()
        return None if name is None else str(name)


def head() -> str:
    """Return the newest revision in this version of the package."""
    _require_alembic()
    from alembic.script import ScriptDirectory

    newest = ScriptDirectory.from_config(_config()).get_current_head()
    if newest is None:
        raise ConfigurationError(f"no migrations in {version_location()}; the installation is incomplete")
    return newest


def pending_revisions(applied: str) -> list[PendingRevision]:
    """Return the revisions of this package after `applied`, in their order."""
    return _pending(_config(), applied, "head")


def upgrade_sql(revision: str = "head") -> str:
    """Return the SQL script that migrates an empty database to `revision`, for example for a DBA to run with psql.

    `first:second` returns the steps between two revisions. The script is one transaction, like `upgrade`.
    """
    return _script_of(revision).getvalue()


def upgrade_statements(revision: str) -> list[str]:
    """Return the statements of `upgrade_sql`, each with the comments above it."""
    return _script_of(revision).statements


def note_revision(number: int, *, lowest_package: str) -> str:
    """Return the last statement of a revision: it records that it is applied, and the packages that it works with.

    It fails while workers run whose package is lower than `lowest_package`. Later sessions of such a package are
    refused. So a revision that breaks the statements of an earlier package names the first one that it does not break.
    Its downgrade runs `FORGET_REVISION` first. A revision that changes the tables of messages runs `LOCK_MESSAGES`
    first.
    """
    from sqlalchemy import text
    from sqlalchemy.dialects import postgresql

    statement = text(_NOTE_REVISION).bindparams(
        number=number, lowest_package=lowest_package, applied_by=PACKAGE_VERSION, digest=digest_of(number)
    )
    # The script of `--sql` needs the values in the statement.
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    return str(statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


def is_applied_by_another_run(revision: str, down_revision: str | None) -> bool:
    """Wait for another run of an application's history, and return whether it has applied this revision.

    Each revision begins with it, because both runs have read the version table before. Alembic writes the version table
    after the revision, so the row of the other run is set back. Raises Alembic's `CommandError` for a schema that the
    version table does not name, or that is incomplete.
    """
    from alembic import op
    from alembic.util import CommandError
    from sqlalchemy import column, table

    migration = op.get_context()
    if migration.as_sql or migration.version_table_schema == SCHEMA:  # `upgrade` has a lock of its own.
        return False
    connection = op.get_bind()
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(1885826149)")
    versions = table(migration.version_table, column("version_num"), schema=migration.version_table_schema)
    # A later revision has replaced the name of this one.
    named = versions.c.version_num.between(revision, name_of(9999))
    if down_revision is not None:
        connection.execute(versions.update().where(named).values(version_num=down_revision))
        return number_of(revision) in _applied_numbers(connection)
    is_applied = connection.execute(versions.delete().where(named)).rowcount > 0
    if not is_applied and (numbers := _applied_numbers(connection)):
        raise CommandError(
            f"the schema {SCHEMA} exists, and {migration.version_table} does not name its revision: "
            "`pgoutbox migrate` or a restore has created it. To continue it in this history, run: "
            f"alembic stamp {name_of(max(numbers))}, and by psql: DROP TABLE IF EXISTS pgoutbox.alembic_version"
        )
    if not is_applied and connection.exec_driver_sql("SELECT to_regtype('pgoutbox.attempt')").scalar() is not None:
        raise CommandError(
            "the schema pgoutbox is incomplete: an upgrade with AUTOCOMMIT ended in the middle. If no message matters, "
            "run by psql: DROP SCHEMA pgoutbox CASCADE; then run: alembic upgrade heads"
        )
    return is_applied


@contextlib.contextmanager
def refusal_in_a_sentence() -> Iterator[None]:
    """Raise Alembic's `CommandError`, which it prints as one line, if the server refuses to drop the outbox.

    `downgrade` has its own error. The drivers of applications give the SQLSTATE by different names.
    """
    from alembic import op
    from alembic.util import CommandError
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except DBAPIError as error:
        cause = error.orig
        is_refused = ObjectInUse.sqlstate in (getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None))
        if not is_refused or op.get_context().version_table_schema == SCHEMA:
            raise
        # Around the message and its hint, drivers write the class of the error and the place in the block.
        text = str(getattr(cause, "__cause__", None) or cause).partition("pgoutbox: ")[2].partition("CONTEXT:")[0]
        raise CommandError(" ".join(text.split())) from error


def _applied_numbers(connection: Connection) -> set[int]:
    """Return the numbers of the applied revisions, by any driver of the application."""
    if connection.exec_driver_sql("SELECT to_regclass('pgoutbox.revision')").scalar() is None:
        return set()
    return {number for (number,) in connection.exec_driver_sql("SELECT r.number FROM pgoutbox.revision AS r")}


def version_location() -> str:
    """Return the absolute path of the revisions, for a host that cannot use `pgoutbox:migrations/sql/../versions`.

    Its detour keeps Alembic from writing a revision of the host into this package: it writes only into a directory that
    is listed literally.
    """
    return str(revisions.MIGRATIONS.resolve() / "sql" / ".." / "versions")


def check_revisions() -> None:
    """Raise `ConfigurationError` if Alembic wrote a revision of an application among those of this package.

    Alembic does so for the first revision of a history whose only head is that of pgoutbox. The file would be missing
    in the application's repository, and in its next installation.
    """
    versions = Path(version_location())
    for path in sorted(versions.resolve().glob("*.py")):
        if _OWN_REVISION.search(path.read_text(encoding="utf-8")) is None:
            raise ConfigurationError(
                f"{path} is not a revision of pgoutbox: `alembic revision` wrote it into the installed package. "
                "Move it to your own versions directory, and set in it: down_revision = None. "
                "To create a first revision, add: --head base --version-path YOUR_VERSIONS_DIRECTORY"
            )


def include_name(name: str | None, type_: str, parent_names: object) -> bool:  # noqa: ARG001
    """Keep the host's autogenerate away from the schema `pgoutbox`.

    Only a host with `include_schemas=True` needs it, in its `env.py`. Without this option, Alembic only reads the
    default schema.

        context.configure(..., include_schemas=True, include_name=pgoutbox.migrate.include_name)
    """
    return not (type_ == "schema" and name == SCHEMA)


def _patiently(
    dsn: str,
    run: Callable[[Connection], T],
    report: Callable[[str], None],
    lock_timeout_seconds: float,
    patience_seconds: float,
    *,
    creates: bool = False,
) -> T:
    """Run a migration again while another transaction has a lock that it needs, for so long.

    The time in which another migration runs does not count.
    """
    left, is_reported = patience_seconds, False
    while True:
        began_at = time.monotonic()
        try:
            with _migration(dsn, report, lock_timeout_seconds, creates=creates) as connection:
                began_at = time.monotonic()
                return run(connection)
        except _LockedError as error:
            left -= time.monotonic() - began_at
            if left <= 0:
                raise
            if not is_reported:
                report(f"{error.why}; trying again and again")
                is_reported = True
            pause = random.uniform(*_PAUSE_SECONDS)
            left -= pause
            time.sleep(pause)


@contextlib.contextmanager
def _migration(
    dsn: str, report: Callable[[str], None], lock_timeout_seconds: float, *, creates: bool
) -> Iterator[Connection]:
    """Open the transaction of a run, with the lock that excludes other runs until its end."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_transaction(dsn))
        _require_server_version(connection)
        if not _has_locked_out_other_migrations(connection, creates=creates):
            holder = connection.exec_driver_sql(_LOCK_HOLDER).scalar()
            report("another migration is running" + (f" ({holder})" if holder else "") + "; waiting")
            while True:
                # The other run may build an index, and PostgreSQL may make that wait for the end of this transaction.
                stack.close()
                time.sleep(random.uniform(*_PAUSE_SECONDS))
                connection = stack.enter_context(_transaction(dsn))
                if _has_locked_out_other_migrations(connection, creates=creates):
                    break
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{max(1, round(lock_timeout_seconds * 1000))}ms'")
        yield connection


@contextlib.contextmanager
def _transaction(dsn: str) -> Iterator[Connection]:
    _require_alembic()
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    def connect() -> psycopg.Connection[tuple[object, ...]]:
        # A migration of large tables takes long, so it has no timeout. Keepalives detect a lost server.
        return connections.connect(
            dsn,
            purpose="migrate",
            answer_seconds=None,
            autocommit=False,
        )

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    try:
        with engine.begin() as connection:
            # Whatever the role's defaults are. READ COMMITTED sees the version that another run has just committed.
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE")
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")  # While indexes are built.
            yield connection
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(cause, LockNotAvailable):
            raise _LockedError(
                "another transaction has a lock that the migration needs",
                "the migration gave up waiting for a lock that another transaction holds; nothing was changed. "
                "End that transaction, or stop the workers, and run `pgoutbox migrate` again",
            ) from error
        if isinstance(cause, IdleInTransactionSessionTimeout):
            raise _LockedError(
                "the migration paused for a second between two statements, and PostgreSQL ended it",
                "the migration paused for a second between two statements, and PostgreSQL ended it; nothing was "
                "changed. Run `pgoutbox migrate` again",
            ) from error
        if isinstance(cause, ObjectInUse):
            raise SchemaError(f"{cause.diag.message_primary}. {cause.diag.message_hint}") from error
        raise cause or error from None
    finally:
        engine.dispose()


def _has_locked_out_other_migrations(connection: Connection, *, creates: bool) -> bool:
    """Lock the version table, with `creates` create it first. Return False if another run was faster or is active.

    The lock belongs to the transaction and not to the session. So it works through a transaction pooler, and cannot
    outlive the run. Without `creates`, a missing table is not locked, and neither is a schema of a host's history.
    """
    from sqlalchemy.exc import DBAPIError

    connection.exec_driver_sql(_WAIT_BRIEFLY)
    try:
        with connection.begin_nested():
            # CREATE SCHEMA IF NOT EXISTS needs the privilege to create schemas even if the schema exists.
            if creates and connection.exec_driver_sql("SELECT to_regnamespace('pgoutbox')").scalar() is None:
                connection.exec_driver_sql("CREATE SCHEMA pgoutbox")
            has_versions = has_table(_driver_of(connection), VERSION_TABLE)
            if creates and not has_versions and not has_table(_driver_of(connection), "message"):
                connection.exec_driver_sql(_CREATE_VERSION_TABLE)
            elif has_versions:
                connection.exec_driver_sql(_LOCK_VERSION_TABLE)
    except DBAPIError as error:
        if isinstance(error.orig, _LOST_TO_ANOTHER_RUN):
            return False
        raise
    return True


def _require_server_version(connection: Connection) -> None:
    version = int(connection.exec_driver_sql("SELECT current_setting('server_version_num')").scalar() or 0)
    if version < _MINIMUM_SERVER_VERSION:
        raise SchemaError(f"pgoutbox needs PostgreSQL 15 or later; this server is {version // 10000}")


def _revision_of(connection: Connection) -> str | None:
    from alembic.runtime.migration import MigrationContext

    options = {"version_table": VERSION_TABLE, "version_table_schema": SCHEMA}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _newest_name(driver: psycopg.Connection[object]) -> str:
    # The version table of an application does not name this revision if one of its own depends on it.
    return name_of(revisions.newest_in(driver))


def _require_own_history(connection: Connection) -> str | None:
    """Return the revision of the schema, None without one. Raise `SchemaError` if this package cannot migrate it."""
    driver, revision = _driver_of(connection), _revision_of(connection)
    _require_match(driver)
    if revision is None and has_table(driver, "message"):
        tables = "".join(f" ({named.table})" for named in named_in(driver))
        own = "" if tables else f". If `pgoutbox migrate` did, {revisions.record_fix(revisions.newest_in(driver))}"
        raise SchemaError(
            f"the tables in schema {SCHEMA} belong to another Alembic history{tables}; run `alembic upgrade heads` in "
            f"the application that created them{own}"
        )
    if revision is not None and (number := number_of(revision)) and digest_of(number) is None:
        raise SchemaError(
            f"the schema {SCHEMA} is at {revision}, and this version of the package ({PACKAGE_VERSION}) ends at "
            f"{head()}; nothing was changed. Install the version that migrated it: pip install -U pgoutbox"
        )
    return revision


def _require_match(driver: psycopg.Connection[object]) -> None:
    if mismatch := find_mismatch(driver):
        raise SchemaError(f"{mismatch.what}; nothing was changed. To fix it, {mismatch.fix}")


def _driver_of(connection: Connection) -> psycopg.Connection[object]:
    """Return the driver's connection, in the same transaction."""
    return cast("psycopg.Connection[object]", connection.connection.driver_connection)


def _set_up_roles(connection: Connection) -> list[str] | None:
    """Return the missing roles; None if the database is not migrated."""
    if connection.exec_driver_sql("SELECT to_regprocedure('pgoutbox.set_up_roles()')").scalar() is None:
        return None
    return list(connection.exec_driver_sql("SELECT pgoutbox.set_up_roles()").scalar() or ())


def _drop_schema_if_empty(connection: Connection) -> None:
    from sqlalchemy.exc import DBAPIError

    try:
        with connection.begin_nested():
            connection.exec_driver_sql("DROP SCHEMA pgoutbox RESTRICT")
    except DBAPIError as error:
        if not isinstance(error.orig, psycopg.errors.DependentObjectsStillExist | psycopg.errors.InsufficientPrivilege):
            raise
        _log.info("schema kept", extra={"event": LogEvent.SCHEMA_KEPT.value, "reason": str(error.orig)})


class _Script(io.StringIO):
    """A script of Alembic, which writes each statement by one call."""

    def __init__(self) -> None:
        super().__init__()
        self.statements: list[str] = []

    def write(self, text: str, /) -> int:
        self.statements.append(text)
        return super().write(text)


def _script_of(revision: str) -> _Script:
    _require_alembic()
    script = _Script()
    _run_alembic("upgrade", _config(output=script), revision, sql=True)
    return script


def _run_alembic(
    direction: str, config: Config, revision: str, *, sql: bool = False, limited: Connection | None = None
) -> None:
    """Run Alembic. The `limited` connection ends if it is idle for a second from then on."""
    from alembic import command
    from alembic.util import CommandError

    run = command.upgrade if direction == "upgrade" else command.downgrade
    try:
        with _alembic_state:
            # Not earlier: this process may import Alembic, or migrate other databases first.
            if limited is not None:
                limited.exec_driver_sql(_LIMIT_IDLE)
            run(config, revision, sql=sql)
    except CommandError as error:
        raise _revision_error(direction, revision, error) from error


def _pending(config: Config, applied: str, target: str) -> list[PendingRevision]:
    from alembic.script import ScriptDirectory
    from alembic.script.revision import RevisionError

    try:
        later = ScriptDirectory.from_config(config).iterate_revisions(target, applied, implicit_base=True)
        return [PendingRevision(one.revision, getattr(one.module, "INDEXES", ())) for one in later][::-1]
    except RevisionError as error:
        raise _revision_error("upgrade", target, error) from error


def _revision_error(direction: str, revision: str, error: Exception) -> SchemaError:
    return SchemaError(
        f"cannot {direction} to revision {revision!r}: {error}; this version of the package ends at {head()!r}"
    )


def _config(connection: Connection | None = None, *, output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    check_revisions()
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(revisions.MIGRATIONS.resolve()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _require_alembic() -> None:
    try:
        import alembic  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("migrating the schema") from error
