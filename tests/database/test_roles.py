"""Tests that each role can do exactly its part, by the catalog and by trying."""

from __future__ import annotations

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
import pytest

from pgoutbox import (
    Cancelled,
    CancelResult,
    Context,
    EditResult,
    Enqueued,
    Message,
    NewMessage,
    Outbox,
    Permanent,
    RescheduleResult,
    RetryPolicy,
    Skip,
    Snooze,
    Transient,
    migrate,
)
from pgoutbox.cli.main import main
from pgoutbox.database import operator_connection, sql
from pgoutbox.kernel import statements
from pgoutbox.message import State
from pgoutbox.operations import ClosedBreaker, MessageFilter, Operator, Rate
from pgoutbox.settings import load_settings
from pgoutbox.worker import Worker
from tests.support import races
from tests.support.line_server import Line, LineTransport, Mood, line_host
from tests.support.messages import ADD_ATTEMPT, SET_LAST_ERROR, put
from tests.support.missing import setting_of_old_servers
from tests.support.outbox_actions import enqueue, lapse, row_of, running, settings_for
from tests.support.proxy import proxy_to
from tests.support.roles import ROLES, login
from tests.support.waiting import until
from tests.support.worker_sql import WatchedWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect

PRODUCER, WORKER, OPERATOR, VIEWER = ROLES

# --- the catalog ------------------------------------------------------------------------------------------------------

VIEWS: Final = (
    "attempt_view", "blackout_view", "breaker_view", "fair_share_view", "home_view", "in_flight_view", "message_view",
    "pulse_view", "queue_view", "redirect_view", "retention_view", "schedule_view", "suppression_view",
    "topic_pause_view", "waiting_view", "worker_event_view", "worker_view",
)  # fmt: skip

LIMITED: Final = (
    "INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst, max_in_flight) VALUES ('limited', 5, 1, 5, 3)"
)

READ_BY_WORKERS: Final = (
    "blackout_view breaker_view cancel_request content fair_share_view home_view in_flight_view key_head "
    "maintenance_run message message_id_seq message_live message_view pulse_view queue queue_view redirect_view "
    "retention retention_view revision schedule schedule_view topic_pause topic_pause_view waiting_view "
    "worker_event_view worker_view"
)
TABLE_RIGHTS: Final[dict[str, dict[str, str]]] = {
    PRODUCER: {"revision": "SELECT"},
    WORKER: {
        **dict.fromkeys(READ_BY_WORKERS.split(), "SELECT"),
        "breaker": "DELETE INSERT SELECT UPDATE",
        "claim": "DELETE INSERT SELECT UPDATE",
        "worker": "DELETE INSERT SELECT UPDATE",
    },
    OPERATOR: dict.fromkeys((*VIEWS, "audit", "queue", "retention", "revision"), "SELECT"),
    VIEWER: dict.fromkeys((*VIEWS, "revision"), "SELECT"),
}

COLUMN_RIGHTS: Final[dict[str, dict[str, str]]] = {
    PRODUCER: {},
    WORKER: {
        "message UPDATE": "attempt_count attempts available_at claimed_at finished_at key_in_flight lane last_error "
        "max_attempts skip_reason state superseded_by worker",
        "message_failed SELECT": "halts_key id ordering_key queue",
        "message_live UPDATE": "lane",
        "queue UPDATE": "begun_count tokens tokens_at",
        "schedule UPDATE": "problem",
        "maintenance_run INSERT": "began_at due_at worker",
        "maintenance_run UPDATE": "began_at due_at succeeded_at worker",
    },
    OPERATOR: {
        "queue INSERT": "burst max_in_flight name paused_at rate_count rate_seconds resume_at",
        "queue UPDATE": "burst max_in_flight paused_at rate_count rate_seconds resume_at",
    },
    VIEWER: {},
}

