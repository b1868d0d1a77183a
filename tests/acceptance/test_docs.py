"""Tests that the documentation matches the code: its programs and queries run, and the tutorial runs from beginning to
end. `make check` compares the pages with each other (tools/pages.py), and their generated parts with the code.

A comment in a page, `<!-- ... -->` directly above a block, defines how to run the block; readers do not see it.
"""

from __future__ import annotations

import ast
import inspect
import os
import random
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
import pytest
import typer.main

import pgoutbox
from pgoutbox import EditResult, Outbox, Producer, Topic
from pgoutbox.cli.commands import app
from pgoutbox.contrib.django.conf import ProjectOutbox
from pgoutbox.database import sql
from pgoutbox.kernel import statements
from pgoutbox.message import AttemptOutcome, State
from pgoutbox.operations import Mention, Operator
from pgoutbox.settings import ENVIRONMENT_PREFIX, VARIABLES, Settings, load_settings
from pgoutbox.testing import OutboxDriver
from tests.support.command_line import run_process
from tests.support.forks import LIBRARIES, forks
from tests.support.messages import ADD_ATTEMPT, put
from tests.support.outbox_actions import enqueue
from tests.support.pages import DOCS, ROOT, WRITTEN, Block, all_blocks, blocks_of, prose_of, title
from tests.support.sends import outgoing
from tests.support.transitions import TRANSITIONS
from tests.support.waiting import wait_until
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Server

# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_glossary_lists_exactly_the_states() -> None:
    section = (DOCS / "glossary.md").read_text().partition("## States")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [state.value for state in State]


SOURCE_OF_TESTS: Final = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
VARIABLES_OF_TESTS: Final = set(re.findall(r"environ(?:ment)?\S*[(\[]\"(PGOUTBOX_TEST_\w+)\"", SOURCE_OF_TESTS))


@pytest.mark.parametrize("page", WRITTEN, ids=title)
def test_named_settings_exist(page: Path) -> None:
    known = VARIABLES | VARIABLES_OF_TESTS
    assert set(re.findall(r"\bPGOUTBOX_[A-Z_]*[A-Z]", page.read_text())) - known == set()


def test_the_pages_that_the_doctor_names_exist() -> None:
    source = "".join(path.read_text() for path in (ROOT / "pgoutbox").rglob("*.py"))
    named = set(re.findall(r"\{HOW_TO\}/([a-z-]+)\.html", source))
    assert "roles" in named
    assert {name for name in named if not (DOCS / f"how-to/{name}.md").exists()} == set()


# --- the state machine ------------------------------------------------------------------------------------------------

ALLOWED: Final = {(state.value, target.value) for state, targets in TRANSITIONS.items() for target in targets}
LIFECYCLE: Final = DOCS / "explanation/lifecycle.md"


def test_the_chart_matches_the_state_machine() -> None:
    (chart,) = blocks_of(LIFECYCLE, "text")
    first, *others = chart.text.splitlines()
    states = re.findall(r"(\w+)(?: -->|  )", first)[1:4]  # After "enqueue".
    shown = {(states[0], states[1]), (states[1], states[2])}
    for line in others:
        if branch := re.match(r" +(\|?) +\+--> (\w+)|()(\w+) -+> (\w+)", line):
            origin = branch[4] or (states[1] if branch[1] else states[0])
            shown.add((origin, branch[5] or branch[2]))
    assert shown == ALLOWED


def test_the_transition_table_matches_the_state_machine_and_names_its_statements() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \| `([\w.]+)` \|$", LIFECYCLE.read_text(), re.MULTILINE)
    assert {(state, target) for state, target, _ in rows} == ALLOWED
    known = {*dir(sql), *vars(statements)}
    assert {name for _, _, name in rows if not name.startswith("pgoutbox.")} - known == set()


def test_every_outcome_of_an_attempt_is_explained() -> None:
    section = LIFECYCLE.read_text().partition("## Attempts")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(AttemptOutcome) - {AttemptOutcome.SENT}


