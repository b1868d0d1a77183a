"""Tests that examples/password_reset.py does what it promises: run as a command, delivered by a worker process."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql as composable

from examples.password_reset import TABLES, Member, ask_for_reset, change_password, hash_of
from tests.support import webhook_server as http
from tests.support.example_shell import Shell, mails, states
from tests.support.outbox_actions import make_due, row_of, state_of
from tests.support.smtp_server import Inbox, Misbehaviour, parsed, scripted_server
from tests.support.waiting import until
from tests.support.webhook_server import webhook_server

if TYPE_CHECKING:
    from tests.conftest import Connect

pytestmark = pytest.mark.slow

ADA = Member(member_id=1, email="ada@example.org")
NOTICE = (ADA.email, "If that was not you, call the office.")


@pytest.fixture
def application(connect: Connect) -> psycopg.Connection:
    """A connection to the application's tables with Ada's account, each statement in its own transaction."""
    connection = connect(autocommit=True)
    connection.execute(TABLES)
    connection.execute("INSERT INTO account VALUES (1, 'ada@example.org')")
    return connection


def asked(application: psycopg.Connection) -> int:
    """Let Ada ask for a reset. Return the message id."""
    with application.transaction():
        return ask_for_reset(application, ADA)


async def deliver(shell: Shell) -> None:
    await shell.deliver("password_reset", "--queue", "critical")


def resets(inbox: Inbox) -> list[str]:
    """Return the tokens that arrived, in the order of arrival."""
    return [text.rpartition("/")[2] for _, text in mails(inbox) if text.startswith("https://club.example.org/reset/")]


def stored_hashes(connection: psycopg.Connection) -> list[tuple[int, str]]:
    return connection.execute("SELECT account_id, token_hash FROM reset_token").fetchall()


def tables_of_the_queue(connection: psycopg.Connection) -> dict[str, str]:
    """Return the contents of all pgoutbox tables as text."""
    names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'pgoutbox'").fetchall()
    every_row = composable.SQL("SELECT * FROM pgoutbox.{}")
    return {n: str(connection.execute(every_row.format(composable.Identifier(n))).fetchall()) for (n,) in names}


def tables_with(connection: psycopg.Connection, *tokens: str) -> list[str]:
    """Return the tables of the queue that contain a token or its hash."""
    secrets = [*tokens, *map(hash_of, tokens)]
    return [name for name, text in tables_of_the_queue(connection).items() if any(secret in text for secret in secrets)]


async def test_of_three_resets_the_newest_is_sent_and_each_change_has_its_notice(
    shell: Shell, inbox: Inbox, dsn: str
) -> None:
    assert [line.rpartition(" ")[2] for line in await shell.example("password_reset")] == [
        "ada@example.org",
        "ada@example.org",
        "gone@example.org",
        "ada@example.org",
        "ada@example.org",
    ]
    await deliver(shell)
    (token,) = resets(inbox)
    assert sorted(mails(inbox)) == [NOTICE, NOTICE, (ADA.email, f"https://club.example.org/reset/{token}")]
    with psycopg.connect(dsn) as connection:
        assert stored_hashes(connection) == [(1, hash_of(token))]
        reasons = connection.execute("SELECT skip_reason FROM pgoutbox.message WHERE state = 'skipped' ORDER BY id")
        superseded, gone = (reason for (reason,) in reasons)
        assert tables_with(connection, token) == []
    assert superseded.startswith("superseded by")
    assert gone == "the account is gone"
    assert states(dsn) == {"sent": 3, "skipped": 2}


async def test_a_token_changes_the_password_once(shell: Shell, inbox: Inbox, application: psycopg.Connection) -> None:
    asked(application)
    await deliver(shell)
    (token,) = resets(inbox)
    assert await shell.example("password_reset", token, token) == ["password changed", "this token is not valid"]
    assert application.execute("SELECT FROM account WHERE password_changed_at IS NOT NULL").fetchone() is not None
    await deliver(shell)
    assert mails(inbox)[1:] == [NOTICE]


def test_a_change_that_rolls_back_has_no_notice(application: psycopg.Connection, dsn: str) -> None:
    with application.transaction(force_rollback=True):
        change_password(application, ADA)
    assert states(dsn) == {}


async def test_a_failed_attempt_leaves_no_token_and_the_next_one_sends_its_own(
    shell: Shell, application: psycopg.Connection
) -> None:
    async with scripted_server({".": [Misbehaviour.DROP, "451 4.3.0 later"]}) as server:
        shell.environment["PGOUTBOX_SMTP_PORT"] = str(server.port)
        reset = asked(application)
        for _ in range(2):
            await deliver(shell)
            assert row_of(application, reset).state == "pending"
            # The e-mail was, or may have been, sent, and its token is not valid anywhere.
            assert stored_hashes(application) == []
            make_due(application, reset)
        await deliver(shell)
    tokens = [token_in(content) for content in server.contents]
    tables = tables_of_the_queue(application)
    assert len(set(tokens)) == 3
    assert stored_hashes(application) == [(1, hash_of(tokens[2]))]
    assert {"message_done", "dedupe"} <= tables.keys()
    assert "outcome unknown" in tables["message_done"]
    assert tables_with(application, *tokens) == []


def token_in(content: bytes) -> str:
    body = parsed(content).get_body()
    assert body is not None
    return str(body.get_content()).strip().rpartition("/")[2]


async def test_a_newer_reset_follows_an_older_one_in_flight_and_its_token_is_valid(
    shell: Shell, inbox: Inbox, application: psycopg.Connection
) -> None:
    inbox.delays = lambda _: True
    asked(application)
    delivery = asyncio.create_task(deliver(shell))
    await until(lambda: inbox.delayed)
    newer = asked(application)
    inbox.may_go_on.set()
    await delivery
    _, token = resets(inbox)
    assert stored_hashes(application) == [(1, hash_of(token))]
    assert state_of(application, newer) == "sent"


async def test_a_stale_redrive_is_refused_and_names_the_newer_reset(
    shell: Shell, inbox: Inbox, application: psycopg.Connection
) -> None:
    async with scripted_server({"RCPT TO:<ada@example.org>": "550 5.1.1 no such user"}) as server:
        older = asked(application)
        await deliver(Shell(shell.environment | {"PGOUTBOX_SMTP_PORT": str(server.port)}))
    assert state_of(application, older) == "failed"
    newer = asked(application)
    refused = f"message {older} is superseded by message {newer}, which is newer"
    assert refused in await shell.pgoutbox("redrive", str(older), code=1)
    await deliver(shell)
    # Also after the newer one was sent.
    assert refused in await shell.pgoutbox("redrive", str(older), code=1)
    await deliver(shell)
    (token,) = resets(inbox)
    assert stored_hashes(application) == [(1, hash_of(token))]
    assert state_of(application, older) == "failed"


async def test_a_resend_sends_a_new_token_and_the_old_one_is_not_valid(
    shell: Shell, inbox: Inbox, application: psycopg.Connection
) -> None:
    original = asked(application)
    await deliver(shell)
    copy = int(await shell.pgoutbox("resend", str(original)))
    await deliver(shell)
    first, second = resets(inbox)
    assert first != second
    assert stored_hashes(application) == [(1, hash_of(second))]
    assert tables_with(application, first, second) == []
    # The copy is the newest of its coalesce key.
    refused = f"message {original} is superseded by message {copy}, which is newer"
    assert refused in await shell.pgoutbox("resend", str(original), code=1)
    assert await shell.example("password_reset", first, second) == ["this token is not valid", "password changed"]


async def test_a_provider_sends_the_resets_and_the_notices_over_http(
    shell: Shell, inbox: Inbox, application: psycopg.Connection
) -> None:
    del shell.environment["PGOUTBOX_SMTP_HOST"]
    async with webhook_server(http.answer(202)) as api:
        shell.environment.update(MAIL_PROVIDER_URL=api.url("/v1", scheme="http"), MAIL_PROVIDER_KEY="k3y")
        asked(application)
        with application.transaction():
            change_password(application, ADA)
        await deliver(shell)
    requests = [(request, json.loads(request.body)) for request in api.received]
    assert [request.target for request, _ in requests] == ["/v1/send", "/v1/send"]
    assert {request.headers["authorization"] for request, _ in requests} == {"Bearer k3y"}
    assert [body["recipients"] for _, body in requests] == [[ADA.email], [ADA.email]]
    contents = {parsed(content)["Subject"]: content for content in (base64.b64decode(b["mime"]) for _, b in requests)}
    assert contents.keys() == {"Your new password", "Your password was changed"}
    token = token_in(contents["Your new password"])
    assert stored_hashes(application) == [(1, hash_of(token))]
    assert tables_with(application, token, "k3y") == []
    assert inbox.connection_count == 0


async def test_a_provider_that_refuses_the_attempt_rolls_its_token_back(
    shell: Shell, application: psycopg.Connection, dsn: str
) -> None:
    async with webhook_server(http.answer(503), http.answer(202)) as api:
        shell.environment.update(MAIL_PROVIDER_URL=api.url("/v1", scheme="http"), MAIL_PROVIDER_KEY="k3y")
        reset = asked(application)
        await deliver(shell)
        make_due(application, reset)
        await deliver(shell)
    tokens = [token_in(base64.b64decode(json.loads(request.body)["mime"])) for request in api.received]
    assert len({request.headers["idempotency-key"] for request in api.received}) == 1
    assert stored_hashes(application) == [(1, hash_of(tokens[-1]))]
    assert len(set(tokens)) == 2
    assert states(dsn) == {"sent": 1}