ENQUEUE_FUNCTIONS: Final = (
    "cancel cancel_all cancel_by_key edit enqueue enqueue_fanout enqueue_many _enqueue_receipt find "
    "lock_for_enqueue reschedule set_schedule _state_of suppress _suppressed unset_schedule unsuppress"
)
PRUNE_BY_RULES: Final = "_prune_audit _prune_by_rule _prune_content _prune_dedupe_by_rule _prune_keys"
MAINTENANCE_FUNCTIONS: Final = "_drop_partition _kept_until make_partition"
LOOK_FUNCTIONS: Final = (
    "_cause_of _done_estimate _error_group failures _handled_as _here _hold_of partitions _redacted_json "
    "_redacted_text _require_home _require_package _tokens_of"
)
FUNCTION_RIGHTS: Final[dict[str, str]] = {
    PRODUCER: f"{ENQUEUE_FUNCTIONS} _unsubscribe _cancel_each _is_known_topic partitions _read_redirect _require_home "
    "_require_package",
    WORKER: f"{ENQUEUE_FUNCTIONS} {PRUNE_BY_RULES} {MAINTENANCE_FUNCTIONS} "
    "_bucket_of _cause_of _complete _enqueue_failure _error_group failures _forget_requests _forget_sent "
    "_give_turns _handled_as _here _hold_of _in_flight_of _is_known_topic next_permit_at partitions _permits "
    "read_payloads _read_redirect _redacted_text _require_completion _require_home _require_package _reset_session "
    "_tick_schedule _tokens_of _with_attempt",
    OPERATOR: f"{LOOK_FUNCTIONS} {PRUNE_BY_RULES} {MAINTENANCE_FUNCTIONS} "
    "address_digest import_suppressions suppress _suppressed unsuppress "
    "adopt announce_act _bucket_of cancel cancel_all cancel_by_key _cancel_each clear_redirect close_breaker "
    "correct dismiss _enqueue_act erase _erase _forget_requests _is_known_topic pause_schedule pause_topic prune "
    "_prune_dedupe redrive release reschedule resend resume_schedule resume_topic run_schedule _selected_messages "
    "set_fair_share set_redirect set_retention "
    "snooze _state_of unset_retention",
    VIEWER: LOOK_FUNCTIONS,
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_exactly_these_rights_on_tables(rolled_back: psycopg.Connection, role: str) -> None:
    rows = rolled_back.execute(
        """
        SELECT c.relname, string_agg(acl.privilege_type, ' ' ORDER BY acl.privilege_type)
        FROM pg_class AS c
        CROSS JOIN aclexplode(c.relacl) AS acl
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND acl.grantee = %s::regrole
        GROUP BY c.relname
        """,
        [role],
    ).fetchall()
    assert dict(rows) == TABLE_RIGHTS[role]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_exactly_these_rights_on_columns(rolled_back: psycopg.Connection, role: str) -> None:
    rows = rolled_back.execute(
        """
        SELECT c.relname || ' ' || acl.privilege_type, string_agg(a.attname, ' ' ORDER BY a.attname)
        FROM pg_attribute AS a
        JOIN pg_class AS c ON c.oid = a.attrelid
        CROSS JOIN aclexplode(a.attacl) AS acl
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND acl.grantee = %s::regrole
        GROUP BY c.relname, acl.privilege_type
        """,
        [role],
    ).fetchall()
    assert dict(rows) == COLUMN_RIGHTS[role]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_exactly_these_functions(rolled_back: psycopg.Connection, role: str) -> None:
    rows = rolled_back.execute(
        """
        SELECT p.proname
        FROM pg_proc AS p
        WHERE p.pronamespace = 'pgoutbox'::regnamespace AND has_function_privilege(%s, p.oid, 'EXECUTE')
        """,
        [role],
    ).fetchall()
    assert {name for (name,) in rows} == set(FUNCTION_RIGHTS[role].split())


@pytest.mark.parametrize("role", ROLES)
def test_a_role_cannot_log_in_and_has_no_other_attributes(rolled_back: psycopg.Connection, role: str) -> None:
    row = rolled_back.execute(
        """
        SELECT rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls,
            EXISTS (SELECT FROM pg_auth_members AS m WHERE m.member = r.oid),
            has_schema_privilege(r.oid, 'pgoutbox', 'USAGE'),
            has_schema_privilege(r.oid, 'pgoutbox', 'CREATE')
        FROM pg_roles AS r
        WHERE rolname = %s
        """,
        [role],
    ).fetchone()
    assert row == (False, False, True, False)


GRANTED_TO_PUBLIC: Final = """
    SELECT 'schema', acl.privilege_type
    FROM pg_namespace AS n
    CROSS JOIN aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS acl
    WHERE n.nspname = 'pgoutbox' AND acl.grantee = 0
    UNION ALL
    SELECT c.relname, acl.privilege_type
    FROM pg_class AS c
    CROSS JOIN aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS acl
    WHERE c.relnamespace = 'pgoutbox'::regnamespace AND acl.grantee = 0
    UNION ALL
    SELECT p.proname, acl.privilege_type
    FROM pg_proc AS p
    CROSS JOIN aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS acl
    WHERE p.pronamespace = 'pgoutbox'::regnamespace AND acl.grantee = 0
"""


def test_public_has_no_privileges(rolled_back: psycopg.Connection) -> None:
    assert rolled_back.execute(GRANTED_TO_PUBLIC).fetchall() == []
    rolled_back.execute("CREATE FUNCTION pgoutbox.open_to_all() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    assert rolled_back.execute(GRANTED_TO_PUBLIC).fetchall() == [("open_to_all", "EXECUTE")]


@pytest.mark.slow
def test_default_privileges_of_the_migrating_role_grant_public_nothing(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        for objects in ("SCHEMAS", "TABLES", "SEQUENCES", "FUNCTIONS"):
            connection.execute(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {objects} TO PUBLIC".encode())
    migrate.upgrade(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute(GRANTED_TO_PUBLIC).fetchall() == []


def test_a_function_of_another_schema_that_looks_like_an_act_gets_no_grant(rolled_back: psycopg.Connection) -> None:
    """Its name would be a part of the owner's statement."""
    name = "find TO PUBLIC; GRANT EXECUTE ON FUNCTION pgoutbox.edit"
    act = f'CREATE FUNCTION public."{name}"() RETURNS pgoutbox.act_result LANGUAGE sql RETURN NULL::pgoutbox.act_result'
    rolled_back.execute(act.encode())
    rolled_back.execute("SELECT pgoutbox.set_up_roles()")
    assert rolled_back.execute(GRANTED_TO_PUBLIC).fetchall() == []


def test_no_object_of_the_schema_belongs_to_a_superuser(rolled_back: psycopg.Connection) -> None:
    theirs = """
        SELECT o.name
        FROM (
            SELECT nspname, nspowner FROM pg_namespace WHERE nspname = 'pgoutbox'
            UNION ALL
            SELECT relname, relowner FROM pg_class WHERE relnamespace = 'pgoutbox'::regnamespace
            UNION ALL
            SELECT proname, proowner FROM pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace
        ) AS o(name, owner)
        JOIN pg_roles AS r ON r.oid = o.owner
        WHERE r.rolsuper
    """
    assert rolled_back.execute(theirs).fetchall() == []
    rolled_back.execute("ALTER SCHEMA pgoutbox OWNER TO CURRENT_USER")
    assert rolled_back.execute(theirs).fetchall() == [("pgoutbox",)]


def test_two_concurrent_set_ups_of_the_roles_both_succeed(connect: Connect) -> None:
    db, first, second = connect(autocommit=True), connect(), connect(autocommit=True)
    statement: LiteralString = "SELECT pgoutbox.set_up_roles()"
    first.execute(statement)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: second.execute(statement).fetchall())
        races.until_blocked(db, second, waiting)
        first.commit()
        assert waiting.result() == [([],)]


def test_a_superuser_transfers_only_its_own_objects(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("CREATE ROLE pgoutbox_test_somebody")
    rolled_back.execute("CREATE FUNCTION pgoutbox.theirs() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    rolled_back.execute("CREATE TABLE pgoutbox.theirs (id integer)")
    for thing in ("FUNCTION pgoutbox.theirs()", "TABLE pgoutbox.theirs", "SCHEMA pgoutbox"):
        rolled_back.execute(f"ALTER {thing} OWNER TO pgoutbox_test_somebody".encode())
    rolled_back.execute("CREATE FUNCTION pgoutbox.ours() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    rolled_back.execute("SELECT pgoutbox.set_up_roles()")
    owners = rolled_back.execute(
        """
        SELECT proname, proowner::regrole::text FROM pg_proc WHERE proname IN ('theirs', 'ours')
        UNION ALL
        SELECT relname, relowner::regrole::text FROM pg_class WHERE relname = 'theirs'
        UNION ALL
        SELECT nspname, nspowner::regrole::text FROM pg_namespace WHERE nspname = 'pgoutbox'
        """
    ).fetchall()
    assert sorted(owners) == [
        ("ours", "pgoutbox_owner"),
        ("pgoutbox", "pgoutbox_test_somebody"),
        ("theirs", "pgoutbox_test_somebody"),
        ("theirs", "pgoutbox_test_somebody"),
    ]


@pytest.fixture
def of_a_superuser(connect: Connect) -> psycopg.Connection:
    """Open an autocommit connection to a schema that was restored on a server without the roles."""
    db = connect(autocommit=True)
    db.execute("REASSIGN OWNED BY pgoutbox_owner TO CURRENT_USER")
    return db


def owners_of(db: psycopg.Connection) -> set[str]:
    rows = db.execute("SELECT relowner::regrole::text FROM pg_class WHERE relnamespace = 'pgoutbox'::regnamespace")
    return {owner for (owner,) in rows}


@pytest.mark.slow
def test_a_superuser_holds_no_lock_while_it_waits_for_an_open_transaction(
    of_a_superuser: psycopg.Connection, connect: Connect
) -> None:
    producer, superuser = connect(), connect(autocommit=True)
    (first,) = producer.execute("SELECT pgoutbox.enqueue('mail', '0')").fetchone() or (0,)
    producer.commit()  # A session that knows the tables locks fewer of them from now on.
    producer.execute("SELECT pgoutbox.enqueue('mail', '1')")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: superuser.execute("SELECT pgoutbox.set_up_roles()").fetchall())
        races.until_blocked(of_a_superuser, superuser, waiting)
        producer.execute("SELECT pgoutbox.enqueue('mail', '2', dedupe_key => 'b', ordering_key => 'c')")
        producer.execute("SELECT pgoutbox.enqueue('mail', '2', coalesce_key => 'd')")
        assert producer.execute("SELECT pgoutbox.cancel(%s)", [first]).fetchone() == ("cancelled",)
        producer.execute("SELECT FROM pgoutbox.waiting_view, pgoutbox.message_view")
        producer.commit()
        assert waiting.result() == [([],)]
    assert owners_of(of_a_superuser) == {"pgoutbox_owner"}


def test_a_superuser_releases_its_locks_before_the_deadlock_timeout(
    of_a_superuser: psycopg.Connection, connect: Connect
) -> None:
    producer, superuser = connect(), connect(autocommit=True)
    (first,) = of_a_superuser.execute("SELECT pgoutbox.enqueue('mail', '1')").fetchone() or (0,)
    producer.execute("SELECT pgoutbox.cancel(%s)", [first])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: superuser.execute("SELECT pgoutbox.set_up_roles()").fetchall())
        # The session has locked the sequence, and the transaction that has cancelled blocks it at the messages.
        races.until_blocked(of_a_superuser, superuser, waiting)
        producer.execute("SELECT pgoutbox.enqueue('mail', '2')")
        producer.commit()
        assert waiting.result() == [([],)]
    assert owners_of(of_a_superuser) == {"pgoutbox_owner"}


@pytest.mark.slow
def test_a_superuser_gives_up_after_the_lock_timeout(of_a_superuser: psycopg.Connection, connect: Connect) -> None:
    producer, superuser = connect(), connect()
    producer.execute("SELECT pgoutbox.enqueue('mail', '1')")
    superuser.execute("SET LOCAL lock_timeout = '300ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        superuser.execute("SELECT pgoutbox.set_up_roles()")
    assert "pgoutbox_owner" not in owners_of(of_a_superuser)


UNSAFE_DEFINERS: Final = """
    SELECT p.proname
    FROM pg_proc AS p
    JOIN pg_roles AS o ON o.oid = p.proowner
    WHERE p.pronamespace = 'pgoutbox'::regnamespace
        AND p.prosecdef
        AND (
            NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)
            OR o.rolsuper
            OR o.rolcanlogin
        )
"""


def test_security_definer_functions_pin_their_path_and_belong_to_no_superuser(rolled_back: psycopg.Connection) -> None:
    (count,) = rolled_back.execute(
        "SELECT count(*) FROM pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace AND prosecdef"
    ).fetchone() or (0,)
    assert count >= 15
    assert rolled_back.execute(UNSAFE_DEFINERS).fetchall() == []
    rolled_back.execute("ALTER FUNCTION pgoutbox.cancel RESET search_path")
    rolled_back.execute("ALTER FUNCTION pgoutbox.resend(bigint) OWNER TO CURRENT_USER")
    assert sorted(rolled_back.execute(UNSAFE_DEFINERS).fetchall()) == [("cancel",), ("resend",)]


BACKSLASHES: Final = r"""
    SELECT p.proname
    FROM pg_proc AS p
    WHERE p.pronamespace = 'pgoutbox'::regnamespace
        AND strpos(regexp_replace(p.prosrc, '\$(form|pattern)\$.*?\$\1\$|--[^\n]*|E''[^'']*''', '', 'g'), '\') > 0
"""


def test_no_literal_of_a_function_depends_on_the_session(rolled_back: psycopg.Connection) -> None:
    """A function is parsed in its caller's session. There, `standard_conforming_strings` changes a backslash."""
    assert rolled_back.execute(BACKSLASHES).fetchall() == []
    rolled_back.execute(r"CREATE FUNCTION pgoutbox.f() RETURNS text LANGUAGE sql AS $f$ SELECT 'a\.b' $f$")
    assert rolled_back.execute(BACKSLASHES).fetchall() == [("f",)]


def test_a_caller_with_old_strings_sets_no_redirect_that_workers_refuse(dsn: str) -> None:
    with login(dsn, "pgoutbox_operator") as its_dsn, psycopg.connect(its_dsn, autocommit=True) as session:
        with setting_of_old_servers():
            session.execute("SET standard_conforming_strings = off")
        for target in ("a b@example.org", "ann@example org", "ann,bob@example.org", "@a,b"):
            with pytest.raises(psycopg.errors.InvalidParameterValue, match="set_redirect: target: must be an address"):
                session.execute("SELECT pgoutbox.set_redirect(%s)", [target])


def test_dynamic_sql_quotes_every_name(rolled_back: psycopg.Connection) -> None:
    rows = rolled_back.execute(
        r"""
        SELECT p.proname, found.call[1]
        FROM pg_proc AS p
        CROSS JOIN regexp_matches(p.prosrc, 'EXECUTE ([^;]*)', 'g') AS found(call)
        WHERE p.pronamespace = 'pgoutbox'::regnamespace
            AND found.call[1] !~ '^format\(|^owned\.command$|quote_ident\(|^''[A-Z ]+''$'
        """
    ).fetchall()
    assert [row for row in rows if not str(row[1]).startswith("ON FUNCTION")] == []


# --- refusals ---------------------------------------------------------------------------------------------------------

WRITES: Final = (
    "INSERT INTO pgoutbox.message (topic, payload) VALUES ('t', '1')",
    "INSERT INTO pgoutbox.message_live (topic, payload) VALUES ('t', '1')",
    "UPDATE pgoutbox.message SET payload = '2'",
    "UPDATE pgoutbox.message_live SET topic = 'x'",
    "UPDATE pgoutbox.message_done SET state = 'cancelled'",
    "DELETE FROM pgoutbox.message",
    "DELETE FROM pgoutbox.message_live",
    "DELETE FROM pgoutbox.message_done",
    "DELETE FROM pgoutbox.dedupe",
    "DELETE FROM pgoutbox.key_head",
    "UPDATE pgoutbox.key_head SET newest_id = 0",
    "DELETE FROM pgoutbox.content",
    "UPDATE pgoutbox.audit SET actor = 'somebody else'",
    "DELETE FROM pgoutbox.audit",
    "INSERT INTO pgoutbox.audit (act_id, actor, action, db_role) VALUES (gen_random_uuid(), 'a', 'pause', 'b')",
    "INSERT INTO pgoutbox.audit (act_id, actor, action, acted_at) VALUES (gen_random_uuid(), 'a', 'pause', now())",
    "TRUNCATE pgoutbox.message_live",
    "DO 'BEGIN LOCK TABLE pgoutbox.message_live IN ACCESS EXCLUSIVE MODE; END'",
    "DO 'BEGIN LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE; END'",
    "DO 'BEGIN LOCK TABLE pgoutbox.alembic_version IN SHARE ROW EXCLUSIVE MODE; END'",
    "SELECT nextval('pgoutbox.message_id_seq')",
    "SELECT setval('pgoutbox.message_id_seq', 1)",
    "CREATE TABLE pgoutbox.mine (id integer)",
    "CREATE FUNCTION pgoutbox.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "ALTER TABLE pgoutbox.message ADD COLUMN mine integer",
    "ALTER FUNCTION pgoutbox.cancel SECURITY INVOKER",
    "DROP TABLE pgoutbox.claim",
    (
        "CREATE TRIGGER mine BEFORE UPDATE ON pgoutbox.claim FOR EACH ROW "
        "EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()"
    ),
    "SELECT pgoutbox.set_up_roles()",
    "SELECT pgoutbox._enqueue(ARRAY[NULL::pgoutbox.draft], true)",
    "SET ROLE pgoutbox_owner",
    "SET SESSION AUTHORIZATION pgoutbox_owner",
    "SELECT d.payload_digest FROM pgoutbox.dedupe AS d",
    "SELECT s.key FROM pgoutbox.secret AS s",
    "UPDATE pgoutbox.secret SET is_only = true",
    "SELECT pgoutbox._keyed_digest('act', '1')",
    "SELECT pgoutbox.destination_digest('mailto:ada@example.org')",
    "INSERT INTO pgoutbox.blackout VALUES ('2026-01-01', '2026-01-02')",
    "DELETE FROM pgoutbox.blackout",
    "SELECT pgoutbox._record_act('pause')",
)
LOOKS_AT_PAYLOADS: Final = (
    "SELECT m.payload FROM pgoutbox.message AS m",
    "SELECT m.headers FROM pgoutbox.message_live AS m",
    "SELECT m.payload FROM pgoutbox.message_failed AS m",
    "SELECT m.payload FROM pgoutbox.message_done AS m",
    "SELECT c.body FROM pgoutbox.content AS c",
    "SELECT m.attempts FROM pgoutbox.message AS m",
    "SELECT b.last_error FROM pgoutbox.breaker AS b",
    "SELECT m.id FROM pgoutbox.message AS m FOR UPDATE",
)
CONTROLS: Final = (
    "UPDATE pgoutbox.queue SET paused_at = now()",
    "INSERT INTO pgoutbox.queue (name) VALUES ('bulk')",
    "SELECT pgoutbox.pause_topic('mail')",
    "SELECT pgoutbox.resume_topic('mail')",
    "INSERT INTO pgoutbox.topic_pause (topic) VALUES ('mail')",
    "SELECT pgoutbox.set_retention('*', 'sent', '0 s')",
    "SELECT pgoutbox.unset_retention('*', 'sent')",
    "DELETE FROM pgoutbox.retention",
    "INSERT INTO pgoutbox.retention VALUES ('0 s', '*', 'sent')",
    "SELECT pgoutbox.redrive(ARRAY[1::bigint])",
    "SELECT pgoutbox.resend(1)",
    "SELECT pgoutbox.close_breaker('k')",
    "SELECT pgoutbox.set_redirect('a@b.example')",
    "SELECT pgoutbox.clear_redirect()",
    "SELECT pgoutbox.announce_act('ada')",
    "DELETE FROM pgoutbox.redirect",
    "SELECT pgoutbox.adopt()",
    "UPDATE pgoutbox.home SET database_id = NULL",
    "SELECT pgoutbox.prune(ARRAY['sent'], '0 s', NULL, 1)",
    "SELECT a.actor FROM pgoutbox.audit AS a",
    "INSERT INTO pgoutbox.audit (act_id, actor, action) VALUES (gen_random_uuid(), 'a', 'pause')",
)
DELIVERS: Final = (
    "SELECT pgoutbox._forget_sent(ARRAY[1::bigint], ARRAY[1], ARRAY[now()], 'w')",
    "UPDATE pgoutbox.message SET state = 'sent'",
    (
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error) "
        "VALUES ('k', now(), 1, 'w', 'e')"
    ),
)
PRODUCES: Final = (
    "SELECT pgoutbox.enqueue('t', '1')",
    "SELECT pgoutbox.enqueue_many('[]')",
    "SELECT pgoutbox.enqueue_fanout('{}', '[]')",
)
LOOKS: Final = tuple(f"SELECT FROM pgoutbox.{view}" for view in VIEWS)
REFUSED: Final = {
    PRODUCER: (*WRITES, *LOOKS_AT_PAYLOADS, *CONTROLS, *DELIVERS, *LOOKS),
    WORKER: (*WRITES, *CONTROLS, "SELECT a.error FROM pgoutbox.attempt_view AS a"),
    OPERATOR: (*WRITES, *LOOKS_AT_PAYLOADS, *DELIVERS, *PRODUCES),
    VIEWER: (*WRITES, *LOOKS_AT_PAYLOADS, *CONTROLS, *DELIVERS, *PRODUCES, "SELECT pgoutbox.cancel(1)"),
}


# The folders with the statements that a worker runs on tables, besides those of maintenance, which are functions.
WORKER_FOLDERS: Final = (
    *(f"database/sql/{name}" for name in ("claim", "doorbell", "finish", "gauges")),
    *(f"worker/{name}" for name in ("beside", "breakers", "transactional")),
)
WORKER_STATEMENTS: Final = {
    path.stem.upper(): text
    for folder in WORKER_FOLDERS
    for path in (Path(sql.__file__).parents[2] / folder).glob("[!_]*.sql")
    if (text := getattr(sql, path.stem.upper())).startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE"))
}
KERNEL_STATEMENTS: Final = {name: text for name, text in vars(statements).items() if name.isupper()}


@pytest.mark.parametrize("name", sorted(WORKER_STATEMENTS | KERNEL_STATEMENTS))
def test_a_worker_may_run_each_of_its_statements(dsn: str, name: str) -> None:
    """Also those that run only after a failure."""
    statement: LiteralString = (WORKER_STATEMENTS | KERNEL_STATEMENTS)[name]
    parameters = dict.fromkeys(re.findall(r"%\((\w+)\)s", statement))
    with login(dsn, WORKER) as theirs, psycopg.connect(theirs) as worker:
        worker.execute("EXPLAIN " + statement, parameters)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_refused_everything_else(dsn: str, role: str) -> None:
    allowed = []
    with login(dsn, role) as their_dsn, psycopg.connect(their_dsn, autocommit=True) as connection:
        for statement in REFUSED[role]:
            try:
                connection.execute(statement.encode())
            except psycopg.errors.InsufficientPrivilege:
                continue
            allowed.append(statement)
    assert allowed == []


def test_a_login_without_a_role_may_do_nothing(dsn: str) -> None:
    everything = (*WRITES, *LOOKS_AT_PAYLOADS, *CONTROLS, *DELIVERS, *PRODUCES, *LOOKS, "SELECT pgoutbox.cancel(1)")
    with login(dsn) as their_dsn, psycopg.connect(their_dsn, autocommit=True) as connection:
        for statement in everything:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_a_worker_can_delete_only_messages_that_it_holds_and_a_rule_allows(
    dsn: str, connection: psycopg.Connection
) -> None:
    kept, held = put(connection, State.SENDING), put(connection, State.SENDING, topic="other")
    connection.execute("INSERT INTO pgoutbox.retention VALUES ('0 s', 'other', 'sent')")
    connection.commit()
    claimed_ats = "ARRAY(SELECT m.claimed_at FROM pgoutbox.message_live AS m ORDER BY m.id)"
    forget = f"SELECT pgoutbox._forget_sent(%s, %s, {claimed_ats}, 'w')"
    with login(dsn, WORKER) as their_dsn, psycopg.connect(their_dsn, autocommit=True) as worker:
        assert worker.execute(forget, ([kept, held], [1, 2])).fetchall() == []
        assert worker.execute(forget.replace("'w'", "'another'"), ([kept, held], [1, 1])).fetchall() == []
        assert worker.execute(forget, ([kept, held], [1, 1])).fetchall() == [(held,)]


# --- allowed actions --------------------------------------------------------------------------------------------------


def test_a_producer_enqueues_and_cancels_in_every_way(dsn: str, connection: psycopg.Connection) -> None:
    outbox = Outbox()
    with login(dsn, PRODUCER) as their_dsn, psycopg.connect(their_dsn) as producer:
        plain = outbox.on(producer).enqueue("mail", {"a": 1})
        keyed = outbox.on(producer).enqueue(
            "mail", {}, coalesce_key="k", dedupe_key="d", delay=60, max_delay=600, headers={"a": "b"},
            destination="mailto:ada@example.org",
        )  # fmt: skip
        assert outbox.on(producer).enqueue("mail", {}, coalesce_key="k", max_delay=600).id > keyed.id
        assert outbox.on(producer).enqueue("mail", {}, coalesce_key="k", dedupe_key="d").duplicate
        ordered = outbox.on(producer).enqueue("mail", {}, ordering_key="o", halts_key=True, best_effort=True)
        many = outbox.on(producer).enqueue_many(
            [NewMessage("mail", 1), NewMessage("mail", 2, coalesce_key="x"), NewMessage("mail", 3, delay=1)]
        )
        fanned = outbox.on(producer).enqueue_fanout("mail", {}, ["tel:1", "tel:2"], content={"text": "shared"})
        assert ordered is not None
        assert outbox.on(producer).cancel(message_id=plain.id) is CancelResult.CANCELLED
        assert outbox.on(producer).cancel(topic="mail", coalesce_key="x") is CancelResult.CANCELLED
        assert outbox.on(producer).cancel(topic="mail", dedupe_key="d") is CancelResult.SKIPPED  # It is superseded.
        assert outbox.on(producer).reschedule(ordered.id, delay=60) is RescheduleResult.RESCHEDULED
        owned = outbox.on(producer).enqueue("mail", {}, owner="account-7")
        assert outbox.on(producer).edit(owned.id, owner="account-7", payload=1, delay=60) is EditResult.EDITED
        assert [message.id for message in outbox.on(producer).find(owner="account-7")] == [owned.id]
        assert outbox.on(producer).cancel_all(owner="account-7") == [Cancelled(owned.id, CancelResult.CANCELLED)]
        assert outbox.on(producer).cancel(topic="mail", dedupe_key="unknown") is CancelResult.MISSING
        producer.commit()
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            producer.execute("SELECT pgoutbox.enqueue('Mail', '1')")
    assert {row_of(connection, one.id).state for one in many} == {"pending", "cancelled"}
    assert [row_of(connection, one.id).state for one in fanned] == ["pending", "pending"]


@pytest.fixture
def worker_dsn(dsn: str) -> Iterator[str]:
    with login(dsn, WORKER) as their_dsn:
        yield their_dsn


async def test_a_worker_delivers_with_every_outcome(dsn: str, worker_dsn: str, connection: psycopg.Connection) -> None:
    connection.autocommit = True
    connection.execute("INSERT INTO pgoutbox.retention VALUES ('0 s', 'forgotten', 'sent')")
    connection.execute(LIMITED)
    outbox = Outbox(settings_for(worker_dsn))
    answers: dict[str, Any] = {
        "sent": None,
        "transient": Transient("busy"),
        "permanent": Permanent("no such mailbox"),
        "skip": Skip("not wanted"),
        "snooze": Snooze(3600),
        "forgotten": None,
    }
    seen: list[tuple[str, object]] = []

    async def handle(message: Message, ctx: Context) -> Any:  # noqa: ANN401 - one handler for every outcome
        await ctx.ensure_lease()
        seen.append((message.topic, message.content))
        return answers[message.topic]

    for topic in answers:
        outbox.handler(topic, retry=RetryPolicy.steps(3600))(handle)

    @outbox.handler("transactional", transactional=True)
    async def transactional(message: Message, ctx: Context) -> None:
        assert ctx.connection is not None
        await outbox.on(ctx.connection).enqueue("sent", {"after": message.id})

    ids = {topic: enqueue(connection, topic, max_attempts=3) for topic in answers}
    ids["transactional"] = enqueue(connection, "transactional")
    ids["older"], ids["newer"] = (enqueue(connection, "sent", coalesce_key="k") for _ in range(2))
    ids["first"], ids["second"] = (enqueue(connection, "sent", ordering_key="o") for _ in range(2))
    limited = [enqueue(connection, "sent", queue="limited") for _ in range(3)]
    outbox.on(connection).enqueue_fanout(
        "sent", {}, ["tel:1", "tel:2"], content={"text": "shared"}, require_transaction=False
    )
    ids["lost"] = put(connection, State.SENDING, topic="sent")
    lapse(connection, ids["lost"])
    ids["cancelled"] = put(connection, State.SENDING, topic="sent")
    connection.execute("SELECT pgoutbox.cancel(%s)", [ids["cancelled"]])
    lapse(connection, ids["cancelled"])

    await Worker(outbox, queues=["default", "limited"]).run_once()
    states = {name: state_or_gone(connection, message_id) for name, message_id in ids.items()}
    assert states == {
        "sent": "sent",
        "transient": "pending",
        "permanent": "failed",
        "skip": "skipped",
        "snooze": "pending",
        "forgotten": "gone",
        "transactional": "sent",
        "older": "skipped",
        "newer": "sent",
        "first": "sent",
        "second": "sent",
        "lost": "sent",
        "cancelled": "cancelled",
    }
    assert [state_or_gone(connection, message_id) for message_id in limited] == ["sent"] * 3
    assert ("sent", {"text": "shared"}) in seen
    (follow_up,) = connection.execute(
        "SELECT state FROM pgoutbox.message WHERE payload = %s", [f'{{"after": {ids["transactional"]}}}']
    ).fetchone() or ("",)
    assert follow_up == "sent"


def state_or_gone(connection: psycopg.Connection, message_id: int) -> str:
    """Return the state of a message; a worker that keeps nothing has deleted it."""
    row = connection.execute("SELECT state FROM pgoutbox.message WHERE id = %s", [message_id]).fetchone()
    return "gone" if row is None else str(row[0])


@pytest.mark.slow
async def test_a_worker_sleeps_is_notified_renews_and_releases(worker_dsn: str, connection: psycopg.Connection) -> None:
    connection.autocommit = True
    outbox = Outbox()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        begun.set()
        await go_on.wait()

    settings = settings_for(worker_dsn, lease_seconds=3, shutdown_grace_seconds=0.1)
    worker = WatchedWorker(outbox, settings=settings)
    async with running(worker):
        await worker.asleep.wait()
        message_id = enqueue(connection)
        await begun.wait()
        renewed = "SELECT lease_expires_at > claimed_at + interval '3.1 s' FROM pgoutbox.in_flight_view WHERE id = %s"
        await until(lambda: connection.execute(renewed, [message_id]).fetchone() == (True,))
    row = row_of(connection, message_id)
    assert (row.state, row.attempt_count, row.max_attempts) == ("pending", 1, 12)


@pytest.mark.slow
async def test_a_worker_opens_and_closes_breakers_and_announces_it(
    worker_dsn: str, connection: psycopg.Connection
) -> None:
    connection.autocommit = True
    options = {"breaker_cooldown_seconds": 0.2, "breaker_failures": 1, "alert_destination": "mailto:ops@example.org"}
    outbox = Outbox(settings_for(worker_dsn, **options), transports=[LineTransport(timeout_seconds=60)])

    @outbox.handler("greet", retry=RetryPolicy.steps(0))
    async def greet(message: Message, ctx: Context) -> Line:
        return Line(str(message.id))

    @outbox.handler("pgoutbox.alert")
    async def alert(message: Message, ctx: Context) -> None: ...

    async with line_host() as host:
        host.mood = Mood.DROP
        for _ in range(3):
            enqueue(connection, destination=host.destination)
        async with running(Worker(outbox)):
            opened = "SELECT count(*) FROM pgoutbox.breaker"
            await until(lambda: connection.execute(opened).fetchone() == (1,))
            host.mood = Mood.TAKE
            await until(lambda: connection.execute(opened).fetchone() == (0,))
            owed = "SELECT count(*) FROM pgoutbox.message_live"
            await until(lambda: connection.execute(owed).fetchone() == (0,))
    rows = connection.execute(
        "SELECT payload ->> 'event' FROM pgoutbox.message WHERE topic = 'pgoutbox.alert' ORDER BY id"
    ).fetchall()
    assert rows[0] == ("opened",)
    assert rows[-1] == ("closed",)


def test_a_worker_maintains_the_tables_by_the_rules(dsn: str, worker_dsn: str, connection: psycopg.Connection) -> None:
    old = put(connection, State.SENT, age=timedelta(days=2), coalesce_key="k", dedupe_key="d")
    connection.execute(ADD_ATTEMPT, (old, 1))
    failed = put(connection, State.FAILED, age=timedelta(days=2))
    connection.execute("INSERT INTO pgoutbox.content (body) VALUES ('1')")
    connection.execute("INSERT INTO pgoutbox.retention VALUES ('1 day', '*', 'sent'), ('1 day', '*', 'dedupe_key')")
    connection.commit()
    with psycopg.connect(worker_dsn, autocommit=True) as worker:
        rule = {
            "topic": "*", "state": "sent", "since": "-infinity", "until": "infinity", "limit": 10, "after_scope": "",
            "after_key": "",
        }  # fmt: skip
        assert worker.execute(sql.PRUNE_BY_RULE, rule).fetchall() == [("sent",)]
        for statement in (sql.PRUNE_DEDUPE_BY_RULE, sql.PRUNE_KEYS, sql.PRUNE_CONTENT):
            worker.execute(statement, rule)
    assert state_or_gone(connection, failed) == "failed"
    left = "SELECT (SELECT count(*) FROM pgoutbox.attempt_view), (SELECT count(*) FROM pgoutbox.content)"
    assert connection.execute(left).fetchone() == (0, 0)


OPEN_BREAKER: Final = """
    INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
    VALUES ('k', now(), 1, 'w', 'secret=s3cret')
"""


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    with login(dsn, OPERATOR) as their_dsn, operator_connection.connect(load_settings(dsn=their_dsn)) as connection:
        yield connection


@pytest.mark.slow
def test_an_operator_can_run_every_operator_action(
    operator: psycopg.Connection, connection: psycopg.Connection
) -> None:
    failed, others = put(connection, State.FAILED), [put(connection, State.FAILED) for _ in range(3)]
    sent = put(connection, State.SENT, destination="tel:1")
    pending = put(connection, coalesce_key="k")
    connection.execute(OPEN_BREAKER)
    connection.commit()

    assert Operator(operator).redrive(failed).is_done
    assert Operator(operator).act_on_all("redrive", MessageFilter()) == {"redriven": len(others)}
    copy = Operator(operator).resend(sent)
    assert Operator(operator).cancel(copy.other_id or 0).result == "cancelled"
    assert Operator(operator).cancel_by_key("mail", coalesce_key="k")[0].id == pending
    assert Operator(operator).act_on_all("cancel", MessageFilter(topic="mail")) == {"cancelled": 4}
    Operator(operator).pause("default")
    Operator(operator).limit_rate("default", Rate(3, 60))
    Operator(operator).limit_in_flight("default", 3)
    assert Operator(operator).resume("default")
    Operator(operator).pause_topic("mail", duration=timedelta(hours=1))
    assert [one.topic for one in Operator(operator).list_paused_topics()] == ["mail"]
    assert Operator(operator).resume_topic("mail")
    assert [one.queue for one in Operator(operator).list_queues()] == ["default"]
    Operator(operator).set_retention("*", "sent", timedelta(days=1))
    assert len(Operator(operator).retention_rules()) == 1
    Operator(operator).prune_by_retention()
    assert Operator(operator).unset_retention("*", "sent")
    assert Operator(operator).count_prunable(timedelta(microseconds=1))
    assert Operator(operator).prune(timedelta(microseconds=1)).total == 7
    assert Operator(operator).close_breaker("k") == ClosedBreaker(was_open=True, message_count=0)
    Operator(operator).set_redirect("tester@example.org")
    assert Operator(operator).redirects().switched
    assert Operator(operator).clear_redirect().was_on
    Operator(operator).adopt("production")
    assert Operator(operator).home().deployment == "production"
    acts = {act.action for act in Operator(operator).list_acts()}
    assert acts == {
        "redrive", "resend", "cancel", "pause", "resume", "limit", "retention", "prune", "breaker", "redirect",
        "adopt",
    }  # fmt: skip
    assert {act.db_role for act in Operator(operator).list_acts()} == {operator.info.user}


@pytest.mark.slow
@pytest.mark.parametrize("role", [OPERATOR, VIEWER])
def test_a_viewer_sees_every_message_but_no_payload_values(dsn: str, connection: psycopg.Connection, role: str) -> None:
    message_id = put(connection, State.FAILED, destination="https://ada:s3cret@example.org/?token=s3cret")
    connection.execute(
        "UPDATE pgoutbox.message SET payload = %s, headers = %s, last_error = %s",
        ('{"to": "s3cret", "s3cret now": [1, {"n": null}]}', '{"x-key": "s3cret"}', "535 password=s3cret"),
    )
    connection.execute(ADD_ATTEMPT, (message_id, 1))
    connection.execute(SET_LAST_ERROR, ("authorization: Bearer s3cret", [message_id]))
    connection.execute(OPEN_BREAKER)
    connection.commit()
    with (
        login(dsn, role) as their_dsn,
        operator_connection.connect(load_settings(dsn=their_dsn), read_only=True) as person,
    ):
        shown, attempts = Operator(person).show_message(message_id)
        seen: list[object] = [shown, attempts, Operator(person).list_messages(), Operator(person).count_messages()]
        seen += [person.execute(f"SELECT * FROM pgoutbox.{view}".encode()).fetchall() for view in VIEWS]
    assert shown.payload == {"to": "(redacted)", "(redacted)": ["(redacted)", {"n": "(redacted)"}]}
    assert shown.headers == {"x-key": "(redacted)"}
    assert len(attempts) == 1
    assert "s3cret" not in repr(seen)


LOOKING: Final = (["list"], ["show", "1"], ["stats"], ["retention"])
ACTING: Final = (
    ["enqueue", "mail"], ["redrive", "1"], ["cancel", "1"], ["resend", "2"], ["pause", "bulk"], ["resume", "bulk"],
    ["pause", "--topic", "mail"], ["resume", "--topic", "mail"],
    ["limit", "bulk", "--rate", "3/1m"], ["retention", "set", "*", "sent", "30d"],
    ["prune", "--older-than", "1d", "--yes"],
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("role", "acts"), [(OPERATOR, True), (VIEWER, False)])
def test_commands_work_for_the_roles_that_may_run_them(
    dsn: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    role: str, acts: bool,
) -> None:  # fmt: skip
    put(connection, State.FAILED)
    put(connection, State.SENT)
    connection.commit()
    with login(dsn, role) as their_dsn:
        monkeypatch.setenv("PGOUTBOX_DSN", their_dsn)
        for command in LOOKING:
            assert main(command) == 0, (command, capsys.readouterr())
        capsys.readouterr()
        for command in ACTING:
            exit_code = main(command)
            told = capsys.readouterr()
            assert exit_code == (0 if acts else 1), (command, told)
            assert acts or "permission denied" in told.err


# --- attacks ----------------------------------------------------------------------------------------------------------

# Hostile copies of everything of pg_catalog that our functions name, every operator on their types, and our tables and
# types, by the same names in a schema and among temporary objects of the attacker. Each copy fails when it is used, and
# reports the current user.
TRAPS: Final[LiteralString] = r"""
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE FUNCTION evil.trap() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'trapped as %', current_user;
END
$$;
DO $block$
DECLARE
    thing record;
BEGIN
    FOR thing IN
        SELECT DISTINCT
            p.proname, pg_get_function_identity_arguments(p.oid) AS arguments, p.prorettype::regtype AS result
        FROM pg_catalog.pg_proc AS p
        WHERE p.pronamespace = 'pg_catalog'::regnamespace
            AND p.prokind = 'f'
            AND NOT p.proretset
            AND p.provariadic = 0
            AND NOT EXISTS (
                SELECT
                FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]) || p.prorettype) AS t(oid)
                JOIN pg_catalog.pg_type AS ty ON ty.oid = t.oid AND ty.typtype = 'p' AND ty.typname <> 'void'
            )
            AND p.proname IN (
                SELECT DISTINCT found.word[1]
                FROM pg_catalog.pg_proc AS ours
                CROSS JOIN regexp_matches(ours.prosrc, '\m([a-z][a-z0-9_]+)\(', 'g') AS found(word)
                WHERE ours.pronamespace = 'pgoutbox'::regnamespace
            )
    LOOP
        EXECUTE format(
            'CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.trap(); END''',
            thing.proname, thing.arguments, thing.result
        );
    END LOOP;
    FOR thing IN
        SELECT
            o.oid::bigint AS number, o.oprname AS name, o.oprleft::regtype AS l, o.oprright::regtype AS r,
            o.oprresult::regtype AS result, o.oprleft = 0 AS is_prefix
        FROM pg_catalog.pg_operator AS o
        WHERE o.oprnamespace = 'pg_catalog'::regnamespace
            AND o.oprright = ANY (ARRAY[
                'text', 'jsonb', 'int8', 'int4', 'timestamptz', 'interval', 'bool', 'bytea', 'float8'
            ]::regtype[])
            AND (o.oprleft = 0 OR o.oprleft = ANY (ARRAY[
                'text', 'jsonb', 'int8', 'int4', 'timestamptz', 'interval', 'bool', 'bytea', 'float8'
            ]::regtype[]))
    LOOP
        EXECUTE format(
            'CREATE FUNCTION evil.operator_%s(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.trap(); END''',
            thing.number,
            CASE WHEN thing.is_prefix THEN thing.r::text ELSE format('%s, %s', thing.l, thing.r) END,
            thing.result
        );
        EXECUTE format(
            'CREATE OPERATOR evil.%s (%s RIGHTARG = %s, FUNCTION = evil.operator_%s)',
            thing.name,
            CASE WHEN thing.is_prefix THEN '' ELSE format('LEFTARG = %s,', thing.l) END,
            thing.r,
            thing.number
        );
    END LOOP;
    FOR thing IN
        SELECT c.relname AS name
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND c.relkind IN ('r', 'p', 'v')
    LOOP
        EXECUTE format('CREATE TABLE evil.%I (id integer)', thing.name);
        EXECUTE format('CREATE TEMP TABLE %I (id integer)', thing.name);
        EXECUTE format('GRANT ALL ON evil.%1$I, pg_temp.%1$I TO PUBLIC', thing.name);
    END LOOP;
    FOR thing IN
        SELECT ty.typname AS name
        FROM pg_catalog.pg_type AS ty
        WHERE ty.typnamespace = 'pg_catalog'::regnamespace
            AND ty.typtype = 'b'
            AND ty.typname IN (
                SELECT DISTINCT found.word[1]
                FROM pg_catalog.pg_proc AS ours
                CROSS JOIN regexp_matches(ours.prosrc, '\m([a-z][a-z0-9_]+)\M', 'g') AS found(word)
                WHERE ours.pronamespace = 'pgoutbox'::regnamespace
            )
    LOOP
        EXECUTE format('CREATE DOMAIN evil.%I AS pg_catalog.%I CHECK (evil.trap())', thing.name, thing.name);
    END LOOP;
    -- A function that this session has compiled keeps the types of its variables until its row changes.
    FOR thing IN
        SELECT ours.oid::regprocedure AS name, ours.procost AS cost
        FROM pg_catalog.pg_proc AS ours
        WHERE ours.pronamespace = 'pgoutbox'::regnamespace
    LOOP
        EXECUTE format('ALTER FUNCTION %s COST %s', thing.name, thing.cost);
    END LOOP;
END
$block$;
"""
ENQUEUE_ACT: Final[LiteralString] = """
SELECT pgoutbox._enqueue_act(
    'mail', '{}', pg_catalog.jsonb_populate_record(NULL::pgoutbox.draft, '{"queue": "q"}'), true
)
"""
ENQUEUE_RECEIPT: Final[LiteralString] = """
SELECT pgoutbox._enqueue_receipt(
    'mail', '{}', pg_catalog.jsonb_populate_record(NULL::pgoutbox.draft, '{"delay": 1}'), true
)
"""
MANY: Final[LiteralString] = """
SELECT FROM pgoutbox.enqueue_many('[
    {"topic": "mail", "payload": 1, "delay": 1, "available_at": null},
    {"topic": "mail", "payload": 2, "coalesce_key": "k", "delay": 1.5, "max_delay": 60},
    {"topic": "mail", "payload": 3, "ordering_key": "k", "halts_key": true, "max_attempts": 3},
    {"topic": "mail", "payload": 3, "ordering_key": "k", "expires_at": "2036-01-01T00:00:00Z"},
    {"topic": "mail", "payload": 4, "dedupe_key": "k", "on_duplicate": "ignore", "headers": {"a": "b"}},
    {"topic": "mail", "payload": 5, "dedupe_key": "k", "on_duplicate": "ignore"}
]')
"""
# Each call by a role that may make it, with all names qualified that the attacker resolves himself.
CALLS: Final[tuple[tuple[str, LiteralString], ...]] = (
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{}')"),
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{\"a\": 1}', coalesce_key => 'k', headers => '{\"a\": \"b\"}')"),
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{}', coalesce_key => 'k', max_delay => '1 h')"),
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{}', dedupe_key => 'd', destination => 'tel:1')"),
    (
        PRODUCER,
        "SELECT pgoutbox.enqueue('mail', '{\"pgoutbox.encrypted\": {\"digests\": [\"a\"]}}', dedupe_key => 'e')",
    ),
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{}', ordering_key => 'o', halts_key => true)"),
    (PRODUCER, MANY),
    (
        PRODUCER,
        """
        SELECT FROM pgoutbox.enqueue_fanout(
            '{"topic": "mail", "payload": 1, "delay": 1}', '["tel:1", {"destination": "tel:2", "delay": 2}]', '{}'
        )
        """,
    ),
    (PRODUCER, ENQUEUE_RECEIPT),
    (PRODUCER, "SELECT pgoutbox.lock_for_enqueue()"),
    (PRODUCER, "SELECT pgoutbox.enqueue('mail', '{}', delay => '1 s')"),
    (PRODUCER, "SELECT pgoutbox.cancel(1)"),
    (PRODUCER, "SELECT FROM pgoutbox.cancel_by_key('mail', coalesce_key => 'k', dedupe_key => 'd')"),
    (WORKER, "SELECT pgoutbox._forget_sent('{1}', '{1}', '{now}', 'w')"),
    (WORKER, "SELECT pgoutbox._permits('limited', 5, true)"),
    (WORKER, "SELECT pgoutbox._tokens_of(q) FROM pgoutbox.queue AS q"),
    (WORKER, "SELECT pgoutbox._forget_requests()"),
    (WORKER, "SELECT pg_sequence_last_value('pgoutbox.message_id_seq')"),
    (WORKER, "SELECT pgoutbox._prune_by_rule('*', 'sent', '-infinity', 'infinity', 10)"),
    (WORKER, "SELECT pgoutbox._prune_dedupe_by_rule(10)"),
    (WORKER, "SELECT pgoutbox._prune_keys(10)"),
    (WORKER, "SELECT pgoutbox._prune_content(10)"),
    (WORKER, "SELECT pgoutbox._prune_audit(10)"),
    (OPERATOR, "SELECT pgoutbox.announce_act('ada')"),
    (OPERATOR, "SELECT FROM pgoutbox.redrive('{1,2,3}')"),
    (OPERATOR, "SELECT FROM pgoutbox.release('{1,2,3}'); SET CONSTRAINTS ALL IMMEDIATE"),
    (OPERATOR, "SELECT FROM pgoutbox.correct('{1,2,3}', '{\"destination\": \"mailto:ada@example.org\"}')"),
    (OPERATOR, "SELECT FROM pgoutbox.resend(2)"),
    (OPERATOR, ENQUEUE_ACT),
    (PRODUCER, "SELECT pgoutbox._is_known_topic('mail')"),
    (PRODUCER, "SELECT FROM pgoutbox._cancel_each('{1}', '{pending}')"),
    (OPERATOR, "SELECT pgoutbox.prune('{sent}', '1 day', NULL, 10)"),
    (OPERATOR, "SELECT pgoutbox._prune_dedupe('1 day', NULL, 10)"),
    (VIEWER, "SELECT FROM pgoutbox._done_estimate()"),
    (VIEWER, "SELECT pgoutbox._require_package('0.1')"),
    (WORKER, "SELECT pgoutbox._complete('{1}', '{1}', 'w', '{now}')"),
    (WORKER, "SELECT pgoutbox._reset_session()"),
    (VIEWER, "SELECT pgoutbox._here()"),
    (VIEWER, "SELECT pgoutbox._require_home('staging', '0.1')"),
    (PRODUCER, "SELECT FROM pgoutbox._read_redirect()"),
    (PRODUCER, "SELECT pgoutbox._state_of(1)"),
    (PRODUCER, "SELECT FROM pgoutbox.cancel_all(destination => 'mailto:ada@example.org')"),
    (PRODUCER, "SELECT FROM pgoutbox.reschedule('{1,2,3}', pg_catalog.now())"),
    (PRODUCER, "SELECT FROM pgoutbox.find('ada')"),
    (PRODUCER, "SELECT pgoutbox.edit(1, 'ada', '1', 'tel:1', pg_catalog.now(), 'tel:1')"),
    (WORKER, "SELECT FROM pgoutbox.read_payloads('{1}', 'ada')"),
    (WORKER, "SELECT FROM pgoutbox.failures()"),
    (WORKER, 'SELECT pgoutbox._enqueue_failure(\'{"topic": "mail", "queue": "q", "message_id": 1}\', 3)'),
    (WORKER, "SELECT FROM pgoutbox._kept_until('-infinity', 'infinity')"),
    (WORKER, "SELECT pgoutbox.make_partition(4711)"),
    (WORKER, "SELECT pgoutbox._drop_partition('message_done_20200101')"),
    (OPERATOR, "SELECT FROM pgoutbox.dismiss('{1}', 'closed')"),
    (OPERATOR, "SELECT FROM pgoutbox.snooze('{1,2,3}', '1 h', 'later')"),
    (OPERATOR, "SELECT pgoutbox.close_breaker('k')"),
    (OPERATOR, "SELECT pgoutbox.set_redirect('a@b.example')"),
    (OPERATOR, "SELECT pgoutbox.clear_redirect()"),
    (OPERATOR, "SELECT FROM pgoutbox.pause_topic('mail', '1 h')"),
    (OPERATOR, "SELECT pgoutbox.resume_topic('news')"),
    (OPERATOR, "SELECT pgoutbox.set_fair_share('mail', 'acme', 2, 0, 10, 60)"),
    (OPERATOR, "SELECT pgoutbox.set_fair_share('mail', 'acme', remove => '{rate}')"),
    (WORKER, "SELECT pgoutbox._give_turns('mail', '{mail}', 10)"),
    (
        PRODUCER,
        """SELECT pgoutbox.set_schedule('s', '0 7 * * *', '{"topic": "mail", "payload": 1}')""",
    ),
    (PRODUCER, "SELECT pgoutbox.unset_schedule('s')"),
    (PRODUCER, "SELECT pgoutbox.suppress('ada@example.org', 'bounce')"),
    (PRODUCER, "SELECT pgoutbox._unsubscribe(pg_catalog.repeat('a', 40), 'news', pg_catalog.now())"),
    (OPERATOR, "SELECT pgoutbox.unsuppress('otto@example.org')"),
    (OPERATOR, """SELECT pgoutbox.import_suppressions('[{"address": "ada@example.org", "reason": "manual"}]')"""),
    (OPERATOR, "SELECT pgoutbox.address_digest('ada@example.org')"),
    (WORKER, "SELECT FROM pgoutbox._suppressed('{ada@example.org}', '{news}')"),
    (WORKER, "SELECT pgoutbox._tick_schedule('s', 1, NULL, ARRAY[pg_catalog.now()], pg_catalog.now())"),
    (OPERATOR, "SELECT pgoutbox.pause_schedule('s')"),
    (OPERATOR, "SELECT pgoutbox.resume_schedule('paused')"),
    (OPERATOR, "SELECT pgoutbox.run_schedule('s')"),
    (OPERATOR, "SELECT pgoutbox.set_retention('mail', 'sent', '1 day')"),
    (OPERATOR, "SELECT pgoutbox.unset_retention('*', 'sent')"),
    (OPERATOR, "SELECT FROM pgoutbox.erase(ids => '{1}')"),
    (OPERATOR, "SELECT FROM pgoutbox._erase('{1}')"),
    (OPERATOR, "SELECT FROM pgoutbox._selected_messages(NULL, 'ada', NULL)"),
    (OPERATOR, "SELECT pgoutbox.adopt()"),
    (OPERATOR, "UPDATE pgoutbox.queue SET paused_at = NULL"),
    *((VIEWER, f"SELECT * FROM pgoutbox.{view}") for view in VIEWS),
)


@pytest.fixture
def trapped(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Open a session in which the attacker has created everything that a search_path could lead to."""
    for state in (State.FAILED, State.SENT, State.SENDING):
        put(rolled_back, state)
    rolled_back.execute(
        f"{LIMITED}; INSERT INTO pgoutbox.retention VALUES ('1 day', '*', 'sent'), ('1 day', '*', 'dedupe_key')"
    )
    rolled_back.execute("INSERT INTO pgoutbox.topic_pause (topic) VALUES ('news')")
    rolled_back.execute("SELECT pgoutbox.suppress('otto@example.org', 'manual')")
    rolled_back.execute(
        "INSERT INTO pgoutbox.schedule (name, rule, message, paused_at) VALUES"
        """ ('s', 'every 60', '{"topic": "mail", "payload": 1}', NULL), ('paused', 'every 60', '{}', now())"""
    )
    rolled_back.execute(TRAPS)
    return rolled_back


in_hostile_paths = pytest.mark.parametrize("search_path", ["evil, pg_temp, pg_catalog", "pg_temp, evil, pg_catalog"])


@in_hostile_paths
def test_no_function_resolves_a_name_in_the_callers_search_path(trapped: psycopg.Connection, search_path: str) -> None:
    refused = {}
    for role, call in CALLS:
        try:
            with trapped.transaction(force_rollback=True):
                trapped.execute("DISCARD PLANS")
                trapped.execute("SELECT set_config('search_path', %s, true)", [search_path])
                trapped.execute(f"SET LOCAL ROLE {role}".encode())
                trapped.execute(call)
        except psycopg.Error as error:
            refused[call] = str(error)
    assert refused == {}


@in_hostile_paths
def test_no_call_of_python_resolves_a_name_in_the_callers_search_path(
    trapped: psycopg.Connection, search_path: str
) -> None:
    trapped.execute("SELECT set_config('search_path', %s, true)", [search_path])
    producer = Outbox().on(trapped)
    producer.enqueue("mail", {})
    one = producer.enqueue("mail", {}, delay=1, headers={"a": "b"}, coalesce_key="c", dedupe_key="d")
    (again, _) = producer.enqueue_many([NewMessage("mail", {}, dedupe_key="d"), NewMessage("mail", 1, delay=1)])
    assert again == Enqueued(one.id, True)
    producer.enqueue_fanout("mail", {}, ["a:1"], content={}, delay=1)
    assert producer.cancel(topic="mail", coalesce_key="c") is CancelResult.CANCELLED
    assert producer.cancel(one.id) is CancelResult.ALREADY_CANCELLED


def test_a_producers_temporary_type_does_not_run_with_the_owners_rights(dsn: str) -> None:
    """PostgreSQL looks up type names among the temporary objects first, whatever the search_path."""
    with login(dsn, PRODUCER) as producer, psycopg.connect(producer) as attacker:
        attacker.execute(
            "CREATE FUNCTION pg_temp.trap(pg_catalog.xid8) RETURNS boolean LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'trapped as %', current_user; END$$;"
            "CREATE DOMAIN pg_temp.xid8 AS pg_catalog.xid8 CHECK (pg_temp.trap(VALUE))"
        )
        for call in ("enqueue('mail', '{}')", "enqueue('mail', '{}', dedupe_key => 'd')"):
            attacker.execute(f"SELECT pgoutbox.{call}".encode())


# Triggers, which other calls run, and functions that only the owner may call.
NOT_ATTACKED: Final = {
    "_count_attempts", "_record_breaker_act", "_record_queue_act", "_record_retention_act",
    "destination_digest",
    "export", "import_messages", "mentions",
}  # fmt: skip
CALLED: Final = {match[1]: (role, call) for role, call in CALLS if (match := re.search(r"pgoutbox\.(\w+)\(", call))}


def test_each_function_with_its_owners_rights_is_attacked(rolled_back: psycopg.Connection) -> None:
    rows = rolled_back.execute(
        "SELECT p.proname::text FROM pg_proc AS p WHERE p.pronamespace = 'pgoutbox'::regnamespace AND p.prosecdef"
    ).fetchall()
    assert {name for (name,) in rows} - CALLED.keys() == NOT_ATTACKED


@pytest.mark.parametrize("name", ["_cancel_each", "_enqueue_act", "_enqueue_receipt", "enqueue_fanout", "enqueue_many"])
def test_the_hostile_objects_catch_a_function_without_a_pinned_path(trapped: psycopg.Connection, name: str) -> None:
    role, call = CALLED[name]
    trapped.execute(f"ALTER FUNCTION pgoutbox.{name} RESET search_path".encode())
    trapped.execute("DISCARD PLANS")
    trapped.execute("SET LOCAL search_path = evil, pg_temp, pg_catalog")
    trapped.execute(f"SET LOCAL ROLE {role}".encode())
    with pytest.raises(psycopg.errors.RaiseException, match="trapped as "):
        trapped.execute(call)


# --- the bell ---------------------------------------------------------------------------------------------------------

FLOOD: Final = 10_000


async def test_many_notifications_cause_a_limited_number_of_claims(dsn: str, connection: psycopg.Connection) -> None:
    outbox = Outbox()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        proxy_to(dsn, listening) as proxy,
        login(dsn) as anybody,
        psycopg.connect(anybody, autocommit=True) as flooder,
    ):
        worker = WatchedWorker(outbox, settings=settings_for(proxy.dsn))
        async with running(worker):
            await worker.asleep.wait()
            begun = len(proxy.statements)
            # Each payload is different, because PostgreSQL sends equal ones once.
            await asyncio.to_thread(
                flooder.execute,
                "SELECT pg_notify('pgoutbox', CASE WHEN mod(n, 2) = 0 THEN 'default' ELSE 'q' || n END), "
                "pg_notify('pgoutbox', 'default') FROM generate_series(1, %s) AS n",
                [FLOOD],
            )
            message_id = enqueue(connection)
            connection.commit()
            await until(lambda: row_of(connection, message_id).state == "sent")
            connection.rollback()
        claims = [one for one in list(proxy.statements)[begun:] if one.startswith("WITH judged")]
    assert 1 <= len(claims) <= 20
