"""Tests the commands over a list of databases, of which some cannot be used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psycopg
import pytest

from pgoutbox import migrate
from pgoutbox.cli.databases import load_database
from pgoutbox.cli.explain import explain
from pgoutbox.databases import read_databases
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import load_settings
from tests.support.command_line import Done, run_on_terminal, run_process
from tests.support.foreground import in_foreground
from tests.support.forks import LIBRARIES, forks
from tests.support.outbox_actions import enqueue
from tests.support.revisions import FIRST, INDEXES, add_revision
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Server

LOCKED_TABLE = "LOCK TABLE pgoutbox.message"
LOCKED_MIGRATION = "LOCK TABLE pgoutbox.alembic_version IN SHARE ROW EXCLUSIVE MODE"
LOOKS = ("stats", "list", "failures", "workers")


class Fleet(Protocol):
    """Creates databases: `acme`, `beta` and so on. A name with `new-` has no schema, and `gone` does not exist."""

    def __call__(self, *names: str) -> Databases: ...


@dataclass(frozen=True, slots=True)
class Databases:
    """The DSNs by name."""

    dsns: dict[str, str]

    @property
    def lines(self) -> str:
        return "\n".join(f"{name} {dsn}" for name, dsn in self.dsns.items())

    def run(self, *arguments: str, **environment: str) -> Done:
        """Run a command in a process with the list."""
        return run_process(*arguments, stdin=b"", PGOUTBOX_DSNS=self.lines, **environment)

    @contextmanager
    def locked(self, name: str, statement: str) -> Iterator[None]:
        """Hold a lock in a database."""
        with psycopg.connect(self.dsns[name]) as connection:
            connection.execute(statement.encode())
            yield

    def enqueue(self, name: str, *, topic: str = "mail") -> None:
        with psycopg.connect(self.dsns[name]) as connection:
            enqueue(connection, topic=topic)


@pytest.fixture
def fleet(server: Server, template_of_today: Callable[[], str]) -> Iterator[Fleet]:
    with ExitStack() as stack:

        def create(*names: str) -> Databases:
            dsns = {}
            for name in names:
                template = "template1" if name.startswith("new") else template_of_today()
                if name == "gone":
                    dsns[name] = server.dsn_for("pgoutbox_gone")
                else:
                    dsns[name] = server.dsn_for(stack.enter_context(server.database(template=template)))
            return Databases(dsns)

        yield create


class TestOneOfThem:
    def test_a_command_looks_at_the_named_database(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("beta", topic="from.beta")
        for named in (databases.run("list", "--database", "beta"), databases.run("list", PGOUTBOX_DATABASE="beta")):
            assert (named.exit_code, "from.beta" in named.out, named.err) == (0, True, "")
        assert "from.beta" not in databases.run("list", "--database", "acme", PGOUTBOX_DATABASE="beta").out

    def test_an_act_changes_the_named_database_only(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("acme")
        databases.enqueue("beta")
        assert databases.run("cancel", "--topic", "mail", "--yes", "--database", "beta").exit_code == 0
        assert "cancelled" not in databases.run("list", "--database", "acme").out
        assert "cancelled" in databases.run("list", "--database", "beta").out

    @pytest.mark.parametrize(
        "command",
        [
            *(["stats"], ["list"], ["show", "1"], ["cancel", "1"], ["export", "1"], ["doctor"], ["migrate"]),
            *(["migrate", "current"], ["retention"]),
        ],
        ids=" ".join,
    )
    def test_without_a_name_it_lists_the_names_with_exit_code_2(
        self, command: list[str], cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSNS", "\n".join(f"t{number} host=db dbname=t{number}" for number in range(12)))
        names = ", ".join(f"t{number}" for number in range(10))
        error = (
            f"error: name one of 12 databases: {names} and 2 more; give it as --database NAME or PGOUTBOX_DATABASE\n"
        )
        assert cli_anywhere(*command) == Done(2, "", error)

    def test_a_misspelt_name_is_answered_with_the_nearest_one(
        self, cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSNS", "acme host=db dbname=acme\nbeta host=db dbname=beta")
        error = "error: no database 'amce' among 2 databases: acme, beta; did you mean 'acme'?\n"
        assert cli_anywhere("stats", "--database", "amce") == Done(2, "", error)
        error = "error: no database 'zz' among 2 databases: acme, beta\n"
        assert cli_anywhere("stats", "--database", "zz") == Done(2, "", error)

    @pytest.mark.parametrize(
        ("arguments", "environment", "error"),
        [
            (["--dsn", "host=x", "--database", "a"], {}, "--dsn and --database exclude each other"),
            (["--database", "a"], {}, "database 'a': there is no list of databases; set PGOUTBOX_DSNS"),
            (["--database", "a"], {"DSN": "host=x"}, "PGOUTBOX_DSN and database 'a' of a list are both given"),
            (["--all-databases"], {"DSN": "host=x"}, "there is no list of databases; set PGOUTBOX_DSNS"),
            (["--all-databases", "--database", "a"], {"DSNS": "a host=x"}, "all databases are asked for: omit"),
            ([], {"DSNS": "a host=x", "DSN": "host=y"}, "PGOUTBOX_DSNS and PGOUTBOX_DSN are both set"),
        ],
    )
    def test_contradictions_are_refused(
        self,
        arguments: list[str],
        environment: dict[str, str],
        error: str,
        cli_anywhere: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(f"PGOUTBOX_{name}", value)
        done = cli_anywhere("stats", *arguments)
        assert (done.exit_code, done.out, done.err.startswith(f"error: {error}")) == (2, "", True)

    def test_the_option_dsn_replaces_the_list(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("beta", topic="from.beta")
        done = databases.run("list", "--dsn", databases.dsns["beta"], PGOUTBOX_DATABASE="acme")
        assert (done.exit_code, "from.beta" in done.out) == (0, True)

    def test_settings_of_the_option_dsn_have_no_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOUTBOX_DSNS", "acme host=db")
        monkeypatch.setenv("PGOUTBOX_DATABASE", "acme")
        settings = load_database("host=other", None)
        assert (settings.database, read_databases(settings, None)) == (None, None)

    def test_a_group_of_commands_passes_the_name_on(self, fleet: Fleet) -> None:
        databases = fleet("acme", "new-beta")
        done = databases.run("migrate", "--database", "new-beta", "current")
        assert (done.exit_code, done.out.startswith("not migrated")) == (0, True)

    def test_topics_of_an_application_need_no_database(self, fleet: Fleet) -> None:
        done = fleet("acme").run("topics", "--app", "tests.support.topics_app:outbox")
        assert (done.exit_code, done.err) == (0, "")

    def test_a_person_at_a_terminal_sees_the_name(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        shown = run_on_terminal("stats", PGOUTBOX_DSNS=databases.lines, PGOUTBOX_DATABASE="beta")
        assert shown.out.splitlines()[0] == "database beta"

    def test_an_error_names_the_database_and_hides_its_password(self, fleet: Fleet, tmp_path: Path) -> None:
        file = tmp_path / "databases"
        file.write_text("far postgresql://app:c4n4ry@s3cret@127.0.0.1:1/app\n")
        done = run_process("stats", "--database", "far", PGOUTBOX_DSNS=str(file))
        assert (done.exit_code, "the DSN of far" in done.err, "PGOUTBOX_DSN" in done.err) == (1, True, False)
        assert "c4n4ry" not in done.err
        assert "s3cret" not in done.err

    def test_the_next_command_of_a_process_is_about_its_own_database(
        self, cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSNS", "far host=127.0.0.1 port=1")
        assert "check the DSN of far" in cli_anywhere("stats", "--database", "far").err
        monkeypatch.delenv("PGOUTBOX_DSNS")
        assert "check PGOUTBOX_DSN" in cli_anywhere("stats", "--dsn", "host=127.0.0.1 port=1").err

    def test_an_error_about_the_list_keeps_its_name(self) -> None:
        error = ConfigurationError("PGOUTBOX_DSNS: has no database")
        assert explain(error, load_settings(database="acme")) == (str(error), 2)

    def test_the_function_of_the_application_gives_the_list(self, fleet: Fleet, tmp_path: Path) -> None:
        databases = fleet("acme", "beta")
        (tmp_path / "tenants.py").write_text(
            f"from pgoutbox import Outbox\noutbox = Outbox(databases=lambda: {databases.dsns!r})\n"
        )
        environment = {"PGOUTBOX_APP": "tenants:outbox", "PYTHONPATH": str(tmp_path)}
        assert run_process("stats", "--database", "beta", stdin=b"", **environment).exit_code == 0
        assert run_process("stats", stdin=b"", **environment).err.startswith(
            "error: name one of 2 databases: acme, beta;"
        )
        everywhere = run_process("stats", "--all-databases", "--json", stdin=b"", **environment)
        assert [document["database"] for document in everywhere.lines] == ["acme", "beta"]

    def test_a_host_without_a_worker_needs_no_name(self, fleet: Fleet) -> None:
        done = fleet("acme").run("worker", PGOUTBOX_WORKER_ENABLED="false")
        assert (done.exit_code, "no worker runs on this host" in done.err) == (0, True)

    @pytest.mark.parametrize("option", ["--database", "--dsn"])
    def test_supervised_processes_work_on_the_named_database(self, option: str, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        named = {"--database": "beta", "--dsn": databases.dsns["beta"]}[option]
        process = forks(*LIBRARIES).start(
            ["-m", "pgoutbox", "worker", "--processes", "2", "--app", "tests.support.topics_app:outbox", option, named],
            cwd=Path.cwd(),
            env=os.environ | {"PGOUTBOX_DSNS": databases.lines},
            streams=(0, 1, 2),
        )
        try:
            wait_until(
                lambda: len(databases.run("workers", "--database", "beta", "--json").lines) == 2,
                lambda: databases.run("workers", "--all-databases").out,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        assert databases.run("workers", "--database", "acme", "--json").lines == []


class TestEverywhere:
    def test_tables_name_the_database_of_each_row(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("acme", topic="from.acme")
        databases.enqueue("beta", topic="from.beta")
        for command in ("list", "stats"):
            done = databases.run(command, "--all-databases")
            header, *rows = (line.split("\t") for line in done.out.splitlines())
            topic = header.index("topic")
            assert (done.exit_code, header[0]) == (0, "database")
            assert sorted((row[0], row[topic]) for row in rows) == [("acme", "from.acme"), ("beta", "from.beta")]

    @pytest.mark.parametrize("command", LOOKS)
    def test_a_table_without_rows_has_the_same_columns(self, command: str, fleet: Fleet) -> None:
        if command != "workers":  # It says in words that there are none.
            assert fleet("acme").run(command, "--all-databases").out.startswith("database\t")

    def test_documents_name_the_database_in_this_form_only(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("beta")
        for command in ("list", "stats"):
            everywhere = databases.run(command, "--all-databases", "--json").lines
            one = databases.run(command, "--database", "beta", "--json").lines
            assert [next(iter(line)) for line in everywhere] == ["database"] * len(everywhere)
            del everywhere[-1]["database"]
            for line in (everywhere[-1], one[-1]):  # An age differs between two commands.
                for topic in line.get("topics", ()):
                    del topic["oldest_due_seconds"]
            assert everywhere[-1] == one[-1]

    def test_warnings_name_the_database(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.run("pause", "bulk", "--database", "beta")
        databases.run("pause", "--topic", "mail", "--database", "acme", "--yes")
        warnings = databases.run("stats", "--all-databases").err.splitlines()
        assert [re.sub(" since .*", "", line) for line in warnings] == [
            "warning: acme: topic mail is paused",
            "warning: beta: queue bulk is paused",
        ]

    @pytest.mark.parametrize("command", LOOKS)
    def test_databases_that_cannot_be_used_are_told_at_the_end(self, command: str, fleet: Fleet) -> None:
        databases = fleet("gone", "new-old", "acme", "locked", "beta")
        table = "LOCK TABLE pgoutbox.message, pgoutbox.worker"
        with databases.locked("locked", table):
            done = databases.run(command, "--all-databases", "--json", PGOUTBOX_STATEMENT_TIMEOUT_SECONDS="1")
        gone, old, locked, summary = done.err.splitlines()
        assert done.exit_code == 1
        assert gone.startswith("error: gone: ")
        assert gone.endswith("check the DSN of gone and that the server is running")
        assert old.startswith("error: new-old: the database has no schema pgoutbox; run: pgoutbox migrate")
        assert locked.startswith("error: locked: PostgreSQL: canceling statement due to statement timeout [57014]")
        assert summary == "error: 3 of 5 databases failed"
        if command == "stats":
            assert [document["database"] for document in done.lines] == ["acme", "beta"]

    def test_a_wrong_command_is_the_worst_failure(self, fleet: Fleet) -> None:
        done = fleet("gone", "acme").run("list", "--all-databases", "--before", "7")
        assert (done.exit_code, done.out) == (2, "")
        assert "--before: an id belongs to one database" in done.err

    def test_a_queue_may_be_unknown_in_some_databases(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("beta")
        for command in ("list", "stats"):
            assert databases.run(command, "--queue", "default", "--database", "acme").exit_code == 2
            everywhere = databases.run(command, "--queue", "default", "--all-databases")
            assert (everywhere.exit_code, everywhere.out.count("\nbeta\t")) == (0, 1)

    def test_a_full_page_names_the_command_for_more(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        databases.enqueue("beta")
        done = databases.run("list", "--all-databases", "--limit", "1")
        assert done.err == "there may be more rows: --database beta --before 1\n"


class TestDoctor:
    def test_a_finding_in_many_databases_is_told_once(self, fleet: Fleet) -> None:
        databases = fleet("gone", "acme", "beta", "new-old", "c1", "c2", "c3")
        done = databases.run("doctor", "--all-databases")
        rows = [line.split("\t") for line in done.out.splitlines()]
        assert done.exit_code == 1
        problems = {row[1]: row[2] for row in rows if row[0] == "problem"}
        assert problems["database"].startswith("gone: the DSN of gone: ")
        assert problems["schema"].startswith("new-old: ")
        (settings,) = (row[2] for row in rows if row[1] == "settings")
        assert settings.startswith("gone, acme, beta, new-old, c1 and 2 more: all PGOUTBOX_ variables")

    def test_findings_of_one_cause_with_other_words_are_one(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        for name, count in (("acme", 1), ("beta", 3)):
            for _ in range(count):
                databases.enqueue(name)
            with psycopg.connect(databases.dsns[name]) as connection:
                connection.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 hour'")
        lines = databases.run("doctor", "--all-databases", "--problems").out.splitlines()
        (late,) = (line.split("\t")[2] for line in lines if "\tdue\t" in line)
        assert late.startswith("beta: queue default: 3 messages due")
        assert late.endswith("; also in acme")

    def test_documents_are_those_of_each_database(self, fleet: Fleet) -> None:
        databases = fleet("acme", "beta")
        everywhere = databases.run("doctor", "--all-databases", "--json").lines
        assert [f["database"] for f in everywhere if f["check"] == "clock"] == ["acme", "beta"]
        one = databases.run("doctor", "--database", "beta", "--json").lines
        assert all("database" not in finding for finding in one)

    def test_transports_are_checked_once(self, fleet: Fleet) -> None:
        found = fleet("acme", "beta").run("doctor", "--all-databases", "--json").lines
        assert [f["database"] for f in found if f["check"] == "smtp"] == ["acme"]


class TestMigrate:
    def test_all_databases_are_migrated_beside_those_that_fail(self, fleet: Fleet) -> None:
        databases = fleet("gone", "new-acme", "beta", "new-old", "broken")
        with psycopg.connect(databases.dsns["broken"]) as connection:
            connection.execute("UPDATE pgoutbox.revision SET digest = 'other'")
        done = databases.run("migrate", "--all")
        lines = done.out.splitlines()
        assert done.exit_code == 1
        assert [line.partition(" ")[0] for line in lines] == [f"[{number}/5]" for number in range(1, 6)]
        assert sorted(line.partition(" ")[2] for line in lines) == [
            f"beta: up to date at {migrate.head()}",
            "broken: failed",
            "gone: failed",
            f"new-acme: base -> {migrate.head()}",
            f"new-old: base -> {migrate.head()}",
        ]
        *_, broken, gone, summary = sorted(done.err.splitlines(), key=lambda line: "of 5" in line)
        assert {broken.split(":")[1], gone.split(":")[1]} == {" broken", " gone"}
        assert "error: broken: revision pgoutbox_0001 of this database was applied by pgoutbox" in done.err
        assert summary == "error: 2 of 5 databases failed"
        assert migrate.current(databases.dsns["new-acme"]) == migrate.head()

    def test_it_can_be_repeated(self, fleet: Fleet) -> None:
        databases = fleet("new-acme", "new-beta")
        assert databases.run("migrate", "--all").exit_code == 0
        again = databases.run("migrate", "--all")
        assert (again.exit_code, again.err) == (0, "2 databases up to date\n")
        assert again.out.count("up to date at") == 2

    def test_new_schemas_get_the_name_of_the_deployment(self, fleet: Fleet) -> None:
        databases = fleet("new-acme", "new-beta")
        done = databases.run("migrate", "--all", "--deployment", "production")
        assert (done.exit_code, done.err) == (0, "2 databases up to date\n")
        assert {migrate.deployment_of(dsn) for dsn in databases.dsns.values()} == {"production"}

    def test_a_locked_database_holds_up_no_other_one(self, fleet: Fleet) -> None:
        databases = fleet("locked", *(f"tenant-{number}" for number in range(9)))
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            with databases.locked("locked", LOCKED_MIGRATION):
                process = forks(*LIBRARIES).start(
                    ["-m", "pgoutbox", "migrate", "--all"],
                    cwd=Path.cwd(),
                    env=os.environ | {"PGOUTBOX_DSNS": databases.lines},
                    streams=(0, out.fileno(), err.fileno()),
                )

                def lines(stream: object = out) -> list[str]:
                    return os.pread(stream.fileno(), 100_000, 0).decode().splitlines()  # type: ignore[attr-defined]

                wait_until(lambda: len(lines()) == 9, lambda: f"{lines()} {lines(err)}")
                assert any(line.startswith("locked: another migration is running") for line in lines(err))
                assert process.poll() is None
            assert process.wait() == 0
            assert lines()[-1] == f"[10/10] locked: up to date at {migrate.head()}"

    def test_ctrl_c_ends_it_at_once(self, fleet: Fleet) -> None:
        databases = fleet("locked", "new-acme")
        with tempfile.TemporaryFile("w+") as out, databases.locked("locked", LOCKED_MIGRATION):
            process = subprocess.Popen(
                in_foreground("-m", "pgoutbox", "migrate", "--all"),
                env=os.environ | {"PGOUTBOX_DSNS": databases.lines},
                stdout=out,
                stderr=out,
            )
            read = partial(os.pread, out.fileno(), 100_000, 0)
            wait_until(lambda: b"[1/2] new-acme" in read() and b"locked: another" in read(), lambda: str(read()))
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
            last = read().decode().splitlines()[-1]
        assert last == "error: interrupted; some databases are migrated; run the command again for the others"

    def test_an_older_schema_is_planned_and_upgraded(
        self,
        fleet: Fleet,
        cli_anywhere: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        databases = fleet("old", "older", "new-acme", "gone")
        newest = add_revision(tmp_path, monkeypatch)
        monkeypatch.setenv("PGOUTBOX_DSNS", databases.lines)
        planned = cli_anywhere("migrate", "--plan", "--all")
        assert planned.exit_code == 1
        progress = sorted(line.partition(" ")[2] for line in planned.out.splitlines() if line.startswith("["))
        assert [re.sub(",.*", "", line) for line in progress] == [
            "gone: failed",
            f"new-acme: base -> {newest}",
            f"old: {FIRST} -> {newest}",
            f"older: {FIRST} -> {newest}",
        ]
        assert {migrate.current(databases.dsns[name]) for name in ("old", "older")} == {FIRST}
        done = cli_anywhere("migrate", "--all", "--json")
        assert done.exit_code == 1
        assert sorted((line["database"], line["before"], line["revision"]) for line in done.lines) == [
            ("new-acme", None, newest),
            ("old", FIRST, newest),
            ("older", FIRST, newest),
        ]

    def test_large_indexes_are_built_in_the_database_of_the_name(
        self,
        fleet: Fleet,
        cli_anywhere: Callable[..., Done],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        databases = fleet("acme", "beta")
        add_revision(tmp_path, monkeypatch, INDEXES)
        monkeypatch.setenv("PGOUTBOX_DSNS", databases.lines)
        done = cli_anywhere("migrate", "indexes", "--database", "beta")
        assert (done.exit_code, done.out) == (0, "large indexes of the next revision: all exist\n")
        assert re.findall(r"on pgoutbox\.message_live \(", done.err) == ["on pgoutbox.message_live ("]
        built = "SELECT to_regclass('pgoutbox.message_live_worker') IS NOT NULL"
        for name, has_built in (("acme", False), ("beta", True)):
            with psycopg.connect(databases.dsns[name]) as connection:
                assert connection.execute(built).fetchone() == (has_built,)

    @pytest.mark.parametrize("arguments", [["--all", "--sql"], ["--all", "current"]])
    def test_all_is_for_migrate_and_its_plan_only(
        self, arguments: list[str], cli_anywhere: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PGOUTBOX_DSNS", "acme host=db")
        done = cli_anywhere("migrate", *arguments)
        assert (done.exit_code, "--all: only for `pgoutbox migrate` and for --plan" in done.err) == (2, True)
