"""Tests migrations up and down beside business transactions that enqueue and cancel: no transaction fails."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import migrate
from pgoutbox.errors import SchemaError
from tests.support.revisions import FIRST, add_revision
from tests.support.servers import open_workshop
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROLES: Final = (
    "pgoutbox_owner",
    "pgoutbox_producer",
    "pgoutbox_worker",
    "pgoutbox_operator",
    "pgoutbox_viewer",
)
RIGHTS_IN_A_DATABASE_THAT_IS_GONE: Final = """
CREATE ROLE pgoutbox_gone;
INSERT INTO pg_shdepend (dbid, classid, objid, objsubid, refclassid, refobjid, deptype)
SELECT 4000000000, 'pg_namespace'::regclass, 1, 0, 'pg_authid'::regclass, r.oid, 'a'
FROM pg_roles AS r
WHERE r.rolname LIKE 'pgoutbox\\_%'
"""
ROUNDS: Final = 3

BUSINESS: Final = (
    "SELECT pgoutbox.enqueue('mail', '1')",
    "SELECT pgoutbox.enqueue('mail', '1', coalesce_key => 'c')",
    "SELECT pgoutbox.enqueue('mail', '1', ordering_key => 'o')",
    "SELECT pgoutbox.cancel((SELECT max(id) FROM pgoutbox.message_live))",
)


def test_no_business_transaction_fails_during_a_migration_up_or_down(
    empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = add_revision(tmp_path, monkeypatch)
    migrate.upgrade(empty_dsn, FIRST)
    stopping = threading.Event()

    def produce() -> int:
        done = 0
        with psycopg.connect(empty_dsn) as connection:
            while not stopping.is_set():
                for statement in BUSINESS:
                    connection.execute(statement.encode())
                connection.commit()
                done += 1
        return done

    with ThreadPoolExecutor(3) as threads:
        producers = [threads.submit(produce) for _ in range(3)]
        try:
            for _ in range(ROUNDS):
                patiently(lambda: migrate.upgrade(empty_dsn))
                assert migrate.current(empty_dsn) == newest
                patiently(lambda: migrate.downgrade(empty_dsn, FIRST))
        finally:
            stopping.set()
        done = sum(producer.result() for producer in producers)
    assert done > 0
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (3 * done,)


def test_roles_remain_if_another_database_with_their_rights_is_dropped_concurrently() -> None:
    """Rights in a database that no longer exists simulate this: DROP ROLE raises the same error."""
    with open_workshop(os.environ) as workshop, workshop.server() as server:
        server.start()
        with server.connect() as db:
            db.execute("SET allow_system_table_mods = on")
            db.execute(RIGHTS_IN_A_DATABASE_THAT_IS_GONE)
            with pytest.raises(psycopg.errors.InternalError_, match="cache lookup failed for database"):
                db.execute("DROP ROLE pgoutbox_gone")
            migrate.downgrade(server.dsn, "base")
            roles = db.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'pgoutbox\\_%' ORDER BY 1").fetchall()
    assert [name for (name,) in roles] == ["pgoutbox_gone", *sorted(ROLES)]


def patiently(run: Callable[[], None]) -> None:
    """Run it again, as its message says, while it cannot get a lock."""

    def succeeds() -> bool:
        with contextlib.suppress(SchemaError):
            run()
            return True
        return False

    wait_until(succeeds, lambda: "the migration never got its locks")
