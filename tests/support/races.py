"""Two sessions in an order that the test decides, without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, LiteralString, TypeVar

R = TypeVar("R")

ADVISORY_LOCKS: Final[LiteralString] = (
    "(SELECT l.* FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory') AS l"
)
"""Only sessions of this database: tests of other databases may use the same server."""

if TYPE_CHECKING:
    from concurrent.futures import Future

    import psycopg


def stop_reads(db: psycopg.Connection, table: LiteralString) -> None:
    """Stop statements of workers at the first row of this table, while a session has the exclusive advisory lock 1.

    Such a statement has its snapshot, and has not locked a row. The owner of the table is not stopped.
    """
    db.execute(
        f"""
        CREATE FUNCTION public.may_read() RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(1);
            RETURN true;
        END
        $$;
        ALTER TABLE pgoutbox.{table} ENABLE ROW LEVEL SECURITY;
        CREATE POLICY stop ON pgoutbox.{table} USING (public.may_read())
        """
    )


def until_blocked(observer: psycopg.Connection, waiting: psycopg.Connection, future: Future[R]) -> None:
    """Wait until `waiting`, whose statement the future runs, waits for another session's lock.

    Fail at once if the statement ends without having waited. The tests' lock_timeout ends every wait.
    """
    while not future.done():
        row = observer.execute("SELECT cardinality(pg_blocking_pids(%s))", (waiting.info.backend_pid,)).fetchone()
        if row is not None and row[0]:
            return
    raise AssertionError(f"the statement did not wait: {future.exception() or future.result()}")


# Row security runs this function for each row of a statement, and so stops the second one in its midst.
_STOP_IN_STATEMENT: Final[LiteralString] = """
CREATE SEQUENCE public.calls;
CREATE FUNCTION public.may_read() RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF nextval('public.calls') = 2 THEN
        PERFORM pg_advisory_xact_lock(1);
    END IF;
    RETURN true;
END
$$;
ALTER TABLE pgoutbox.message_live ENABLE ROW LEVEL SECURITY;
CREATE POLICY stop ON pgoutbox.message_live USING (public.may_read());
GRANT USAGE ON SCHEMA pgoutbox TO pg_monitor;
GRANT EXECUTE ON FUNCTION pgoutbox._lock_pending, pgoutbox._reads_committed TO pg_monitor;
GRANT SELECT, UPDATE ON pgoutbox.message_live TO pg_monitor;
"""


def prepare_slow_lock(owner: psycopg.Connection, gate: psycopg.Connection) -> None:
    """Make `lock_slowly` wait between the snapshot and the row lock of its statement, until the gate ends."""
    owner.execute(_STOP_IN_STATEMENT)
    gate.execute("SELECT pg_advisory_xact_lock(1)")


def lock_slowly(business: psycopg.Connection, message_id: int) -> list[int]:
    """Lock a message if it is pending, as a cancel does. Return the ids of the locked messages."""
    business.execute("SET ROLE pg_monitor")
    ((locked,),) = business.execute("SELECT pgoutbox._lock_pending(%s)", [[message_id]]).fetchall()
    return list(locked)