# --- the tables -------------------------------------------------------------------------------------------------------

NAMES: Final = """
SELECT c.relname
FROM pg_class AS c
WHERE c.relnamespace = 'pgoutbox'::regnamespace
    AND c.relkind IN ('r', 'p', 'v', 'i', 'I')
    AND c.relname NOT LIKE 'alembic_version%'
    AND c.relname !~ '^message_done_[0-9]{8}'
UNION
SELECT k.conname
FROM pg_constraint AS k
WHERE k.connamespace = 'pgoutbox'::regnamespace AND k.contype = 'c'
UNION
SELECT t.tgname
FROM pg_trigger AS t
JOIN pg_class AS c ON c.oid = t.tgrelid
WHERE c.relnamespace = 'pgoutbox'::regnamespace AND NOT t.tgisinternal
"""


def test_the_schema_page_explains_each_table_index_check_and_trigger(rolled_back: psycopg.Connection) -> None:
    in_catalog = {name for (name,) in rolled_back.execute(NAMES)}
    told = set(re.findall(r"`(\w+)`", (DOCS / "explanation/schema.md").read_text()))
    assert in_catalog - told == set()
    prefixes = tuple(f"{table}_" for table in ("message", "attempt", "queue", "coalesce", "dedupe", "breaker"))
    columns = {
        name
        for (name,) in rolled_back.execute(
            "SELECT attname FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid"
            " WHERE c.relnamespace = 'pgoutbox'::regnamespace"
        )
    }
    assert {name for name in told if name.startswith(prefixes)} - in_catalog - columns == set()


# --- Python -----------------------------------------------------------------------------------------------------------

PYTHON: Final = all_blocks("python")


