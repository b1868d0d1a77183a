"""Tests the doctor on databases that each have one problem, and on a database without problems."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString, cast

import psycopg
import pytest
import typer
from cryptography.fernet import Fernet
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb
from pydantic import SecretStr

from pgoutbox import Outbox, Topic, migrate
from pgoutbox import settings as settings_module
from pgoutbox.cli.commands import app
from pgoutbox.database.sql import MISSING_RELATIONS, REPORT_WORKER
from pgoutbox.doctor import Finding, Level, Limits, examine, verdict
from pgoutbox.encryption import Identity, Keyring
from pgoutbox.message import Message, State
from pgoutbox.operations import Operator
from pgoutbox.settings import Settings, load_settings
from pgoutbox.worker import Worker
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, lapse, running
from tests.support.partitions import add_partition
from tests.support.proxy import proxy_to
from tests.support.servers import OwnServer, Workshop, open_workshop
from tests.support.settings import settings_with
from tests.support.smtp_server import accepting_server
from tests.support.waiting import until_idle, wait_until
from tests.support.worker_sql import claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgoutbox.handlers import Context
    from tests.conftest import Connect, Server


ROOT: Final = Path(__file__).parents[2]
CANARY: Final = "c4n4ry-s3cret"
HOUR_AGO: Final = "UPDATE pgoutbox.message SET available_at = now() - interval '1 hour'"


def settings_of(dsn: str, **overrides: object) -> Settings:
    given: dict[str, object] = {"dsn": dsn, "connect_timeout_seconds": 5}
    return settings_with(**given | overrides)


def found(
    settings: Settings | str,
    check: str,
    *,
    outbox: Outbox | None = None,
    limits: Limits | None = None,
    environment: dict[str, str] | None = None,
    ahead_seconds: float = 0.0,
) -> list[Finding]:
    """Return the findings of one check."""
    if isinstance(settings, str):
        settings = settings_of(settings)
    findings = examine(
        settings,
        outbox,
        environment=environment,
        limits=limits,
        clock=lambda: time.time() + ahead_seconds,
    )
    return [finding for finding in findings if finding.check == check]


def report(db: psycopg.Connection, worker: str, queues: list[str], topics: list[str]) -> None:
    """Report the presence of a worker."""
    parameters = {"worker": worker, "queues": queues, "topics": topics, "redirect_to": None}
    db.execute(REPORT_WORKER, parameters | {"version": "1", "slots": 50, "watched": [], "late_seconds": 60})


def expect(findings: list[Finding], level: Level, code: str, *facts: str) -> Finding:
    """Return the one finding of this level. It must have this code, name these facts, and have a reason and a fix."""
    matching = [finding for finding in findings if finding.level is level]
    assert [finding.code for finding in matching] == [code], findings
    (finding,) = matching
    for fact in facts:
        assert fact in f"{finding.what}\n{finding.why}\n{finding.fix}"
    if level in (Level.WARNING, Level.PROBLEM):
        assert finding.why
        assert finding.fix
    return finding


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_workshop(os.environ) as workshop:
        yield workshop


@pytest.fixture(scope="module")
def own(workshop: Workshop) -> Iterator[OwnServer]:
    """Run a durable server whose slots, prepared transactions and roles only these tests use."""
    with workshop.server() as server:
        server.start(max_prepared_transactions="5", wal_level="replica")
        yield server


@pytest.fixture(scope="module")
def reckless(workshop: Workshop) -> Iterator[OwnServer]:
    """Run a server with settings that risk data loss and bloat."""
    with workshop.server() as server:
        server.start(fsync="off", full_page_writes="off", autovacuum="off")
        yield server


@pytest.fixture
def role(server: Server, dsn: str) -> Iterator[tuple[str, str]]:
    """Create a role without any privilege, and return its DSN."""
    database = conninfo_to_dict(dsn)["dbname"]
    name = f"doctor_{database}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        try:
            yield name, make_conninfo(dsn, user=name)
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def handled() -> Outbox:
    """Build an application that handles `greet`."""
    outbox = Outbox()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    return outbox


@pytest.fixture
def posing(db: psycopg.Connection) -> None:
    """Report a worker that claims nothing."""
    report(db, "w1", ["default"], ["greet", "mail"])


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_misspelt_variable_is_named_with_the_intended_setting(dsn: str) -> None:
    findings = found(dsn, "settings", environment={"PGOUTBOX_SMTP_HSOT": "x", "PGOUTBOX_TEST_DSN": "x", "PATH": "x"})
    expect(findings, Level.WARNING, "unknown-setting", "PGOUTBOX_SMTP_HSOT", "PGOUTBOX_SMTP_HOST")


def test_a_former_name_of_a_setting_is_named_with_the_present_one(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "FORMER_NAMES", {"smtp.server": "smtp.host"})
    findings = found(dsn, "settings", environment={"PGOUTBOX_SMTP_SERVER": "x"})
    expect(findings, Level.WARNING, "renamed-setting", "PGOUTBOX_SMTP_SERVER", "PGOUTBOX_SMTP_HOST")


def test_a_redirect_is_a_warning_and_an_invalid_one_is_a_problem(dsn: str) -> None:
    redirect = settings_of(
        dsn, redirect_to="tester@club.org", redirect_exempt="@club.org", redirect_exempt_topics="mail.club.*"
    )
    expect(
        found(redirect, "settings"),
        Level.WARNING,
        "redirect-by-setting",
        "tester@club.org",
        "except for @club.org, mail.club.*",
    )
    invalid = settings_of(dsn, redirect_to="tester")
    expect(found(invalid, "settings"), Level.PROBLEM, "redirect-invalid", "PGOUTBOX_REDIRECT_TO")


@pytest.mark.slow
def test_a_copy_is_a_problem_and_an_unrecorded_deployment_a_warning(dsn: str, db: psycopg.Connection) -> None:
    expect(found(dsn, "copy"), Level.OK, "home-in-order")
    named = settings_of(dsn, deployment="production")
    expect(
        found(named, "copy"), Level.WARNING, "deployment-unrecorded", "PGOUTBOX_DEPLOYMENT=production", "pgoutbox adopt"
    )
    Operator(named).adopt("production")
    expect(found(named, "copy"), Level.OK, "home-in-order", "production")
    expect(found(dsn, "copy"), Level.PROBLEM, "database-is-copy", "PGOUTBOX_DEPLOYMENT", "pgoutbox adopt")
    db.execute("UPDATE pgoutbox.home SET database_id = 1, database_name = 'prod'")
    expect(found(named, "copy"), Level.PROBLEM, "database-is-copy", "prod", "pgoutbox adopt")


@pytest.mark.slow
def test_redirects_of_operators_and_workers_are_found(dsn: str, db: psycopg.Connection) -> None:
    expect(found(dsn, "redirect"), Level.OK, "no-redirect")
    db.execute("SELECT pgoutbox.set_redirect('tester@club.org', '2 h')")
    expect(found(dsn, "redirect"), Level.WARNING, "redirect-by-operator", "tester@club.org", "pgoutbox redirect off")
    db.execute("SELECT pgoutbox.set_redirect('tester@club.org', '2 h', '{mail.user.*}')")
    expect(found(dsn, "redirect"), Level.WARNING, "redirect-by-operator", "redirects e-mail of mail.user.* to")
    db.execute("SELECT pgoutbox.clear_redirect()")
    report(db, "w:1", ["default"], ["greet"])
    db.execute("UPDATE pgoutbox.worker SET redirect_to = '@test.club.org'")
    expect(found(dsn, "redirect"), Level.WARNING, "redirect-by-worker", "w:1", "PGOUTBOX_REDIRECT_TO=@test.club.org")
    db.execute("INSERT INTO pgoutbox.blackout VALUES ('2020-01-01', '2199-01-01')")
    expect(found(dsn, "redirect"), Level.PROBLEM, "redirect-forbidden", "2020-01-01/2199-01-01")
    db.execute("DELETE FROM pgoutbox.worker")
    expect(found(dsn, "redirect"), Level.OK, "no-redirect")


@pytest.mark.parametrize(
    ("given", "code", "setting"),
    [
        ({"log_level": "DEBUG"}, "log-level-debug", "PGOUTBOX_LOG_LEVEL=DEBUG"),
        ({"webhook_error_body_chars": 80}, "webhook-error-bodies", "PGOUTBOX_WEBHOOK_ERROR_BODY_CHARS=80"),
        ({"breaker_enabled": False}, "breakers-disabled", "PGOUTBOX_BREAKER_ENABLED=false"),
    ],
)
def test_settings_for_testing_are_warnings(dsn: str, given: dict[str, object], code: str, setting: str) -> None:
    expect(found(settings_of(dsn, **given), "settings"), Level.WARNING, code, setting)


@pytest.mark.parametrize(
    ("dsn", "level"),
    [
        ("host=db.invalid", Level.WARNING),
        ("host=db.invalid sslmode=require", Level.WARNING),
        ("host=localhost,db.invalid", Level.WARNING),
        ("postgresql://app@db.invalid/app?sslmode=verify-ca", Level.WARNING),
        ("host=db.invalid sslmode=verify-full", Level.OK),
        ("host=127.0.0.1 port=1", Level.OK),
        ("host=/nowhere", Level.OK),
    ],
)
def test_a_dsn_to_another_machine_has_to_verify_the_server(dsn: str, level: Level) -> None:
    code = "tls-in-order" if level is Level.OK else "tls-unverified"
    finding = expect(found(dsn, "tls"), level, code)
    assert level is Level.OK or "sslmode=verify-full" in str(finding.fix)


def test_the_listener_dsn_has_to_verify_the_server_too(dsn: str) -> None:
    settings = settings_of(dsn, listen_dsn="host=db.invalid sslmode=prefer")
    expect(found(settings, "tls"), Level.WARNING, "tls-unverified", "PGOUTBOX_LISTEN_DSN", "sslmode=prefer")


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "words"),
    [
        (f"postgresql://app:{CANARY}@127.0.0.1:1/app", "port 1 failed"),
        (f"postgresql://app:p@{CANARY}#x@127.0.0.1:1/app", ""),
        (f"host=127.0.0.1 password={CANARY} nonsense", "is not a connection string"),
    ],
)
def test_an_unreachable_database_is_a_problem_and_transports_are_still_checked(dsn: str, words: str) -> None:
    findings = list(examine(load_settings(dsn=dsn, connect_timeout_seconds=1)))
    expect(
        [finding for finding in findings if finding.check == "database"],
        Level.PROBLEM,
        "database-unreachable",
        "PGOUTBOX_DSN",
        words,
    )
    assert {"smtp", "webhooks", "kafka"} <= {finding.check for finding in findings}


def test_a_database_with_another_encoding_is_a_problem(server: Server) -> None:
    with server.database() as database:
        dsn = server.dsn_for("postgres")
        name = sql.Identifier(f"{database}_ascii")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0").format(name)
            )
            try:
                expect(
                    found(server.dsn_for(f"{database}_ascii"), "server"),
                    Level.PROBLEM,
                    "encoding-not-utf8",
                    "SQL_ASCII",
                    "UTF8",
                )
            finally:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def test_a_read_only_session_is_a_problem(dsn: str, db: psycopg.Connection) -> None:
    database = sql.Identifier(str(conninfo_to_dict(dsn)["dbname"]))
    db.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(database))
    expect(found(dsn, "server"), Level.PROBLEM, "read-only-session", "default_transaction_read_only")


@pytest.mark.slow
def test_a_standby_is_a_problem_and_its_slot_and_feedback_are_found_on_the_primary(
    own: OwnServer, workshop: Workshop
) -> None:
    limits = Limits(transactions=0)
    reporting = {
        "hot_standby_feedback": "on",
        "wal_receiver_status_interval": "1",
        "max_prepared_transactions": "5",
    }
    with own.connect() as db, workshop.standby_of(own, "reports") as standby:
        standby.start(**reporting)
        expect(found(standby.dsn, "server"), Level.PROBLEM, "standby", "target_session_attrs=read-write")
        feedback = "SELECT FROM pg_stat_replication WHERE backend_xmin IS NOT NULL"
        wait_until(lambda: db.execute(feedback).fetchall(), lambda: "the standby tells what it reads")
        expect(
            found(own.dsn, "transactions", limits=limits),
            Level.WARNING,
            "vacuum-held-by-standby",
            "reports",
            "hot_standby_feedback=off",
        )
        standby.stop()
        db.execute("SELECT pg_create_physical_replication_slot('for_reports')")
        try:
            standby.start(**reporting, primary_slot_name="for_reports")
            held = "SELECT FROM pg_replication_slots WHERE xmin IS NOT NULL"
            wait_until(lambda: db.execute(held).fetchall(), lambda: "the slot holds what the standby reads")
            standby.stop("immediate")
            expect(
                found(own.dsn, "transactions", limits=limits),
                Level.WARNING,
                "vacuum-held-by-slot",
                "for_reports",
                "pg_drop_replication_slot('for_reports')",
            )
        finally:
            standby.stop("immediate")
            unused = "SELECT FROM pg_replication_slots WHERE NOT active"
            wait_until(lambda: db.execute(unused).fetchall(), lambda: "the slot is free")
            db.execute("SELECT pg_drop_replication_slot('for_reports')")


def test_a_transaction_pooler_for_the_listener_is_a_problem(pooled_dsn: str) -> None:
    expect(found(pooled_dsn, "pooler"), Level.PROBLEM, "transaction-pooler", "PGOUTBOX_LISTEN_DSN")
    assert levels(found(pooled_dsn, "listener")) == ["skipped"]


@pytest.mark.slow
def test_a_pooler_is_accepted_if_the_listener_bypasses_it_or_is_off(dsn: str, pooled_dsn: str) -> None:
    around = settings_of(pooled_dsn, listen_dsn=dsn)
    expect(found(around, "pooler"), Level.OK, "pooler-bypassed")
    expect(found(around, "listener"), Level.OK, "notification-arrived")
    without = settings_of(pooled_dsn, listen=False)
    expect(found(without, "pooler"), Level.OK, "pooler-without-listener", "PGOUTBOX_LISTEN=false")
    assert levels(found(without, "listener")) == ["skipped"]
    through = settings_of(dsn, listen_dsn=pooled_dsn)
    expect(found(through, "listener"), Level.PROBLEM, "listener-through-pooler", "PGOUTBOX_LISTEN_DSN")


def test_a_listener_on_another_database_is_a_problem(dsn: str, empty_dsn: str) -> None:
    settings = settings_of(dsn, listen_dsn=empty_dsn)
    findings = found(settings, "listener", limits=Limits(round_trip_seconds=0.2))
    expect(findings, Level.PROBLEM, "notification-lost", "PGOUTBOX_LISTEN_DSN")


def test_a_listener_that_cannot_connect_is_a_problem(dsn: str) -> None:
    settings = settings_of(dsn, listen_dsn=f"postgresql://app:{CANARY}@127.0.0.1:1/app", connect_timeout_seconds=1)
    finding = expect(found(settings, "listener"), Level.PROBLEM, "listener-unreachable", "PGOUTBOX_LISTEN_DSN")
    assert CANARY not in str(finding)


def test_an_unresponsive_server_is_abandoned(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgoutbox.doctor.context.STATEMENT_SECONDS", 0)
    monkeypatch.setattr("pgoutbox.doctor.context.ANSWER_SECONDS", 0.3)
    with proxy_to(dsn, tmp_path) as proxy:
        findings = examine(settings_of(proxy.dsn))
        while next(findings).check != "database":
            pass
        with proxy.stalled():
            expect([next(findings)], Level.PROBLEM, "check-failed", "0.3 s")
            assert {finding.check for finding in findings} >= {"slots", "schema", "smtp"}


@pytest.mark.parametrize(("ahead", "word"), [(60.0, "behind"), (-60.0, "ahead of")])
def test_clock_differences_are_a_warning(dsn: str, ahead: float, word: str) -> None:
    expect(found(dsn, "clock", ahead_seconds=ahead), Level.WARNING, "clock-differs", "60 s", word)


@pytest.mark.slow
def test_a_server_that_does_not_flush_to_disk_is_a_problem(reckless: OwnServer) -> None:
    findings = found(reckless.dsn, "durability")
    assert [(finding.level, finding.code) for finding in findings] == [
        (Level.PROBLEM, "fsync-off"),
        (Level.PROBLEM, "full-page-writes-off"),
    ]


def test_asynchronous_commits_are_a_warning_for_any_role(own: OwnServer) -> None:
    with own.connect() as db:
        db.execute("CREATE ROLE hasty_app LOGIN")
        db.execute("ALTER ROLE hasty_app SET synchronous_commit = off")
        try:
            expect(found(own.dsn, "durability"), Level.WARNING, "asynchronous-commits", "hasty_app")
        finally:
            db.execute("DROP ROLE hasty_app")
        assert levels(found(own.dsn, "durability")) == ["ok"]
        hasty = make_conninfo(own.dsn, options="-c synchronous_commit=off")
        expect(found(hasty, "durability"), Level.WARNING, "asynchronous-commits", "this session")


def test_an_unlogged_table_is_a_problem(own: OwnServer) -> None:
    with own.connect() as db:
        db.execute("ALTER TABLE pgoutbox.message_live SET UNLOGGED")
        try:
            finding = expect(found(own.dsn, "durability"), Level.PROBLEM, "unlogged-tables", "message_live")
        finally:
            db.execute(str(finding.fix).encode())
    assert levels(found(own.dsn, "durability")) == ["ok"]


def test_a_session_that_stays_in_its_transaction_is_named(dsn: str) -> None:
    with psycopg.connect(dsn, application_name="month-end report") as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT count(*) FROM pgoutbox.message")
        pid = reader.info.backend_pid
        findings = [
            finding
            for finding in found(dsn, "transactions", limits=Limits(transaction_seconds=0))
            if f"session {pid} " in finding.what
        ]
        user = reader.info.user
    expect(
        findings,
        Level.WARNING,
        "vacuum-held-by-session",
        user,
        "month-end report",
        "idle in transaction",
        f"pg_terminate_backend({pid})",
    )


def test_a_forgotten_prepared_transaction_is_named_with_a_working_fix(own: OwnServer) -> None:
    limits = Limits(transaction_seconds=0)
    with own.connect() as db:
        db.execute("BEGIN")
        enqueue(db)
        db.execute("PREPARE TRANSACTION 'order 7''s payment'")
        finding = expect(
            found(own.dsn, "transactions", limits=limits),
            Level.WARNING,
            "vacuum-held-by-prepared-transaction",
            "order 7's payment",
        )
        db.execute(str(finding.fix).partition(" or ")[2].encode())
    assert levels(found(own.dsn, "transactions", limits=limits)) == ["ok"]


def test_a_role_that_cannot_see_other_sessions_reports_that_limit(role: tuple[str, str]) -> None:
    name, role_dsn = role
    expect(found(role_dsn, "transactions"), Level.SKIPPED, "sessions-invisible", f"GRANT pg_read_all_stats TO {name}")


def test_an_unused_replication_slot_is_named(own: OwnServer) -> None:
    with own.connect() as db:
        db.execute("SELECT pg_create_physical_replication_slot('forgotten', true)")
        try:
            expect(
                found(own.dsn, "slots", limits=Limits(retained_bytes=0)),
                Level.WARNING,
                "slot-retains-wal",
                "forgotten",
                "unused, reserved",
                "pg_drop_replication_slot('forgotten')",
            )
            assert levels(found(own.dsn, "slots")) == ["ok"]
        finally:
            db.execute("SELECT pg_drop_replication_slot('forgotten')")


def test_notifications_retained_by_a_listener_are_found(own: OwnServer) -> None:
    with own.connect() as sleeper, own.connect() as db:
        sleeper.execute("LISTEN anything")
        sleeper.execute("BEGIN")
        sleeper.execute("SELECT 1")
        for number in range(20):
            db.execute("SELECT pg_notify('anything', %s)", (f"{number} {'x' * 7_000}",))
        findings = found(own.dsn, "notify", limits=Limits(notify_warning=1e-9))
        expect(findings, Level.WARNING, "notify-queue-fills")
        findings = found(own.dsn, "notify", limits=Limits(notify_warning=1e-9, notify_problem=1e-9))
        expect(findings, Level.PROBLEM, "notify-queue-fills")


def test_disabled_autovacuum_is_found_for_the_server_and_for_a_table(reckless: OwnServer) -> None:
    expect(found(reckless.dsn, "vacuum"), Level.PROBLEM, "autovacuum-off", "autovacuum=on")
    with reckless.connect() as db:
        db.execute("ALTER TABLE pgoutbox.message_live SET (autovacuum_enabled = off)")
        finding = expect(found(reckless.dsn, "vacuum"), Level.WARNING, "autovacuum-off-for-table", "message_live")
        db.execute(str(finding.fix).encode())
    assert levels(found(reckless.dsn, "vacuum")) == ["problem"]


@pytest.mark.slow
def test_a_majority_of_dead_rows_is_found(reckless: OwnServer) -> None:
    with reckless.connect() as db:
        for _ in range(20):
            enqueue(db)
        db.execute("DELETE FROM pgoutbox.message")
        db.execute("SELECT pg_stat_force_next_flush()")
        findings = found(reckless.dsn, "vacuum", limits=Limits(dead_rows=10))
    expect(findings, Level.WARNING, "dead-rows", "message_live", "20", "never")


# --- the schema -------------------------------------------------------------------------------------------------------


def test_a_missing_schema_is_a_problem_and_skips_the_schema_checks(empty_dsn: str) -> None:
    findings = list(examine(settings_of(empty_dsn)))
    expect(
        [finding for finding in findings if finding.check == "schema"],
        Level.PROBLEM,
        "schema-missing",
        "pgoutbox migrate",
    )
    assert levels([finding for finding in findings if finding.check in ("rights", "due", "failed")]) == ["skipped"] * 3


def test_an_outdated_schema_is_a_problem(dsn: str, db: psycopg.Connection) -> None:
    db.execute("DELETE FROM pgoutbox.revision")
    expect(found(dsn, "schema"), Level.PROBLEM, "schema-version-differs", "version 0", "pgoutbox migrate")


def test_a_missing_relation_is_a_problem(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER TABLE pgoutbox.audit RENAME TO elsewhere")
    expect(found(dsn, "schema"), Level.PROBLEM, "relation-missing", "pgoutbox.audit")


def test_every_relation_of_the_schema_is_checked(dsn: str, db: psycopg.Connection) -> None:
    relations = db.execute(
        """
        SELECT relname::text FROM pg_class
        WHERE relnamespace = 'pgoutbox'::regnamespace AND (relkind IN ('r', 'p', 'v') OR relname = 'message_id_seq')
            AND relname <> 'alembic_version' AND relname !~ '[0-9]{8}$'
        """
    ).fetchall()
    assert db.execute(MISSING_RELATIONS).fetchall() == []
    db.execute("ALTER SCHEMA pgoutbox RENAME TO elsewhere")
    assert sorted(db.execute(MISSING_RELATIONS).fetchall()) == sorted(relations)


def test_a_role_without_privileges_is_a_problem_with_the_grants_it_needs(
    db: psycopg.Connection, role: tuple[str, str]
) -> None:
    name, role_dsn = role
    expect(found(role_dsn, "schema"), Level.PROBLEM, "schema-forbidden", f"GRANT pgoutbox_worker TO {name}")
    db.execute(sql.SQL("GRANT USAGE ON SCHEMA pgoutbox TO {}").format(sql.Identifier(name)))
    expect(found(role_dsn, "rights"), Level.PROBLEM, "no-rights", f"GRANT pgoutbox_worker TO {name}")
    assert levels(found(role_dsn, "due")) == ["skipped"]


def test_the_privileges_of_a_role_are_reported(db: psycopg.Connection, role: tuple[str, str]) -> None:
    name, role_dsn = role
    who = sql.Identifier(name)
    db.execute(sql.SQL("GRANT USAGE ON SCHEMA pgoutbox TO {}").format(who))
    db.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA pgoutbox TO {}").format(who))
    expect(found(role_dsn, "rights"), Level.OK, "rights-in-order", f"{name} may look")
    db.execute(sql.SQL("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pgoutbox TO {}").format(who))
    db.execute(sql.SQL("GRANT INSERT ON pgoutbox.message_live TO {}").format(who))
    expect(found(role_dsn, "rights"), Level.OK, "rights-in-order", "look, enqueue")
    db.execute(sql.SQL("GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA pgoutbox TO {}").format(who))
    assert found(role_dsn, "rights")[0].what == f"{name} may look, enqueue, work, operate"


@pytest.mark.parametrize(
    ("part", "may"),
    [
        ("producer", "enqueue"),
        ("worker", "look, enqueue, work"),
        ("operator", "look, operate"),
        ("viewer", "look"),
    ],
)
def test_each_pgoutbox_role_has_the_privileges_of_its_part(
    db: psycopg.Connection, role: tuple[str, str], part: str, may: str
) -> None:
    name, role_dsn = role
    db.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"pgoutbox_{part}"), sql.Identifier(name)))
    expect(found(role_dsn, "rights"), Level.OK, "rights-in-order", f"{name} may {may};", f"pgoutbox_{part}")


def test_the_worker_role_can_run_every_backlog_check(
    db: psycopg.Connection, role: tuple[str, str], handled: Outbox
) -> None:
    name, role_dsn = role
    db.execute(sql.SQL("GRANT pgoutbox_worker, pg_read_all_stats TO {}").format(sql.Identifier(name)))
    findings = [
        finding for finding in examine(settings_of(role_dsn), handled) if finding.check not in ("durability", "workers")
    ]
    assert {finding.level for finding in findings} == {Level.OK, Level.SKIPPED}
    skipped = {finding.check for finding in findings if finding.level is Level.SKIPPED}
    assert skipped <= {"partitions", "smtp", "apprise", "redis", "nats", "rabbitmq", "kafka"}


OWED: Final = {
    "retention", "handlers", "leases", "encryption", "due", "breakers", "receivers", "schedules", "failed",
    "destinations",
}  # fmt: skip


@pytest.fixture
def troubled(db: psycopg.Connection) -> Outbox:
    """Create a finding for every backlog check, and the application that the messages are for."""
    outbox = Outbox()
    outbox.define(Topic("mail"))
    for queue, control in (("full", "max_in_flight = 1"), ("paused", "paused_at = now()")):
        enqueue(db, queue=queue, destination="kafka:orders")
        db.execute(f"INSERT INTO pgoutbox.queue (name) VALUES ('{queue}')".encode())
        db.execute(f"UPDATE pgoutbox.queue SET {control} WHERE name = '{queue}'".encode())
    put(db, State.SENDING, queue="full")
    stalled = """[{"reason_code": "stalled", "breaker_key": "http:slow", "started_at": "2026-01-01"}]"""
    attempted = "UPDATE pgoutbox.message SET attempts = %s::jsonb, attempt_count = 1, lane = 1 WHERE id = %s"
    db.execute(attempted, [stalled, enqueue(db, queue="slow")])
    for _ in range(20):
        put(db, State.SENT)
        put(db, State.FAILED)
    db.execute(HOUR_AGO)
    db.execute("UPDATE pgoutbox.message SET claimed_at = finished_at - interval '10 minutes' WHERE state = 'sent'")
    db.execute("UPDATE pgoutbox.message SET last_error = %s WHERE state = 'failed'", [f"550 token={CANARY}"])
    put(db, State.SENT, age=timedelta(days=9))
    sealed = Keyring(SecretStr(Fernet.generate_key().decode())).seal(
        "{}", Identity("payload", "mail.secret"), dedupe_key=None
    )
    enqueue(db, "mail.secret", json.loads(sealed))
    db.execute("INSERT INTO pgoutbox.retention VALUES ('1 day', '*', 'sent')")
    db.execute(
        "INSERT INTO pgoutbox.schedule (name, rule, message, problem) VALUES ('s', '61 * * * *', '{}', 'Bad minute')"
    )
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error) "
        "VALUES ('smtp mail.club.org', now(), 30, 'w', %s)",
        [f"refused: password={CANARY}"],
    )
    return outbox


def told(findings: list[Finding]) -> list[Finding]:
    """Return the backlog findings without the numbers that grow from one run to the next."""
    return [
        dataclasses.replace(finding, what=re.sub(r"\d+(\.\d+)?", "#", finding.what))
        for finding in findings
        if finding.check in OWED | {"vacuum", "partitions", "workers", "transactions"}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["worker", "operator", "viewer"])
def test_a_viewer_gets_the_same_findings_as_the_owner(
    dsn: str, role: tuple[str, str], db: psycopg.Connection, troubled: Outbox, part: str
) -> None:
    name, role_dsn = role
    grant = sql.SQL("GRANT {}, pg_read_all_stats TO {}")
    db.execute(grant.format(sql.Identifier(f"pgoutbox_{part}"), sql.Identifier(name)))
    owners, theirs = (list(examine(settings_of(one), troubled)) for one in (dsn, role_dsn))
    assert told(theirs) == told(owners)
    assert {finding.check for finding in theirs if finding.level in (Level.WARNING, Level.PROBLEM)} >= OWED
    assert CANARY not in str(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "skipped"),
    [
        ("worker", {"transactions"}),
        ("operator", {"transactions"}),
        ("viewer", {"transactions"}),
        ("producer", {"transactions", "copy", "sequence", "redirect", "shares", "workers", "undelivered", *OWED}),
    ],
)
def test_checks_without_privileges_are_skipped_with_the_missing_grant(
    role: tuple[str, str], db: psycopg.Connection, troubled: Outbox, part: str, skipped: set[str]
) -> None:
    name, role_dsn = role
    db.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"pgoutbox_{part}"), sql.Identifier(name)))
    findings = [
        finding
        for finding in examine(settings_of(role_dsn, encryption_keys=Fernet.generate_key().decode()), troubled)
        if finding.level is Level.SKIPPED
        and finding.check not in ("smtp", "apprise", "redis", "nats", "rabbitmq", "kafka")
    ]
    assert {finding.check for finding in findings} == skipped | (
        {"encryption", "payloads"} if part != "worker" else set()
    )
    assert all("GRANT " in str(finding.fix) for finding in findings)


@pytest.mark.slow
def test_a_role_without_access_to_payloads_reports_that_keys_were_not_checked(
    db: psycopg.Connection, role: tuple[str, str]
) -> None:
    name, role_dsn = role
    db.execute(sql.SQL("GRANT pgoutbox_viewer TO {}").format(sql.Identifier(name)))
    grant = f"GRANT SELECT ON pgoutbox.message TO {name}"
    key = Fernet.generate_key().decode()
    settings = settings_of(role_dsn, encryption_keys=key)
    expect(found(settings, "encryption"), Level.OK, "no-encrypted-payload")
    enqueue(
        db,
        "mail.secret",
        json.loads(Keyring(SecretStr(key)).seal("{}", Identity("payload", "mail.secret"), dedupe_key=None)),
    )
    expect(found(settings, "encryption"), Level.SKIPPED, "payloads-forbidden", "mail.secret", grant)
    expect(found(role_dsn, "encryption"), Level.PROBLEM, "payloads-undecryptable", "1 payload", "mail.secret")
    db.execute(grant.encode())
    expect(found(settings, "encryption"), Level.OK, "payloads-decryptable")


def test_a_superuser_is_a_warning(dsn: str) -> None:
    expect(found(dsn, "rights"), Level.WARNING, "superuser")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grant", "what"),
    [
        ("GRANT CREATE ON SCHEMA pgoutbox TO PUBLIC", "CREATE in the schema"),
        ("GRANT EXECUTE ON FUNCTION pgoutbox.cancel TO PUBLIC", "function cancel"),
        ("GRANT SELECT ON pgoutbox.message TO PUBLIC", "table message"),
        ("GRANT SELECT (topic) ON pgoutbox.message TO PUBLIC", "table message"),
        ("GRANT DELETE ON pgoutbox.audit TO PUBLIC", "table audit"),
    ],
)
def test_privileges_of_public_are_a_problem_with_a_working_fix(
    dsn: str, db: psycopg.Connection, grant: str, what: str
) -> None:
    assert levels(found(dsn, "rights")) == ["warning"]
    db.execute(grant.encode())
    finding = expect(found(dsn, "rights"), Level.PROBLEM, "public-rights", what)
    db.execute(str(finding.fix).encode())
    assert levels(found(dsn, "rights")) == ["warning"]


# --- owed messages ----------------------------------------------------------------------------------------------------

DROP_DATED: Final = """
DO $$
DECLARE
    dated regclass;