@pytest.fixture
def saved_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an importable directory with the files that readers are told to save."""
    for block in PYTHON:
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if (tmp_path / f"{name}.py").exists():
            monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_blocks_run(block: Block, saved_files: Path) -> None:
    """Definitions are enough here: imports resolve, topics are valid, and handlers have a valid signature."""
    if block.directive == "not run" or block.file_name == "database.py":
        compile(block.text, block.place, "exec")
        return
    namespace: dict[str, object] = {"__name__": "snippet"}
    before = set(sys.modules)
    exec(compile(block.text, block.place, "exec", dont_inherit=True), namespace)
    for name in set(sys.modules) - before:
        if (saved_files / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.slow
def test_the_statements_in_the_text_of_the_readme_deliver_in_its_application(dsn: str, tmp_path: Path) -> None:
    (program,) = [block for block in blocks_of(ROOT / "README.md") if block.file_name == "shop.py"]
    (tmp_path / "shop.py").write_text(program.text)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in re.findall(r"`(SELECT [^`]+)`", prose_of(ROOT / "README.md")):
            connection.execute(statement.encode())
        environment = {"PYTHONPATH": str(tmp_path), "PGOUTBOX_MAIL_TRANSPORT": "log"}
        done = run_process("worker", "--app", "shop:outbox", "--once", dsn=dsn, stdin=b"", **environment)
        states = connection.execute("SELECT state FROM pgoutbox.message").fetchall()
    assert states == [("sent",)], done.err


OUTBOXES: Final = {"outbox": Outbox, "driver": OutboxDriver}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_blocks_use_existing_names_and_arguments(block: Block) -> None:
    wrong = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OUTBOXES:
            is_project = node.value.id == "outbox" and "pgoutbox.contrib.django" in block.text
            thing = ProjectOutbox if is_project else OUTBOXES[node.value.id]
            if not hasattr(thing, node.attr) and node.attr not in inspect.get_annotations(thing) | {"deliveries": 0}:
                wrong.append(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Call) and (function := called(node)) is not None:
            accepted = arguments_of(function)
            wrong += [f"{ast.unparse(node.func)}({k.arg}=)" for k in node.keywords if k.arg not in accepted]
    assert wrong == []


def called(node: ast.Call) -> Callable[..., object] | None:
    """Return the public function or class of pgoutbox that is called."""
    match node.func:
        case ast.Attribute(value=ast.Call(func=ast.Attribute(value=ast.Name(id="outbox"), attr="on")), attr=attribute):
            return cast("Callable[..., object]", getattr(Producer, attribute))
        case ast.Attribute(value=ast.Name(id="outbox" | "driver" as name), attr=attribute):
            return getattr(OUTBOXES[name], attribute, None)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in pgoutbox.__all__:
            return getattr(getattr(pgoutbox, name), attribute, None)
        case ast.Name(id=name) if name in pgoutbox.__all__:
            return getattr(pgoutbox, name, None)
        case _:
            return None


def arguments_of(function: Callable[..., object]) -> set[str]:
    if function in (Settings, load_settings):
        return set(Settings.model_fields)
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    for options in re.findall(r"Unpack\[(\w+)\]", str(parameters.get("options"))):
        names |= getattr(sys.modules[function.__module__], options).__annotations__.keys()
    return names


def test_the_page_on_topics_explains_each_parameter() -> None:
    section = (DOCS / "how-to/topics.md").read_text().partition("| field |")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    told = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(told) == sorted(inspect.signature(Topic).parameters)


# --- commands ---------------------------------------------------------------------------------------------------------


def commands_below(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer's own click
    """Yield each command with its full name, for example `migrate current`."""
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if hasattr(command, "commands"):
            yield from commands_below(command, f"{prefix}{name} ")


COMMANDS: Final = dict(commands_below(typer.main.get_command(app)))


def command_lines() -> Iterator[tuple[str, str]]:
    """Return every line of a block that calls pgoutbox, with its place."""
    for block in all_blocks("sh", "console", "text", "ini"):
        for line in block.text.splitlines():
            found = re.search(r"(?:^|/|\$ |&& |=)pgoutbox ((?!worker$)[a-z].*)$", line)
            if found is not None and not line.startswith(("#", "INSERT")):
                yield block.place, found[1]


def parse(arguments: list[str]) -> None:
    """Parse a command line with typer, without running it."""
    name = arguments.pop(0)
    while arguments and f"{name} {arguments[0]}" in COMMANDS:
        name = f"{name} {arguments.pop(0)}"
    COMMANDS[name].make_context(name, arguments).close()


@pytest.mark.parametrize(("place", "line"), list(command_lines()))
def test_command_lines_are_valid(place: str, line: str) -> None:
    line = re.split(r" [>|&]", line)[0]
    parse(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", WRITTEN, ids=title)
def test_commands_and_options_named_in_prose_exist(page: Path) -> None:
    wrong = []
    for line in re.findall(r"`pgoutbox ([a-z][^`]*)`", prose_of(page)):
        words = [word for word in line.split() if not word.startswith((">", "|"))]
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), words[0])
        if name not in COMMANDS:
            wrong.append(line)
            continue
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        wrong += [f"{name} {word}" for word in words if word.startswith("--") and word not in options]
    assert wrong == []


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in WRITTEN for name in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert named - targets == set()


# --- SQL --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history(server: Server, template_of_today: Callable[[], str]) -> Iterator[psycopg.Connection]:
    """Create a database with matching rows for every query."""
    with (
        server.database(template=template_of_today()) as database,
        psycopg.connect(server.dsn_for(database)) as connection,
    ):
        put(connection, State.SENT, topic="mail.welcome", destination="mailto:ada@example.org")
        put(connection, topic="mail.welcome", destination="mailto:ada@example.org")
        connection.execute("""UPDATE pgoutbox.message SET payload = '{"user_id": 7}' WHERE id = 2""")
        failed = put(connection, State.FAILED)
        connection.execute(ADD_ATTEMPT, (failed, 1))
        put(connection, State.SENDING)
        later = put(connection)
        connection.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = %s", (later,))
        sent_late = put(connection, State.SENT)
        connection.execute(ADD_ATTEMPT, (sent_late, 1))
        connection.execute(
            "UPDATE pgoutbox.message SET attempts = jsonb_set(attempts, '{0,outcome}', '\"lost\"') WHERE id = %s",
            (sent_late,),
        )
        for _ in range(2):
            enqueue(connection, "mail.password_reset", coalesce_key="ada@example.org")
        claimed = claim(connection, topics=["mail.password_reset"])
        assert {row.state for row in claimed} == {"skipped", "sending"}
        enqueue(connection, "mail.password_reset", coalesce_key="ada@example.org")
        finish_sent(connection, *((row.id, row.attempt_count) for row in claimed if row.state == "sending"))
        connection.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())")
        connection.execute("INSERT INTO pgoutbox.topic_pause (topic) VALUES ('mail.digest')")
        connection.execute(
            "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
            " VALUES ('smtp:mail.example.org:587', now(), 30, 'w', 'refused')"
        )
        connection.execute(
            "INSERT INTO pgoutbox.audit (act_id, actor, action, queue, message_count, message_ids)"
            " SELECT md5(a.action)::uuid, 'ada', a.action, a.queue, cardinality(a.ids::bigint[]), a.ids::bigint[]"
            " FROM (VALUES ('pause', 'bulk', NULL), ('redirect', NULL, NULL), ('redrive', NULL, '{3,4}'))"
            " AS a(action, queue, ids)"
        )
        connection.execute(  # It still counts as running in a slow run of the tests.
            "INSERT INTO pgoutbox.worker (name, queues, topics, seen_at)"
            " VALUES ('w', '{default}', '{mail}', now() + interval '1 day')"
        )
        connection.commit()
        yield connection


QUERIES: Final = [
    block
    for page in sorted(DOCS.rglob("*.md"))
    for block in blocks_of(page, "sql")
    if page.stem in ("sql-queries", "mails-do-not-arrive", "limits")
    or ("_view" in block.text and not block.directive.startswith(("run", "[[[cog")))
]


@pytest.mark.parametrize("role", ["pgoutbox_viewer", "pgoutbox_operator"])
@pytest.mark.parametrize("block", QUERIES, ids=lambda block: block.place)
def test_queries_run(block: Block, role: str, history: psycopg.Connection) -> None:
    with history.transaction(force_rollback=True):
        if block.directive != "as the owner":
            role = block.directive.removeprefix("as ") or role  # The page names another role that it needs.
            history.execute(psycopg.sql.SQL("SET LOCAL ROLE {}").format(psycopg.sql.Identifier(role)))
        assert history.execute(block.text.encode()).fetchall() != []


def test_the_key_from_the_query_equals_the_message_id_header(history: psycopg.Connection) -> None:
    (block,) = [block for block in QUERIES if "AS key" in block.text]
    (message_id, key, *_), *_ = history.execute(block.text.encode()).fetchall()
    (created_at,) = history.execute(
        "SELECT created_at FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchone() or (None,)
    assert replace(outgoing(message_id=message_id), created_at=created_at).idempotency_key == key


def test_plain_sql_enqueues(rolled_back: psycopg.Connection) -> None:
    enqueues = [block for block in all_blocks("sql") if block.directive == "run"]
    for block in enqueues:
        rolled_back.execute(block.text.encode())
    topics = rolled_back.execute("SELECT topic FROM pgoutbox.message ORDER BY id").fetchall()
    assert topics == [
        ("mail.welcome",),
        ("mail.registration",),
        ("mail.reminder",),
        ("mail.reminder",),
        ("mail.order",),
    ]  # A duplicate of the reminder is not enqueued.


CAP: Final = 1_000


@pytest.fixture
def capped(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Fill a queue to the page's cap except for two messages. Its trigger disappears with the transaction."""
    (block,) = [block for block in all_blocks("sql") if block.directive == "run as the owner: cap"]
    assert f"refuse_above_cap({CAP})" in block.text
    for number in range(6):  # Each part of the count has its share.
        enqueue(rolled_back, queue="import", ordering_key=str(number) if number % 2 else None)
    rolled_back.execute("UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1 WHERE id % 3 = 0")
    for _ in range(CAP - 8):
        enqueue(rolled_back, queue="import")
    rolled_back.execute(block.text.encode())
    return rolled_back


def refused(connection: psycopg.Connection, statement: str) -> bool:
    try:
        with connection.transaction():
            connection.execute(statement.encode())
    except psycopg.errors.ConfigurationLimitExceeded:
        return True
    return False


@pytest.mark.slow
def test_a_capped_queue_is_full_at_its_cap_and_other_queues_are_not(capped: psycopg.Connection) -> None:
    one = "SELECT pgoutbox.enqueue('greet', '1', 'import')"
    three = """
        SELECT pgoutbox.enqueue_many(
            (
                SELECT jsonb_agg(jsonb_build_object('topic', 'a', 'payload', n, 'queue', 'import'))
                FROM generate_series(1, 3) AS n
            )
        )
    """
    capped.execute("SET LOCAL ROLE pgoutbox_producer")
    assert refused(capped, three)
    assert [refused(capped, one) for _ in range(4)] == [False, False, True, True]
    assert not refused(capped, three.replace("'import'", "'mail'"))
    with (
        pytest.raises(
            psycopg.errors.ConfigurationLimitExceeded, match="queue import is full: 1000 messages are pending"
        ),
        capped.transaction(),
    ):
        capped.execute(one.encode())
    with_fallback = Outbox()
    assert with_fallback.on(capped).enqueue("greet", 1, queue="import", best_effort=True) is None
    assert with_fallback.on(capped).enqueue("greet", 1, queue="mail") is not None