BEGIN
    FOR dated IN
        SELECT i.inhrelid::regclass
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'pgoutbox.message_done'::regclass AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT'
    LOOP
        EXECUTE 'DROP TABLE ' || dated;
    END LOOP;
END
$$
"""
ADD_DATED: Final = """
DO $$
BEGIN
    EXECUTE format(
        'CREATE TABLE pgoutbox.message_done_20200101 PARTITION OF pgoutbox.message_done FOR VALUES FROM (%L) TO (%L)',
        now() - interval '100 days',
        now() + interval '{days} days 1 hour'
    );
END
$$
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "level", "code", "time"),
    [
        (-50, Level.WARNING, "partitions-ended", "50 days"),
        (0, Level.WARNING, "partitions-end-soon", "60 min"),
        (9, Level.OK, "partitions-in-order", "9 days"),
    ],
)
def test_partitions_that_end_soon_are_a_warning(
    dsn: str, db: psycopg.Connection, days: int, level: Level, code: str, time: str
) -> None:
    db.execute(DROP_DATED)
    assert levels(found(dsn, "partitions")) == ["skipped"]
    db.execute(ADD_DATED.replace("{days}", str(days)).encode())
    expect(found(dsn, "partitions"), level, code, time)


def test_a_sequence_behind_the_messages_is_a_problem_with_a_working_fix(dsn: str, db: psycopg.Connection) -> None:
    newest = [enqueue(db) for _ in range(3)][-1]
    expect(found(dsn, "sequence"), Level.OK, "sequence-in-order", str(newest))
    db.execute("SELECT setval('pgoutbox.message_id_seq', 1)")
    finding = expect(found(dsn, "sequence"), Level.PROBLEM, "sequence-behind", "at 1,", str(newest))
    db.execute(statement_of(finding))
    assert levels(found(dsn, "sequence")) == ["ok"]
    assert enqueue(db) == newest + 1