@pytest.mark.slow
def test_a_full_queue_accepts_redriven_and_retried_messages(capped: psycopg.Connection) -> None:
    failed = put(capped, State.FAILED, queue="import")
    capped.execute("UPDATE pgoutbox.message_failed SET created_at = now() - interval '1 day'")
    for _ in range(2):
        enqueue(capped, queue="import")
    assert refused(capped, "SELECT pgoutbox.enqueue('greet', '1', 'import')")
    (claimed,) = claim(capped, queue="import", total=1)
    capped.execute("UPDATE pgoutbox.message SET state = 'pending', lane = 1 WHERE id = %s", [claimed.id])
    assert capped.execute("SELECT r.result FROM pgoutbox.redrive(%s) AS r", [[failed]]).fetchall() == [("redriven",)]


@pytest.fixture
def roles(rolled_back: psycopg.Connection) -> psycopg.Connection:
    """Create the roles of the page with its grants; they disappear with the transaction."""
    (block,) = [block for block in all_blocks("sql") if block.directive == "run as the owner"]
    rolled_back.execute(block.text.encode())
    return rolled_back


def test_the_privacy_role_of_the_page_exports_and_the_application_erases(roles: psycopg.Connection) -> None:
    grant, erase = (
        block.text.encode()
        for name in ("privacy", "erase")
        for block in all_blocks("sql")
        if block.directive == f"run as the owner: {name}"
    )
    roles.execute("CREATE ROLE club_privacy; GRANT pgoutbox_operator TO club_privacy")
    roles.execute(grant)
    roles.execute("GRANT EXECUTE ON FUNCTION pgoutbox.erase TO club_app")
    message_id = enqueue(roles, owner="account-7")
    with roles.transaction():
        roles.execute("SET LOCAL ROLE club_privacy")
        assert [one["id"] for one in Operator(roles).export(owner="account-7")] == [message_id]
        assert Operator(roles).mentions("account-7") == [Mention("message", "owner", message_id)]
        roles.execute("SET LOCAL ROLE club_app")
        assert roles.execute(erase).fetchall() == [(message_id, "erased")]


def test_the_owner_finds_and_forbids_other_destinations_as_the_pages_say(rolled_back: psycopg.Connection) -> None:
    blackout, revoke, compare = (
        block.text.encode()
        for name in ("blackout", "revoke", "compare")
        for block in all_blocks("sql")
        if block.directive == f"run as the owner: {name}"
    )
    message_id = put(rolled_back, State.FAILED, destination="mailto:ada@example.org")
    Operator(rolled_back).correct(message_id, {"destination": "mailto:eve@example.com"})
    assert [row[3] for row in rolled_back.execute(compare).fetchall()] == [[message_id]]
    rolled_back.execute(revoke)
    rolled_back.execute("SET LOCAL ROLE pgoutbox_operator")
    assert not Operator(rolled_back).corrects()
    rolled_back.execute("RESET ROLE")
    rolled_back.execute(blackout)
    assert rolled_back.execute("SELECT count(*) FROM pgoutbox.blackout_view").fetchone() == (2,)


def test_the_application_role_of_the_page_enqueues_and_cancels(roles: psycopg.Connection) -> None:
    roles.execute("SET LOCAL ROLE club_app")
    first = enqueue(roles, coalesce_key="k", dedupe_key="d")
    assert enqueue(roles, coalesce_key="k") > first
    assert roles.execute("SELECT pgoutbox.cancel(%s)", [first]).fetchone() == ("cancelled",)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.execute("SELECT FROM pgoutbox.message")


def test_the_application_role_of_the_page_shows_and_changes_the_messages_of_an_owner(roles: psycopg.Connection) -> None:
    (grant,) = [block.text for block in all_blocks("sql") if block.directive == "run as the owner: payloads"]
    roles.execute(grant.encode())
    roles.execute("SET LOCAL ROLE club_app")
    message_id = enqueue(roles, owner="account-7")
    assert Outbox().on(roles).edit(message_id, owner="account-7", payload={"text": "Tea at 5"}) is EditResult.EDITED
    (found,) = Outbox().on(roles).find(owner="account-7", payloads=True)
    assert found.payload == {"text": "Tea at 5"}


def test_the_worker_role_of_the_page_claims_and_finishes(roles: psycopg.Connection) -> None:
    message_id = enqueue(roles)
    roles.execute("SET LOCAL ROLE club_worker")
    assert [row.id for row in claim(roles)] == [message_id]
    assert finish_sent(roles, (message_id, 1)) == {message_id}
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.execute("DELETE FROM pgoutbox.message")


def test_the_people_roles_of_the_page_read_and_only_the_operator_acts(roles: psycopg.Connection) -> None:
    message_id = enqueue(roles)
    for person in ("club_support", "club_operator"):
        roles.execute(f"SET LOCAL ROLE {person}".encode())
        assert roles.execute("SELECT id FROM pgoutbox.message_view").fetchall() == [(message_id,)]
    roles.execute(sql.PAUSE_QUEUE, {"queue": "default", "seconds": None})
    assert roles.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchone() == ("cancelled",)


# --- the tutorial -----------------------------------------------------------------------------------------------------

SMTP_PORT: Final = "8025"
VOLATILE: Final = [
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)"), "TIME"),
    (re.compile(r"\b[\w.-]+:\d+:[0-9a-f]{8}\b"), "WORKER"),
    (re.compile(r"^Date: .*", re.MULTILINE), "Date: TIME"),
    (re.compile(r"^(Message-ID: <\d+)-[0-9a-f]+@", re.MULTILINE), r"\1-MICROSECOND@"),
    (re.compile(r"^X-Peer: .*", re.MULTILINE), "X-Peer: PEER"),
    (re.compile(r"/reset/\S+"), "/reset/TOKEN"),
    (re.compile(r"\[Errno \d+\]"), "[Errno N]"),
    (re.compile(r"[ \t]+"), " "),
]