@pytest.mark.parametrize(
    ("lock", "why"),
    [
        ("pg_advisory_lock_shared", "so they poll"),
        ("pg_advisory_lock", "every enqueue in that queue sends a notification"),
    ],
)
def test_a_foreign_session_that_holds_a_wake_up_lock_is_named(
    dsn: str, connect: Connect, lock: LiteralString, why: str
) -> None:
    assert levels(found(dsn, "notify")) == ["ok"]
    stranger = connect(autocommit=True)
    stranger.execute("SET application_name = 'stranger'")
    stranger.execute(sql.SQL("SELECT {}(1885826146, hashtext('default'))").format(sql.SQL(lock)))
    pid = stranger.info.backend_pid
    expect(
        found(dsn, "notify"),
        Level.WARNING,
        "foreign-wake-up-lock",
        f"process {pid}",
        str(stranger.info.user),
        "stranger",
        f"pg_terminate_backend({pid})",
        why,
    )


def test_a_producer_with_a_shared_wake_up_lock_is_not_reported(dsn: str, connect: Connect) -> None:
    enqueue(connect())
    assert levels(found(dsn, "notify")) == ["ok"]


def test_a_sequence_with_a_cache_is_a_problem_with_a_working_fix(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER SEQUENCE pgoutbox.message_id_seq CACHE 100")
    finding = expect(found(dsn, "sequence"), Level.PROBLEM, "sequence-cached", "CACHE 100")
    db.execute(statement_of(finding))
    assert levels(found(dsn, "sequence")) == ["ok"]


def statement_of(finding: Finding) -> bytes:
    """Return the SQL of the finding's fix."""
    statement = re.search(r"(SELECT|ALTER) [^;]*;", str(finding.fix))
    assert statement is not None
    return statement[0].encode()


def test_partitions_of_a_wrong_clock_do_not_hide_the_missing_one_of_today(dsn: str, db: psycopg.Connection) -> None:
    db.execute(DROP_DATED)
    add_partition(db, -40, days=7)
    expect(found(dsn, "partitions"), Level.WARNING, "partition-of-today-missing")


def test_a_retention_rule_that_is_not_applied_is_a_warning(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.SENT, age=timedelta(days=9))
    put(db, State.SENT, topic="kept", age=timedelta(days=9))
    db.execute("INSERT INTO pgoutbox.retention VALUES ('5 days', '*', 'sent'), ('90 days', 'kept', 'sent')")
    expect(found(dsn, "retention"), Level.WARNING, "retention-overdue", "sent messages of *", "4 days")
    db.execute("UPDATE pgoutbox.retention SET keep = '10 days' WHERE topic = '*'")
    expect(found(dsn, "retention"), Level.OK, "retention-in-order", "2")


def test_many_messages_without_a_retention_rule_are_a_warning(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.SENT)
    db.execute("ANALYZE pgoutbox.message_done")
    findings = found(dsn, "retention", limits=Limits(done_without_rules=1))
    expect(findings, Level.WARNING, "retention-missing", "pgoutbox retention set")
    assert levels(found(dsn, "retention")) == ["ok"]


@pytest.mark.slow
def test_missing_workers_are_a_warning(dsn: str, db: psycopg.Connection) -> None:
    expect(found(dsn, "workers"), Level.WARNING, "no-worker", "pgoutbox worker")
    report(db, "a", ["default"], ["greet"])
    expect(found(dsn, "workers"), Level.OK, "workers-running", "1 worker", "default")
    db.execute("UPDATE pgoutbox.worker SET seen_at = now() - interval '3 minutes'")
    expect(found(dsn, "workers"), Level.WARNING, "no-worker")


@pytest.mark.slow
def test_runs_of_cron_replace_a_running_worker(dsn: str, db: psycopg.Connection) -> None:
    report(db, "w1", ["default"], ["greet"])
    db.execute("UPDATE pgoutbox.worker SET ended_at = now(), run_interval_seconds = 600")
    expect(found(dsn, "workers"), Level.OK, "worker-ran-once", "last run with --once or --drain")
    message_id = enqueue(db, "greet")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '15 minutes' WHERE id = %s", [message_id])
    assert levels(found(dsn, "due")) == ["ok"]
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '25 minutes'")
    expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker", "crontab")
    db.execute("UPDATE pgoutbox.worker SET ended_at = now() - interval '26 hours'")
    assert found(dsn, "workers") == [], "the finding about the late message names the cause"
    db.execute("DELETE FROM pgoutbox.message_live")
    expect(found(dsn, "workers"), Level.WARNING, "no-worker", "pgoutbox worker")


def test_the_queues_of_running_workers_are_named(dsn: str, db: psycopg.Connection) -> None:
    report(db, "a", ["default"], ["greet"])
    report(db, "b", ["bulk", "default"], ["greet"])
    expect(found(dsn, "workers"), Level.OK, "workers-running", "2 workers", "bulk, default")


def test_a_role_that_cannot_see_workers_does_not_report_missing_ones(
    db: psycopg.Connection, role: tuple[str, str]
) -> None:
    name, role_dsn = role
    db.execute(sql.SQL("GRANT USAGE ON SCHEMA pgoutbox TO {}").format(sql.Identifier(name)))
    db.execute(sql.SQL("GRANT EXECUTE ON FUNCTION pgoutbox._require_package TO {}").format(sql.Identifier(name)))
    expect(found(role_dsn, "workers"), Level.SKIPPED, "forbidden", "GRANT pgoutbox_viewer")


def test_topics_without_a_handler_are_named(dsn: str, db: psycopg.Connection, handled: Outbox) -> None:
    assert levels(found(dsn, "handlers")) == ["skipped"]
    assert levels(found(dsn, "handlers", outbox=handled)) == ["ok"]
    handled.define(Topic("later.perhaps"))
    enqueue(db, "mail.lost")
    enqueue(db, "mail.lost")
    findings = found(dsn, "handlers", outbox=handled)
    expect(findings, Level.PROBLEM, "messages-without-handler", "mail.lost", "2")
    expect(findings, Level.WARNING, "topics-without-handler", "later.perhaps")


def test_of_many_topics_without_a_handler_those_with_the_most_messages_are_named(
    dsn: str, db: psycopg.Connection, handled: Outbox
) -> None:
    for number in range(25):
        enqueue(db, f"lost.{number:02}")
    enqueue(db, "lost.24")
    findings = found(dsn, "handlers", outbox=handled)
    assert len(findings) == 21
    assert "lost.24" in findings[0].what
    assert findings[-1].what == (
        "5 more topics with pending messages and no handler: lost.19, lost.20, lost.21, lost.22, lost.23"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("posing")
def test_alerts_have_the_handler_of_a_worker_that_sends_them(dsn: str, db: psycopg.Connection, handled: Outbox) -> None:
    enqueue(db, "pgoutbox.alert", destination="mailto:ops@club.org")
    db.execute(HOUR_AGO)
    settings = settings_of(dsn, alert_destination="mailto:ops@club.org")
    expect(found(settings, "handlers", outbox=handled), Level.OK, "handlers-in-order")
    expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", "PGOUTBOX_ALERT_DESTINATION")
    expect(found(settings, "due", outbox=handled), Level.PROBLEM, "due-without-handler", "pgoutbox.alert")
    report(db, "w2", ["default"], ["greet", "pgoutbox.alert"])
    expect(found(settings, "due", outbox=handled), Level.PROBLEM, "due-unclaimed")


def test_attempts_longer_than_their_lease_are_a_warning(dsn: str, db: psycopg.Connection) -> None:
    for _ in range(20):
        put(db, State.SENT)
    assert levels(found(dsn, "leases")) == ["ok"]
    db.execute("UPDATE pgoutbox.message SET claimed_at = finished_at - interval '10 minutes'")
    expect(
        found(dsn, "leases"), Level.WARNING, "attempts-outlast-lease", "mail", "10 min", "PGOUTBOX_LEASE_SECONDS", "600"
    )


@pytest.mark.parametrize("fair_key", [None, "k"])
def test_a_receiver_that_answers_too_slowly_is_named(dsn: str, db: psycopg.Connection, fair_key: str | None) -> None:
    for reason, key, minutes in (
        ("stalled", "http:slow", 5),
        ("stalled", "http:slow", 3),
        ("circuit_open", "smtp:mx", 5),
    ):
        last = {
            "attempt_count": 9,
            "times": 9,
            "outcome": "snoozed",
            "worker": "w",
            "error": "answers none of the 15 sends in flight",
            "reason_code": reason,
            "breaker_key": key,
        }
        db.execute(
            """
            UPDATE pgoutbox.message
            SET attempt_count = 9, max_attempts = 20, lane = CASE WHEN fair_key IS NULL THEN 1 ELSE 2 END,
                available_at = now() + interval '3 s',
                attempts = jsonb_build_array(%s || jsonb_build_object(
                    'started_at', now() - make_interval(mins => %s), 'ended_at', now()
                ))
            WHERE id = %s
            """,
            [Jsonb(last), minutes, enqueue(db, queue="hooks", fair_key=fair_key)],
        )
    facts = "http:slow answers so slowly that 2 messages wait, the first for 5 min"
    expect(found(dsn, "receivers"), Level.WARNING, "receiver-stalled", facts, "pgoutbox list --queue hooks")
    db.execute("UPDATE pgoutbox.message SET attempts = jsonb_set(attempts, '{0,started_at}', to_jsonb(now()))")
    expect(found(dsn, "receivers"), Level.OK, "receivers-answer")


@pytest.mark.slow
def test_messages_long_in_flight_are_a_warning(dsn: str, db: psycopg.Connection) -> None:
    message_id = enqueue(db)
    claim(db)
    assert levels(found(dsn, "leases")) == ["ok"]
    db.execute(
        "WITH begun AS (UPDATE pgoutbox.message_live SET claimed_at = now() - interval '20 minutes')"
        " UPDATE pgoutbox.claim SET claimed_at = now() - interval '20 minutes'"
    )
    expect(
        found(dsn, "leases"),
        Level.WARNING,
        "long-in-flight",
        "greet",
        "1 message",
        "20 min",
        str(message_id),
        "finish_refused",
    )
    lapse(db, message_id)
    assert levels(found(dsn, "leases")) == ["ok"]


def fail(db: psycopg.Connection, error: str | None, *, topic: str = "mail", hours: float = 0) -> int:
    message_id = put(db, State.FAILED, topic=topic, age=timedelta(hours=hours))
    db.execute("UPDATE pgoutbox.message SET last_error = %s WHERE id = %s", (error, message_id))
    return message_id


@pytest.mark.slow
def test_one_failed_message_of_the_last_day_is_a_warning_without_secrets(dsn: str, db: psycopg.Connection) -> None:
    expect(found(dsn, "failed"), Level.OK, "nothing-failed", "25 h")
    fail(db, f"refused: password={CANARY}")
    finding = expect(
        found(dsn, "failed"),
        Level.WARNING,
        "messages-failed",
        "1 message of mail",
        "25 h",
        "refused: password=",
        "pgoutbox failures --topic mail",
        "pgoutbox redrive --group ",
        "pgoutbox dismiss --group ",
    )
    assert CANARY not in str(finding)


def test_a_daily_run_of_the_doctor_misses_no_failure(dsn: str, db: psycopg.Connection) -> None:
    """A cron job starts some seconds later than on the day before."""
    fail(db, "550 no", hours=24.1)
    expect(found(dsn, "failed"), Level.WARNING, "messages-failed", "1 message of mail")
    db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '26 hours'")
    expect(found(dsn, "failed"), Level.OK, "nothing-failed")


def test_every_cause_of_failures_is_named_once_for_each_topic(dsn: str, db: psycopg.Connection) -> None:
    for name in ("ada", "grace", "linus"):
        fail(db, f"550 5.1.1 <{name}@club.org>: user unknown")
    fail(db, "552 5.3.4 message size exceeds the limit")
    fail(db, "404 Not Found", topic="hook")
    fail(db, None, topic="hook")
    findings = found(dsn, "failed")
    assert [finding.what for finding in findings] == [
        "3 messages of mail failed within the last 25 h: 550 5.1.1 <linus@club.org>: user unknown",
        "1 message of hook failed within the last 25 h: 404 Not Found",
        "1 message of hook failed within the last 25 h: no error recorded",
        "1 message of mail failed within the last 25 h: 552 5.3.4 message size exceeds the limit",
    ]
    assert set(levels(findings)) == {"warning"}


def test_the_causes_of_failures_are_bounded_and_the_rest_is_counted(dsn: str, db: psycopg.Connection) -> None:
    for letter in "abcdefghijklm":
        fail(db, f"the parcel {letter} is lost")
    findings = found(dsn, "failed")
    assert levels(findings) == ["warning"] * 11
    rest = findings[-1]
    assert rest.what == "3 messages failed within the last 25 h for 3 more causes"
    assert "pgoutbox failures" in (rest.fix or "")


def test_a_message_that_was_redriven_or_dismissed_is_no_failure(dsn: str, db: psycopg.Connection) -> None:
    first, second = (fail(db, "550 no") for _ in range(2))
    operator = Operator(db)
    operator.redrive(first)
    operator.dismiss(second, "told by phone")
    expect(found(dsn, "failed"), Level.OK, "nothing-failed")


def test_an_open_breaker_is_named_with_its_error_but_no_secret(dsn: str, db: psycopg.Connection) -> None:
    db.execute(
        """
        INSERT INTO pgoutbox.breaker (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
        VALUES ('smtp:mx.club.org:587', now() - interval '3 hours', now(), 60, 'w', %s)
        """,
        (f"AUTH: 535 token={CANARY}",),
    )
    finding = expect(found(dsn, "breakers"), Level.WARNING, "breaker-open", "smtp:mx.club.org:587", "3 h", "AUTH: 535")
    assert CANARY not in str(finding)


class TestShares:
    """Tests fair keys that wait because of their share."""

    def test_a_paused_key_whose_messages_wait_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db, fair_key="acme")
        db.execute("SELECT pgoutbox.set_fair_share('default', 'acme', max_in_flight => 0)")
        assert levels(found(dsn, "shares")) == ["ok"]
        db.execute(HOUR_AGO)
        expect(
            found(dsn, "shares"),
            Level.WARNING,
            "keys-paused",
            "1 fair key paused",
            "60 min: acme",
            "share default --max-in-flight N acme",
        )
        db.execute("SELECT pgoutbox.set_fair_share('default', 'acme')")
        assert levels(found(dsn, "shares")) == ["ok"]

    def test_a_key_at_the_limit_of_its_queue_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        for _ in range(2):
            enqueue(db, fair_key="a b")
        enqueue(db, fair_key="free")
        db.execute(HOUR_AGO)
        db.execute("SELECT pgoutbox.set_fair_share('default', max_in_flight => 1)")
        assert levels(found(dsn, "shares")) == ["ok"]
        db.execute("UPDATE pgoutbox.message SET lane = 0 WHERE id = (SELECT min(id) FROM pgoutbox.message)")
        expect(
            found(dsn, "shares"),
            Level.WARNING,
            "keys-limited",
            "at their limit",
            "60 min: a b",
            "--max-in-flight N 'a b'",
        )

    def test_a_key_that_waits_at_its_rate_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        for key in ("-a", "free"):
            enqueue(db, "mail", fair_key=key)
            enqueue(db, "mail", fair_key=key)
        db.execute(HOUR_AGO)
        db.execute("SELECT pgoutbox.set_fair_share('default', rate_count => 1, rate_seconds => 3600)")
        db.execute("SELECT pgoutbox.set_fair_share('default', 'free', weight => 2)")
        assert levels(found(dsn, "shares")) == ["ok"]
        db.execute("SELECT pgoutbox._give_turns('default', '{mail}', 2)")
        expect(
            found(dsn, "shares"),
            Level.WARNING,
            "keys-rate-limited",
            "1 fair key at their rate",
            "60 min: -a",
            "share default --rate RATE -- -a",
        )


class TestDue:
    """Tests due messages that no worker claims, and the reported reason."""

    @pytest.mark.slow
    def test_a_missing_worker_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db)
        assert levels(found(dsn, "due")) == ["ok"]
        db.execute(HOUR_AGO)
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker", "default", "1 message", "60 min")

    def test_messages_that_wait_for_their_turn_have_the_findings_of_others(
        self, dsn: str, db: psycopg.Connection
    ) -> None:
        for count, topic in enumerate(("greet", "greet", "bill")):
            enqueue(db, topic, fair_key=f"k{count % 2}")
        assert levels(found(dsn, "due")) == ["ok"]
        db.execute(HOUR_AGO)
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker", "default: 3 messages due", "60 min")
        db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{default}', '{greet}')")
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-handler", "no handler for bill")

    def test_fair_keys_that_get_no_turn_are_a_reason(self, dsn: str, db: psycopg.Connection) -> None:
        for key in ("big", "big", "small", "tiny"):
            enqueue(db, fair_key=key)
        db.execute(HOUR_AGO)
        db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{default}', '{greet}')")
        db.execute("SELECT pgoutbox.set_fair_share('default', 'big', max_in_flight => 0)")
        told = "2 of them of fair keys that get no turn"
        expect(found(dsn, "due"), Level.PROBLEM, "due-unclaimed", "4 messages due", told)
        db.execute("SELECT pgoutbox.set_fair_share('default', 'tiny', max_in_flight => 0)")
        told = "3 of them of fair keys that are paused"
        expect(found(dsn, "due"), Level.WARNING, "due-behind-shares", told, "pgoutbox keys default")

    def test_a_pause_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db)
        db.execute(HOUR_AGO)
        db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())")
        expect(found(dsn, "due"), Level.WARNING, "due-paused", "pgoutbox resume default")

    def test_a_pause_of_a_topic_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        """Also if only one message of it is first in its ordering key."""
        for key in ("k", "k", None):
            enqueue(db, ordering_key=key)
        db.execute(HOUR_AGO)
        db.execute("SELECT pgoutbox.pause_topic('greet')")
        expect(found(dsn, "due"), Level.WARNING, "due-paused", "topics: greet", "pgoutbox resume --topic greet")
        db.execute("SELECT pgoutbox.resume_topic('greet')")
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker")

    def test_a_paused_topic_hides_no_other_cause(self, dsn: str, db: psycopg.Connection) -> None:
        for topic in ("mail", "mail", "digest"):
            enqueue(db, topic)
        db.execute(HOUR_AGO)
        db.execute("SELECT pgoutbox.pause_topic('digest')")
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker", "1 of them of paused topics: digest")

    def test_an_ended_pause_is_not_a_reason(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db)
        db.execute(HOUR_AGO)
        db.execute(
            "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('default', now(), now() - interval '1 s')"
        )
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker")

    def test_a_used_up_rate_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db)
        db.execute(HOUR_AGO)
        db.execute(
            "INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst, tokens, tokens_at) "
            "VALUES ('default', 1, 86400, 1, 0, now())"
        )
        expect(found(dsn, "due"), Level.WARNING, "due-rate-limited", "1 in 86400 s", "--rate none")

    def test_a_reached_in_flight_limit_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db, "mail")
        db.execute(HOUR_AGO)
        put(db, State.SENDING)
        db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('default', 1)")
        expect(found(dsn, "due"), Level.WARNING, "due-in-flight-limited", "1", "--in-flight none")

    def test_a_failed_message_that_halts_its_key_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        first = put(db, State.FAILED, ordering_key="order-7")
        db.execute("UPDATE pgoutbox.message SET halts_key = true WHERE id = %s", (first,))
        enqueue(db, "mail", ordering_key="order-7")
        db.execute(HOUR_AGO + " WHERE state = 'pending'")
        expect(
            found(dsn, "due"), Level.PROBLEM, "due-behind-failed", f"message is {first}", f"pgoutbox redrive {first}"
        )

    def test_an_earlier_message_of_the_key_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db, "mail", ordering_key="order-7")
        second = enqueue(db, "mail", ordering_key="order-7")
        db.execute((HOUR_AGO + " WHERE id = %s").encode(), (second,))
        expect(found(dsn, "due"), Level.WARNING, "due-behind-earlier")

    @pytest.mark.usefixtures("posing")
    def test_a_missing_handler_is_named(self, dsn: str, db: psycopg.Connection, handled: Outbox) -> None:
        enqueue(db, "mail.lost")
        db.execute(HOUR_AGO)
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", "mail.lost")

    @pytest.mark.usefixtures("posing")
    def test_halted_messages_do_not_hide_a_missing_handler_of_the_others(
        self, dsn: str, db: psycopg.Connection, handled: Outbox
    ) -> None:
        first = put(db, State.FAILED, ordering_key="order-7")
        db.execute("UPDATE pgoutbox.message SET halts_key = true WHERE id = %s", (first,))
        for _ in range(2):
            enqueue(db, "mail", ordering_key="order-7")
        enqueue(db, "mail.lost")
        db.execute(HOUR_AGO + " WHERE state = 'pending'")
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", "2 of them", "mail.lost")

    def test_without_a_worker_a_handler_that_the_application_lacks_is_named(
        self, dsn: str, db: psycopg.Connection, handled: Outbox
    ) -> None:
        """A worker would not help. It would if the queue had another topic, or nobody knew the application."""
        enqueue(db, "push")
        db.execute(HOUR_AGO)
        facts = "topic push has no handler", "workers never claim messages without", "register a handler"
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", *facts)
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-worker")
        report(db, "a", ["other"], ["greet"])
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", *facts)
        expect(found(dsn, "due"), Level.PROBLEM, "due-in-unserved-queue")
        enqueue(db, "greet")
        db.execute(HOUR_AGO)
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-in-unserved-queue")

    def test_a_later_version_has_the_handler_of_the_application(self, dsn: str, db: psycopg.Connection) -> None:
        outbox = Outbox()

        @outbox.handler(Topic("greet", version=2))
        async def greet(message: Message, ctx: Context) -> None: ...

        enqueue(db, payload_version=2)
        enqueue(db, payload_version=3, queue="bulk")
        db.execute(HOUR_AGO)
        codes = {one.about.get("queue"): one.code for one in found(dsn, "due", outbox=outbox)}
        assert codes == {"default": "due-without-worker", "bulk": "due-without-handler"}

    def test_queues_behind_one_breaker_are_one_finding(self, dsn: str, db: psycopg.Connection) -> None:
        for queue in ("bulk", "default"):
            enqueue(db, queue=queue, destination="mailto:ada@example.org")
        db.execute(HOUR_AGO)
        db.execute(
            "INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES ('smtp:mx.club.org:25', '{bulk greet mailto,default greet mailto}', now() - interval '3 h',"
            " now(), 60, 'w', 'port 25 refuses connections')"
        )
        finding = expect(
            found(dsn, "due"),
            Level.PROBLEM,
            "due-behind-breaker",
            "2 queues: 2 messages due, the oldest for 60 min: they wait behind the breaker of smtp:mx.club.org:25",
            "port 25 refuses connections; the queues: bulk, default",
        )
        assert finding.about == {"breaker": "smtp:mx.club.org:25", "queue": "bulk, default"}
        assert found(dsn, "breakers") == [], "the finding about the late messages names the breaker"

    def test_a_freed_queue_is_not_said_to_have_no_worker(self, dsn: str, db: psycopg.Connection) -> None:
        """When a breaker is closed, workers need a moment to begin the messages behind it."""
        report(db, "w1", ["default"], ["greet"])
        enqueue(db, destination="mailto:ada@example.org")
        db.execute(HOUR_AGO)
        db.execute(
            "INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES ('smtp:mx', '{default greet mailto}', now(), now(), 60, 'w', 'refused')"
        )
        expect(found(dsn, "due"), Level.PROBLEM, "due-behind-breaker")
        db.execute("SELECT pgoutbox.close_breaker('smtp:mx')")
        words = "workers of this queue are running, and have not begun them yet"
        finding = expect(found(dsn, "due"), Level.PROBLEM, "due-unclaimed", words, "they begin within seconds")
        assert verdict([finding]) == "1 message is not delivered: workers have not begun those of queue default."

    def test_a_queue_that_no_running_worker_serves_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        report(db, "a", ["default"], ["greet"])
        enqueue(db, queue="bulk")
        db.execute(HOUR_AGO)
        expect(
            found(dsn, "due"),
            Level.PROBLEM,
            "due-in-unserved-queue",
            "--queue bulk",
            "pgoutbox worker --queue bulk, beside the queues",
        )
        report(db, "b", ["bulk"], ["greet"])
        expect(found(dsn, "due"), Level.PROBLEM, "due-unclaimed")

    def test_a_queue_behind_others_in_a_strict_order_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        report(db, "a", ["mail", "bulk"], ["greet"])
        enqueue(db, queue="bulk")
        db.execute(HOUR_AGO)
        expect(found(dsn, "due"), Level.PROBLEM, "due-unclaimed")
        enqueue(db, queue="mail")
        db.execute(HOUR_AGO)
        others = [one for one in found(dsn, "due") if one.about["queue"] == "bulk"]
        expect(
            others, Level.PROBLEM, "due-behind-queues", "deliver others first: mail", "--queue mail:4 --queue bulk:1"
        )
        report(db, "b", ["bulk", "mail"], ["greet"])
        assert {one.code for one in found(dsn, "due")} == {"due-unclaimed"}

    @pytest.mark.slow
    def test_a_topic_that_no_worker_of_the_queue_handles_is_named(
        self, dsn: str, db: psycopg.Connection, handled: Outbox
    ) -> None:
        report(db, "old", ["default"], ["mail.new-too"])
        report(db, "other", ["bulk"], ["mail.new"])
        handled.define(Topic("mail.new"))
        enqueue(db, "mail.new")
        db.execute(HOUR_AGO)
        compare = "pgoutbox doctor --app yourapp.outbox:outbox"
        expect(found(dsn, "due"), Level.PROBLEM, "due-without-handler", "mail.new", compare)
        known = "topic mail.new has no handler", "register a handler", "pgoutbox cancel --all --topic mail.new"
        expect(found(dsn, "due", outbox=handled), Level.PROBLEM, "due-without-handler", *known)
        assert found(dsn, "handlers", outbox=handled) == [], "the finding about the late message names the cause"
        (skipped,) = found(dsn, "handlers")
        assert skipped.fix == "name the application of the workers: pgoutbox doctor --app yourapp.outbox:outbox"

    @pytest.mark.usefixtures("posing")
    def test_overloaded_workers_are_named(self, dsn: str, db: psycopg.Connection) -> None:
        enqueue(db)
        db.execute(HOUR_AGO)
        put(db, State.SENDING)
        expect(found(dsn, "due"), Level.WARNING, "due-overloaded", "PGOUTBOX_CONCURRENCY")

    @pytest.mark.slow
    def test_a_large_backlog_has_the_findings_of_a_small_one(self, dsn: str, db: psycopg.Connection) -> None:
        """Each cause is named with the queue that it holds back, however many messages of another queue are late."""
        report(db, "a", ["mail", "crowded", "bookings", "paused"], ["mail", "mail.lost"])
        db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('paused', now())")
        db.execute(
            "INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES (%s, ARRAY[pgoutbox._hold_of(%s, %s, 1::smallint, %s)], now(), now(), 60, %s, %s)",
            ("smtp:mx", "crowded", "mail", "smtp:x", "w", "refused"),
        )
        failed = put(db, State.FAILED, ordering_key="k", queue="bookings")
        db.execute("UPDATE pgoutbox.message SET halts_key = true WHERE id = %s", (failed,))
        add = """
            INSERT INTO pgoutbox.message (topic, queue, destination, ordering_key, payload, available_at)
            SELECT topic, queue, 'smtp:x', ordering_key, '{}', now() - interval '1 h'
            FROM (VALUES
                ('mail', 'crowded', NULL, %(large)s), ('mail', 'unserved', NULL, %(large)s),
                ('mail', 'bookings', 'k', 30), ('mail', 'paused', NULL, 30), ('lost', 'mail', NULL, 30),
                ('mail', 'second', NULL, 1)
            ) AS kind(topic, queue, ordering_key, count), generate_series(1, count)
        """
        readings, notes = [], []
        for large in (30, 12_000):
            db.execute("DELETE FROM pgoutbox.message_live")
            db.execute(add, {"large": large})
            db.execute("ANALYZE pgoutbox.message_live")
            notes = found(dsn, "due")
            readings.append([(note.level, note.code, note.about) for note in notes])
        assert sorted(note.code for note in notes) == [
            "due-behind-breaker", "due-behind-failed", "due-in-unserved-queue", "due-in-unserved-queue", "due-paused",
            "due-without-handler",
        ]  # fmt: skip
        assert readings[0] == readings[1]
        assert any("at least 1,000 messages due" in note.what for note in notes)
        assert any("queue mail: 30 messages due" in note.what for note in notes)

    def test_a_cap_is_noticed_in_each_lane(self, dsn: str, db: psycopg.Connection) -> None:
        report(db, "a", ["big"], ["mail"])
        db.execute(
            "INSERT INTO pgoutbox.message (topic, queue, ordering_key, lane, attempt_count, payload, available_at) "
            "SELECT 'mail', 'big', 'k' || n, n % 2, n % 2, '{}', now() - interval '1 h' FROM generate_series(1, 300) n"
        )
        for number in range(49):
            enqueue(db, queue=f"other-{number}")
        db.execute(HOUR_AGO)
        assert any("queue big: at least 200 messages due" in note.what for note in found(dsn, "due"))

    def test_the_breaker_that_holds_most_messages_is_named(self, dsn: str, db: psycopg.Connection) -> None:
        for key, destination, count in (("a-small", "https://a.example/", 1), ("z-big", "https://z.example/", 30)):
            for _ in range(count):
                enqueue(db, destination=destination)
            db.execute(
                "INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)"
                " SELECT %s, ARRAY[pgoutbox._hold_of(queue, topic, payload_version, destination)],"
                " now(), now(), 60, 'w', 'no ' || %s"
                " FROM pgoutbox.message WHERE destination = %s LIMIT 1",
                (key, key, destination),
            )
        db.execute(HOUR_AGO)
        expect(found(dsn, "due"), Level.PROBLEM, "due-behind-breaker", "breaker of z-big", "no z-big")

    @pytest.mark.parametrize("fair_key", [None, "k"])
    def test_a_message_that_others_hide_is_still_undelivered(
        self, dsn: str, db: psycopg.Connection, fair_key: str | None
    ) -> None:
        for number in range(60):
            enqueue(db, queue=f"other-{number}")
        retried = [put(db, queue="z", fair_key=fair_key) for _ in range(21)]
        db.execute(
            "UPDATE pgoutbox.message SET lane = CASE WHEN fair_key IS NULL THEN 1 ELSE 2 END, attempt_count = 1,"
            " available_at = now() + interval '1 h',"
            " created_at = now() - interval '99 h', attempts = jsonb_build_array(jsonb_build_object("
            "'attempt_count', 1, 'times', 1, 'outcome', 'retry', 'worker', 'w', 'started_at', now() - interval '99 h',"
            " 'ended_at', now())) WHERE id = %s",
            (retried[-1],),
        )
        assert any(f"message {retried[-1]}" in note.what for note in found(dsn, "undelivered"))

    def test_queues_without_any_worker_are_one_finding(self, dsn: str, db: psycopg.Connection) -> None:
        for number in range(60):
            enqueue(db, queue=f"tenant-{number}")
        db.execute(HOUR_AGO)
        expect(
            found(dsn, "due"),
            Level.PROBLEM,
            "due-without-worker",
            "at least 50 of 60 queues: at least 50 messages",
            "tenant-0, tenant-1,",
        )


def test_mailing_lists_without_links_to_unsubscribe_are_a_warning(dsn: str) -> None:
    outbox = Outbox()
    assert levels(found(dsn, "unsubscribe", outbox=outbox)) == ["ok"]
    outbox.define(Topic("newsletter", mailing_list="news"))
    expect(found(dsn, "unsubscribe", outbox=outbox), Level.WARNING, "unsubscribe-url-missing", "unsubscribe: news")
    settings = settings_of(
        dsn, unsubscribe_url="https://club.example.org/unsubscribe", unsubscribe_keys="a key of 32 characters for tests"
    )
    assert levels(found(settings, "unsubscribe", outbox=outbox)) == ["ok"]


def test_suppressed_addresses_of_another_secret_are_a_problem(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).suppress("ada@example.org", "bounce")
    assert levels(found(dsn, "unsubscribe")) == ["ok"]
    db.execute("UPDATE pgoutbox.secret SET key = sha256(key)")
    expect(
        found(dsn, "unsubscribe"),
        Level.PROBLEM,
        "suppressions-unknown",
        "of another pgoutbox.secret",
        "Restore its row",
    )


@pytest.mark.slow
def test_encrypted_topics_without_keys_and_unreadable_payloads_are_problems(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox()
    outbox.define(Topic("mail.secret", encrypted=True))
    expect(found(dsn, "encryption", outbox=outbox), Level.PROBLEM, "encryption-keys-missing", "mail.secret")
    mine, lost = (Fernet.generate_key().decode() for _ in range(2))
    settings = settings_of(dsn, encryption_keys=mine)
    assert levels(found(settings, "encryption", outbox=outbox)) == ["ok"]
    for key, level in ((mine, "ok"), (lost, "problem")):
        payload = Keyring(SecretStr(key)).seal('{"a": 1}', Identity("payload", "mail.secret"), dedupe_key=None)
        enqueue(db, "mail.secret", json.loads(payload))
        assert levels(found(settings, "encryption", outbox=outbox)) == [level]
    finding = expect(found(settings, "encryption"), Level.PROBLEM, "payloads-undecryptable", "1 payload", "mail.secret")
    assert mine not in str(finding)


@pytest.mark.slow
def test_destinations_without_a_transport_and_webhooks_without_secrets_are_warnings(
    dsn: str, db: psycopg.Connection
) -> None:
    enqueue(db, destination="kafka:orders")
    expect(found(dsn, "destinations"), Level.WARNING, "destination-without-transport", "1", "kafka")
    db.execute("DELETE FROM pgoutbox.message")
    enqueue(db, destination="https://hooks.club.org/x")
    expect(found(dsn, "destinations"), Level.WARNING, "webhooks-unsigned", "PGOUTBOX_WEBHOOK_SECRETS")
    signed = settings_of(dsn, webhook_secrets="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert levels(found(signed, "destinations")) == ["ok"]


@pytest.mark.slow
def test_a_shell_without_mail_settings_is_no_fault_of_the_workers(dsn: str, db: psycopg.Connection) -> None:
    """On call, people run the doctor with nothing but the connection string."""
    enqueue(db, destination="mailto:ada@club.org")
    expect(found(dsn, "destinations"), Level.WARNING, "destination-without-transport", "this process has no transport")
    (skipped,) = found(dsn, "smtp")
    assert (skipped.code, skipped.level) == ("smtp-not-set", Level.SKIPPED)
    assert "this process has neither an SMTP server" in skipped.what
    report(db, "w:1", ["default"], ["greet"])
    finding = expect(found(dsn, "destinations"), Level.SKIPPED, "transport-not-set-here", "1 message for mailto")
    assert "this process has no transport for mailto, and no worker reports that it has none" in finding.what
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " VALUES ('mailto:no-transport', now(), 30, 'w:1', 'this worker has no transport')"
    )
    expect(found(dsn, "destinations"), Level.WARNING, "destination-without-transport", "workers have no transport")
    with_server = settings_of(dsn, smtp_host="127.0.0.1")
    assert levels(found(with_server, "destinations")) == ["ok"]


# --- everything -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_healthy_installation_has_no_findings_to_fix(own: OwnServer, handled: Outbox) -> None:
    """A named database of an ordinary role, a running worker, and a mail server that accepts e-mail."""
    with own.connect() as db:
        db.execute("CREATE ROLE club LOGIN IN ROLE pg_read_all_stats")
        db.execute("CREATE DATABASE club OWNER club")
    dsn = make_conninfo(own.dsn_for("club"), user="club")
    await asyncio.to_thread(migrate.upgrade, dsn)
    async with accepting_server() as inbox:
        mail = {"smtp_host": "127.0.0.1", "smtp_port": inbox.port, "smtp_security": "none"}
        settings = settings_of(dsn, deployment="production", smtp_sender="Club <club@club.org>", **mail)
        await asyncio.to_thread(Operator(settings).adopt, "production")
        worker = Worker(handled, settings=settings)
        async with running(worker):
            await until_idle(worker)
            findings = await asyncio.to_thread(lambda: list(examine(settings, handled, environment=os.environ)))
    assert [finding for finding in findings if finding.level not in (Level.OK, Level.SKIPPED)] == []
    assert all(finding.what and finding.why is None for finding in findings)
    assert len(findings) == len({finding.check for finding in findings})
    in_order = {finding.check for finding in findings if finding.level is Level.OK}
    assert in_order >= {"listener", "rights", "transactions", "workers", "handlers", "due", "smtp", "webhooks"}
    assert (inbox.received, inbox.connection_count) == ([], 1)


def test_every_check_is_documented(dsn: str) -> None:
    page = (ROOT / "docs" / "how-to" / "doctor.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        finding.check for finding in examine(settings_of(dsn))
    }


def test_the_commands_in_the_fixes_exist() -> None:
    commands = cast("Any", typer.main.get_command(app)).commands
    named = [
        (name, set(re.findall(r"--[a-z-]+", rest)))
        for module in (ROOT / "pgoutbox" / "doctor").glob("*.py")
        for name, rest in re.findall(r"pgoutbox ([a-z]+)([^\"`;,]*)", module.read_text())
        if name not in ("doctor", "claim", "import")
    ]
    assert len(named) > 8
    for name, options in named:
        assert options <= {option for parameter in commands[name].params for option in parameter.opts}


@pytest.mark.slow
def test_the_doctor_changes_nothing(dsn: str, db: psycopg.Connection) -> None:
    put(db, State.FAILED)
    enqueue(db, destination="kafka:orders")
    tables = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
    snapshot = "SELECT m::text FROM pgoutbox.message AS m ORDER BY id"
    db.execute("SELECT pg_stat_force_next_flush()")
    before = db.execute(tables).fetchall(), db.execute(snapshot).fetchall()
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as listener:
        listener.execute("LISTEN pgoutbox")
        assert list(examine(settings_of(dsn)))
        assert list(listener.notifies(timeout=0)) == []
    assert (db.execute(tables).fetchall(), db.execute(snapshot).fetchall()) == before


def test_a_check_that_fails_does_not_prevent_the_others(dsn: str, db: psycopg.Connection) -> None:
    db.execute("ALTER VIEW pgoutbox.breaker_view RENAME COLUMN opened_at TO since")
    findings = list(examine(settings_of(dsn)))
    broken = [finding for finding in findings if finding.check == "breakers"]
    expect(broken, Level.PROBLEM, "check-failed", "[42703]")
    assert [finding.check for finding in findings].index("failed") > findings.index(broken[0])


@pytest.mark.slow
def test_a_check_that_waits_for_a_lock_is_abandoned(dsn: str, connect: Connect) -> None:
    blocker = connect()
    blocker.execute("LOCK TABLE pgoutbox.breaker")
    expect(found(dsn, "breakers"), Level.PROBLEM, "check-failed", "[55P03]")