def settled(text: str) -> list[str]:
    """Remove the values that vary from run to run, and the white space that aligns columns."""
    for pattern, replacement in VOLATILE:
        text = pattern.sub(replacement, text)
    return [line.strip() for line in text.strip().splitlines()]


def free_port() -> int:
    """Return a port with as many digits as the page's, because a long error is cut at a certain length."""
    for port in random.sample(range(2_000, 10_000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port among a hundred")


@dataclass
class Terminals:
    """A reader's terminals: one to type in, and others in which a program runs."""

    directory: Path
    environment: dict[str, str]
    port: int
    stack: ExitStack
    background: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """Use a free port: the page's port is in use on many machines."""
        return text.replace(SMTP_PORT, str(self.port))

    def export(self, block: Block) -> None:
        for line in self.here(block.text).splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            self.environment[name] = shlex.split(value)[0]

    def start(self, name: str, typed: str) -> None:
        output = (self.directory / f"{name}.log").open("w+")
        process = subprocess.Popen(
            shlex.split(self.here(typed)),
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.background[name] = process
        self.stack.callback(output.close)
        self.stack.callback(self.stop, name)
        if name == "database":
            line = self.wait_until(lambda: re.search(r"^export PGOUTBOX_DSN='(.*)'$", self.output(name), re.MULTILINE))
            self.environment["PGOUTBOX_DSN"] = line[1]
        else:
            self.wait_until(self.accepts_mail)

    def wait_until(self, condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the condition gives
        return wait_until(condition, lambda: str({name: self.output(name) for name in self.background}))

    def accepts_mail(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def output(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def stop(self, name: str) -> None:
        process = self.background.pop(name, None)
        if process is None:
            return
        assert process.stdin is not None
        if name == "database":
            process.stdin.write("\n")
        else:
            process.terminate()
        process.stdin.close()
        process.wait(timeout=30)

    def type(self, typed: str) -> str:
        """Return a command's output on both streams."""
        done = subprocess.run(
            ["bash", "-c", self.here(typed)],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout


def programs_in(directory: Path) -> Path:
    """Create the programs that the reader types. The application and pgoutbox fork from a process with the imports."""
    directory.mkdir()
    libraries = forks(*LIBRARIES)
    other = f'[ "$1" = club.py ] || exec "{sys.executable}" "$@"\n'
    for name, script in (("pgoutbox", libraries.script("-m", "pgoutbox")), ("python", other + libraries.script())):
        (directory / name).write_text(f"#!/bin/sh\n{script}")
        (directory / name).chmod(0o700)
    return directory


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    received = 0
    with ExitStack() as stack:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        environment |= {
            "PATH": f"{programs_in(tmp_path / 'bin')}{os.pathsep}{environment['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }
        reader = Terminals(tmp_path, environment, free_port(), stack)
        for block in blocks_of(DOCS / "tutorial.md"):
            action, _, name = block.directive.partition(": ")
            if action == "stop":
                reader.stop(name)
            if block.file_name is not None:
                (tmp_path / block.file_name).write_text(block.text)
            elif block.language == "sh" and "export" in block.text:
                reader.export(block)
            elif action == "background":
                reader.start(name, block.text.removeprefix("$ ").strip())
            elif action == "received":
                received += 1
                last = reader.output(name).rpartition("---------- MESSAGE FOLLOWS")
                assert settled("".join(last[1:])) == settled(block.text), block.place
            elif block.language == "console":
                play(reader, block)
    assert received == 2


def play(reader: Terminals, block: Block) -> None:
    """Type every command of a console block and compare its output."""
    for exchange in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, _, expected = exchange.partition("\n")
        assert settled(reader.type(typed)) == settled(reader.here(expected)), f"{block.place}: {typed}"
